"""What the row of an open token says, on candidates cut by hand."""

from __future__ import annotations

import math

import torch

from logitstore.consumer.open_tokens import continuations, log_mass_that_begins_with
from logitstore.consumer.rows import TeacherRows

# Teacher tokens ation, at, ational, a, ate and one that the student writes with four and more; student: at 1, ion 2,
# al 3, a 4, ate 5, x 6.
PIECES = torch.tensor([[1, 2, -1, -1], [1, -1, -1, -1], [1, 2, 3, -1], [4, -1, -1, -1], [5, -1, -1, -1], [6, 6, 6, 6]])


def rows_of(masses: dict[int, float]) -> TeacherRows:
    ids = torch.tensor([[*masses, -1, 99]])  # with fill, and padding of the teacher's head
    return TeacherRows(ids, torch.tensor([[*map(math.log, masses.values()), -math.inf, math.log(0.1)]]), None)


ROW = rows_of({0: 0.2, 1: 0.3, 2: 0.1, 3: 0.2, 4: 0.1})


def going_on(written: list[int], *, ended: bool = False, row: TeacherRows = ROW) -> tuple[dict[int, float], float]:
    """Mass by the student's next token, and of an end."""
    filled = torch.tensor([written + [-1] * (3 - len(written))])
    found = continuations(row, PIECES, filled, torch.tensor([len(written)]), torch.tensor([ended]))
    masses: dict[int, float] = {}
    for token, mass in zip(found.next_NK[0].tolist(), found.log_masses_NK[0].exp().tolist(), strict=True):
        assert (mass > 0) == (token >= 0)
        if token >= 0:
            masses[token] = masses.get(token, 0.0) + mass
    return masses, found.log_end_N.exp().item()


def assert_close(found: tuple[dict[int, float], float], masses: dict[int, float], end: float) -> None:
    assert found[0].keys() == masses.keys()
    torch.testing.assert_close(torch.tensor([*found[0].values(), found[1]]), torch.tensor([*masses.values(), end]))


def test_candidates_that_begin_alike_go_on_or_end() -> None:
    assert_close(going_on([1]), {2: 0.5}, 0.5)
    assert_close(going_on([1, 2]), {3: 1 / 3}, 2 / 3)


def test_no_open_token_ends_for_certain() -> None:
    assert_close(going_on([]), {}, 1.0)


def test_a_beginning_that_no_candidate_has_says_nothing() -> None:
    assert_close(going_on([7]), {}, 1.0)


def test_the_texts_own_token_ends_however_it_would_be_cut() -> None:
    assert_close(going_on([1], ended=True), {2: 0.1 / 0.6}, 0.5 / 0.6)
    assert_close(going_on([7], ended=True), {}, 1.0)


def test_all_pieces_that_are_known_are_told_apart() -> None:
    assert_close(going_on([6, 6, 6], row=rows_of({5: 0.4, 1: 0.6})), {6: 1.0}, 0.0)


def test_mass_of_candidates_that_begin_with_a_token_leaves_out_the_token_itself() -> None:
    found = log_mass_that_begins_with(ROW, PIECES, torch.tensor([1])).exp()
    torch.testing.assert_close(found, torch.tensor([0.3]))
    assert log_mass_that_begins_with(ROW, PIECES, torch.tensor([5])).item() == -math.inf

"""The realised token as a cell of its own, against dense float64 distributions where the right answer is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from logitstore.consumer.divergences import teacher_loss
from logitstore.consumer.primitive import head_outputs
from logitstore.consumer.projected_kl import split_realised, within_class
from logitstore.consumer.rows import TeacherRows

GROUPS = torch.tensor([0, 0, 1, 1, 1, 2, 3, 3])
"""Student tokens to classes; class 2 has one token alone."""


def head_at(logits_NV: Tensor, rows: TeacherRows, realised_N: Tensor):
    """The head whose logits are these."""
    eye = torch.eye(logits_NV.shape[1], dtype=logits_NV.dtype)
    return head_outputs(
        logits_NV, eye, rows.ids_NK, groups=GROUPS, num_groups=4, realised_T=realised_N, realised_cell=True
    )


def row(masses: dict[int, float], rest: float | None) -> TeacherRows:
    ids = torch.tensor([[*masses, -1]])
    log_masses = torch.tensor([[*map(math.log, masses.values()), -math.inf]], dtype=torch.float64)
    return TeacherRows(ids, log_masses, None if rest is None else torch.tensor([rest], dtype=torch.float64).log())


def loss(logits: Tensor, rows: TeacherRows, realised: int, log_realised: float) -> Tensor:
    targets = torch.tensor([realised])
    outputs = head_at(logits[None], rows, targets)
    is_realised = rows.ids_NK == GROUPS[targets][:, None]
    return teacher_loss(*split_realised(rows, outputs, is_realised, torch.tensor([log_realised])))[0]


@pytest.fixture
def logits() -> Tensor:
    return torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()


def test_partition_kl_is_that_of_the_finer_cells(logits: Tensor) -> None:
    q = logits.softmax(-1)
    found = loss(logits, row({0: 0.2, 1: 0.5}, 0.3), realised=3, log_realised=math.log(0.4))
    cells = {0.2: q[:2].sum(), 0.4: q[3], 0.1: q[2] + q[4], 0.3: q[5:].sum()}
    expected = sum(p * (math.log(p) - mass.log()) for p, mass in cells.items())
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(each, logits, retain_graph=True)[0] for each in (found, expected)))


def test_sampled_cross_entropy_is_that_of_the_finer_cells(logits: Tensor) -> None:
    q = logits.softmax(-1)
    found = loss(logits, row({1: 0.5, 3: 0.3}, None), realised=2, log_realised=math.log(0.45))
    expected = -(0.45 * q[2].log() + 0.05 * (q[3] + q[4]).log() + 0.3 * q[6:].sum().log())
    torch.testing.assert_close(found, expected)


def test_a_class_stays_whole_without_the_teachers_word_on_the_token(logits: Tensor) -> None:
    q, rows = logits.softmax(-1), row({0: 0.2, 1: 0.5}, 0.3)
    found = loss(logits, rows, realised=3, log_realised=math.nan)
    cells = {0.2: q[:2].sum(), 0.5: q[2:5].sum(), 0.3: q[5:].sum()}
    torch.testing.assert_close(found, sum(p * (math.log(p) - mass.log()) for p, mass in cells.items()))


def test_equal_distributions_have_no_divergence_and_no_gradient(logits: Tensor) -> None:
    q = logits.softmax(-1).detach()
    rows = row({0: float(q[:2].sum()), 1: float(q[2:5].sum())}, float(q[5:].sum()))
    found = loss(logits, rows, realised=3, log_realised=float(q[3].log()))
    assert abs(found.item()) < 1e-9
    assert torch.autograd.grad(found, logits)[0].abs().max() < 1e-7


def test_mass_that_the_students_tokens_cannot_earn_goes_to_the_rest(logits: Tensor) -> None:
    q = logits.softmax(-1)
    found = loss(logits, row({0: 0.3, 2: 0.6}, 0.1), realised=5, log_realised=math.log(0.5))
    cells = {0.3: q[:2].sum(), 0.5: q[5], 0.2: q[2:5].sum() + q[6:].sum()}
    torch.testing.assert_close(found, sum(p * (math.log(p) - mass.log()) for p, mass in cells.items()))
    sampled = loss(logits, row({0: 0.3, 2: 0.6}, None), realised=5, log_realised=math.log(0.5))
    torch.testing.assert_close(sampled, -(0.3 * q[:2].sum().log() + 0.5 * q[5].log()))


def test_a_realised_token_that_is_all_of_its_class_leaves_nothing(logits: Tensor) -> None:
    # Rounded log-probs may put it above its class by a hair.
    q = logits.softmax(-1)
    found = loss(logits, row({1: 0.5, 0: 0.4}, 0.1), realised=3, log_realised=math.log(0.5) + 1e-9)
    expected = 0.5 * (math.log(0.5) - q[3].log()) + 0.4 * (math.log(0.4) - q[:2].sum().log())
    expected = expected + 0.1 * (math.log(0.1) - q[5:].sum().log())
    # What is left of the class, and its q, is a cell of no mass.
    torch.testing.assert_close(found, expected)


def test_within_class_is_the_rest_of_the_cross_entropy(logits: Tensor) -> None:
    q, rows, targets = logits.softmax(-1), row({0: 0.2, 1: 0.5}, 0.3), torch.tensor([3])
    outputs = head_at(logits[None], rows, targets)
    is_realised = rows.ids_NK == GROUPS[targets][:, None]
    torch.testing.assert_close(within_class(outputs, is_realised)[0], -(q[3] / q[2:5].sum()).log())
    assert within_class(outputs, torch.zeros_like(is_realised)).item() == 0


def test_draws_are_unbiased_for_the_whole_distribution(logits: Tensor) -> None:
    """Systematic draws at a threshold, in every one of many phases: their mean is the loss of all classes."""
    theta, p = 0.2, {0: 0.13, 1: 0.5, 2: 0.21, 3: 0.16}
    whole = loss(logits, row(p, None), realised=3, log_realised=math.log(0.45))
    sampled = [token for token, mass in p.items() if mass < theta]
    phases = (torch.arange(2000) + 0.5) / 2000
    mean = torch.zeros((), dtype=torch.float64)
    for phase in phases.tolist():
        masses, reached = {token: mass for token, mass in p.items() if mass >= theta}, phase
        for token in sampled:
            before, reached = reached, reached + p[token] / theta
            if math.floor(reached) > math.floor(before):
                masses[token] = theta
        mean = mean + loss(logits, row(masses, None), realised=3, log_realised=math.log(0.45)) / len(phases)
    torch.testing.assert_close(mean, whole, rtol=2e-3, atol=0)

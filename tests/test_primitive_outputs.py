"""Projected cells, subsets and largest logits, against the dense float64 reference.

Shapes: T positions, D hidden size, V vocabulary, K listed ids, C cells, M largest logits, G subsets.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dense_head import C, D, T, V, compare, problem, weigh  # noqa: E402
from torch import Tensor  # noqa: E402

from logitstore.consumer import primitive  # noqa: E402
from logitstore.consumer.cell_maps import SparseProjection  # noqa: E402
from logitstore.consumer.primitive import head_outputs  # noqa: E402

GROUPS = (torch.arange(V) * 7919) % C
HEADS: dict[str, dict[str, Any]] = {"plain": {}, "capped": {"softcap": 4.0, "scale": 0.5, "temperature": 2.0}}


def random_projection(num_entries: int = V, num_cells: int = C, *, whole: bool = False) -> SparseProjection:
    """Rows of one to three cells; without ``whole`` some rows have none, and the last two entries are padding."""
    generator = torch.Generator().manual_seed(4)
    num_rows = num_entries if whole else num_entries - 2
    sizes = torch.randint(1 if whole else 0, 4, (num_rows,), generator=generator)
    cells = torch.cat([torch.randperm(num_cells - 2, generator=generator)[:size] for size in sizes.tolist()])
    weights = torch.cat([torch.rand(size, generator=generator).softmax(0) for size in sizes.tolist()])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    return SparseProjection.from_csr(offsets, cells.int(), weights, num_cells, num_entries)


def some_subsets() -> Tensor:
    generator = torch.Generator().manual_seed(5)
    subsets_GV = torch.rand(4, V, generator=generator) < torch.tensor([[0.02], [0.5], [0.95], [0.3]])
    subsets_GV[3] = False
    subsets_GV[3, 77] = True
    return subsets_GV


@pytest.mark.parametrize("keep_bytes", [0, 2**30], ids=["recomputed", "kept"])
@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("whole", [True, False])
def test_projected_cells_match_dense(
    monkeypatch: pytest.MonkeyPatch, whole: bool, options: dict[str, Any], keep_bytes: int
) -> None:
    monkeypatch.setattr(primitive, "KEEP_BYTES", keep_bytes)
    inputs = problem(5, num_cells=C - 2, fill=True)
    compare(*inputs, projection=random_projection(whole=whole), realised_T=torch.arange(T), chunk_rows=100, **options)


def test_projected_cells_and_rest_are_all_mass() -> None:
    hidden_TD, head_VD, _ = problem(1)
    ids_TK = torch.arange(C - 5).repeat(T, 1)
    outputs = head_outputs(hidden_TD.double(), head_VD.double(), ids_TK, projection=random_projection())
    total_T = torch.cat([outputs.gathered_TK, outputs.complement_T[:, None]], -1).logsumexp(-1)
    # Two cells that no entry reaches are floored at 1e-30, not at zero.
    torch.testing.assert_close(total_T, outputs.logsumexp_T, rtol=0, atol=1e-7)


def test_one_hot_projection_equals_classes() -> None:
    hidden_TD, head_VD, ids_TK = problem(7, num_cells=C, fill=True)
    one_hot = SparseProjection.from_csr(torch.arange(V + 1), GROUPS, torch.ones(V), C)
    results = []
    for options in ({"groups": GROUPS}, {"projection": one_hot}):
        hidden = hidden_TD.clone().requires_grad_()
        outputs = head_outputs(hidden, head_VD, ids_TK, **options)
        weigh(outputs).backward()
        results.append([*outputs[:3], hidden.grad])
    for classes, projected in zip(*results, strict=True):
        torch.testing.assert_close(classes, projected)


def test_whole_projection_with_everything_listed_leaves_no_complement() -> None:
    hidden_TD, head_VD, _ = problem(1)
    hidden = hidden_TD.clone().requires_grad_()
    ids_TK = torch.arange(C).repeat(T, 1)
    outputs = head_outputs(hidden, head_VD, ids_TK, projection=random_projection(whole=True))
    assert bool((outputs.complement_T == -math.inf).all())
    weigh(outputs).backward()
    assert hidden.grad is not None
    assert bool(hidden.grad.isfinite().all())


@pytest.mark.parametrize("rest", [1e-3, 1e-7, 1e-12])
def test_complement_of_projected_cells_keeps_relative_precision(rest: float) -> None:
    hidden_TD, head_VD, _ = problem(1)
    bias = torch.zeros(V)
    bias[0] = -math.log(rest)
    projection = SparseProjection.from_csr(torch.arange(V + 1), torch.arange(V), torch.ones(V), V)
    compare(hidden_TD * 0.1, head_VD, torch.zeros(T, 1, dtype=torch.int64), bias=bias, projection=projection)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (([0, 1, 2], [0, 1], [1.0, 1.5]), "row 1 sums to 1.5"),
        (([0, 1, 3], [0, 1], [1.0, 1.0]), "offsets 0..3"),
        (([0, 1, 2], [0, 9], [1.0, 1.0]), r"cells in 0..4"),
        (([0, 1, 2], [0, 1], [1.0, -1.0]), "weights >= 0"),
    ],
)
def test_what_is_no_projection_is_refused(arrays: tuple[list[int], list[int], list[float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SparseProjection.from_csr(*(torch.tensor(array) for array in arrays), num_cells=5)


def test_projection_of_another_head_is_refused() -> None:
    hidden_TD, head_VD, ids_TK = problem(2)
    projection = random_projection()
    with pytest.raises(ValueError, match="projection is of 507 entries, expected V=506"):
        head_outputs(hidden_TD, head_VD[:-1], ids_TK, projection=projection)
    with pytest.raises(ValueError, match="one way to cut"):
        head_outputs(hidden_TD, head_VD, ids_TK, projection=projection, groups=GROUPS)
    with pytest.raises(ValueError, match="500 rows, but the head only 400"):
        SparseProjection.from_csr(torch.arange(501), torch.zeros(500), torch.ones(500), 1, 400)


def test_cells_that_nothing_maps_to_are_unreachable() -> None:
    projection = SparseProjection.from_csr(
        torch.tensor([0, 2, 2, 3]), torch.tensor([0, 3, 2]), torch.tensor([0.7, 0.3, 0.0]), num_cells=5
    )
    assert projection.reachable().tolist() == [True, False, False, True, False]
    assert not projection.covers_everything


CUTS: dict[str, dict[str, Any]] = {
    "tokens": {},
    "classes": {"groups": GROUPS},
    "realised apart": {"groups": GROUPS, "realised_T": torch.arange(T), "realised_cell": True},
    "projected": {"projection": random_projection()},
}


@pytest.mark.parametrize("keep_bytes", [0, 2**30], ids=["recomputed", "kept"])
@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_subsets_match_dense(
    monkeypatch: pytest.MonkeyPatch, cut: dict[str, Any], options: dict[str, Any], keep_bytes: int
) -> None:
    monkeypatch.setattr(primitive, "KEEP_BYTES", keep_bytes)
    inputs = problem(9, num_cells=C - 2, fill=True)
    compare(*inputs, subsets_GV=some_subsets(), chunk_rows=100, **cut, **options)


def test_a_subset_within_the_listed_ids_matches_dense() -> None:
    hidden_TD, head_VD, ids_TK = problem(5)
    ids_TK[:, :2] = torch.tensor([3, 9])
    ids_TK = torch.cat([ids_TK, ids_TK[:, :1]], -1)
    subsets_GV = torch.zeros(1, V, dtype=torch.bool)
    subsets_GV[0, [3, 9]] = True
    compare(hidden_TD, head_VD, ids_TK, subsets_GV=subsets_GV)


def test_an_empty_subset_has_no_value_and_no_gradient() -> None:
    hidden_TD, head_VD, ids_TK = problem(2)
    hidden = hidden_TD.clone().requires_grad_()
    outputs = head_outputs(hidden, head_VD, ids_TK, subsets_GV=torch.zeros(1, V, dtype=torch.bool))
    assert outputs.subsets_TG is not None
    assert bool((outputs.subsets_TG == -math.inf).all())
    outputs.subsets_TG.backward(torch.ones(T, 1))
    assert hidden.grad is not None
    assert not bool(hidden.grad.any())


def test_a_subset_that_underflows_stays_finite() -> None:
    hidden_TD, head_VD, ids_TK = problem(2)
    subsets_GV = (torch.arange(V) < 5)[None]
    bias = torch.where(subsets_GV[0], 0.0, 300.0)
    hidden = hidden_TD.clone().requires_grad_()
    outputs = head_outputs(hidden, head_VD, ids_TK, subsets_GV=subsets_GV, bias=bias)
    assert outputs.subsets_TG is not None
    assert bool((outputs.subsets_TG[:, 0] - outputs.logsumexp_T > -90.0).all())
    outputs.subsets_TG.sum().backward()
    assert hidden.grad is not None
    assert bool(hidden.grad.isfinite().all())


@pytest.mark.parametrize("keep_bytes", [0, 2**30], ids=["recomputed", "kept"])
@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("num_top", [1, 33])
def test_largest_logits_match_dense(
    monkeypatch: pytest.MonkeyPatch, num_top: int, cut: dict[str, Any], options: dict[str, Any], keep_bytes: int
) -> None:
    monkeypatch.setattr(primitive, "KEEP_BYTES", keep_bytes)
    inputs = problem(9, num_cells=C - 2, fill=True)
    among_V = torch.arange(V) % 3 != 0 if num_top == 33 else None
    compare(*inputs, num_top=num_top, top_among_V=among_V, chunk_rows=100, **cut, **options)


@pytest.mark.parametrize("num_top", [20, V + 3])
def test_after_the_largest_logits_that_there_are_stands_fill(num_top: int) -> None:
    hidden_TD, head_VD, ids_TK = problem(5)
    outputs, _ = compare(hidden_TD, head_VD, ids_TK, num_top=num_top, top_among_V=torch.arange(V) < 12)
    assert outputs.top_TM is not None
    assert bool((outputs.top_TM[:, 12:] == -math.inf).all())


def test_equal_logits_come_by_id_and_so_does_their_gradient() -> None:
    # Entry v of the head is its level, so that logits tie by fives.
    head_VD = torch.zeros(20, 1)
    head_VD[:, 0] = torch.tensor([3.0, 1.0, 2.0, 1.0, 0.0] * 4)
    bias = torch.zeros(20, requires_grad=True)
    ids_TK = torch.tensor([[5, -1]])
    outputs = head_outputs(torch.ones(1, 1), head_VD, ids_TK, bias=bias, num_top=10)
    assert outputs.top_TM is not None
    assert outputs.top_TM.tolist() == [[3.0] * 3 + [2.0] * 4 + [1.0] * 3]
    outputs.top_TM.backward(torch.arange(1.0, 11.0)[None])
    expected = torch.zeros(20)
    expected[[0, 10, 15, 2, 7, 12, 17, 1, 3, 6]] = torch.arange(1.0, 11.0)
    assert bias.grad is not None
    assert torch.equal(bias.grad, expected)


def test_gradcheck_in_float64() -> None:
    torch.manual_seed(0)
    hidden_TD = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    head_VD = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    ids_TK = torch.tensor([[0, 1], [2, 3], [3, 0], [1, 2]])
    projection = random_projection(9, 7)
    subsets_GV = torch.arange(9) % 2 == torch.tensor([[0], [1]])

    def run(hidden_TD: Tensor, head_VD: Tensor) -> tuple[Tensor, ...]:
        found: list[Tensor] = []
        for cut in ({}, {"projection": projection}, {"groups": torch.arange(9) % 4}):
            outputs = head_outputs(
                hidden_TD, head_VD, ids_TK, subsets_GV=subsets_GV, num_top=3, softcap=9.0, chunk_rows=3, **cut
            )
            found += [value for value in outputs if value is not None]
        return tuple(found)

    assert torch.autograd.gradcheck(run, (hidden_TD, head_VD))


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_no_rows_give_empty_outputs(cut: dict[str, Any]) -> None:
    head = torch.randn(V, D).requires_grad_()
    ids_TK = torch.zeros(0, 5, dtype=torch.int64)
    cut = {name: value[:0] if name == "realised_T" else value for name, value in cut.items()}
    outputs = head_outputs(torch.zeros(0, D), head, ids_TK, subsets_GV=some_subsets(), num_top=3, **cut)
    assert outputs.subsets_TG is not None
    assert outputs.top_TM is not None
    assert (outputs.subsets_TG.shape, outputs.top_TM.shape) == ((0, 4), (0, 3))
    weigh(outputs).backward()
    assert head.grad is not None
    assert not bool(head.grad.any())


def test_masks_of_another_kind_are_named() -> None:
    hidden_TD, head_VD, ids_TK = problem(2)
    with pytest.raises(ValueError, match=r"subsets has shape \(1, 5\), expected \[G, V=507\]"):
        head_outputs(hidden_TD, head_VD, ids_TK, subsets_GV=torch.ones(1, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"top_among has dtype torch\.float32, expected torch\.bool"):
        head_outputs(hidden_TD, head_VD, ids_TK, num_top=2, top_among_V=torch.ones(V))
    with pytest.raises(ValueError, match="num_top is 0"):
        head_outputs(hidden_TD, head_VD, ids_TK, num_top=0)

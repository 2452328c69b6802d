"""The primitive against a dense float64 reference.

Shapes: T positions, D hidden size, V vocabulary, K listed ids, C classes (the sizes are in ``dense_head``).
"""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dense_head import C, D, T, V, compare, problem, weigh  # noqa: E402
from torch import Tensor  # noqa: E402

from logitstore.consumer import primitive  # noqa: E402
from logitstore.consumer.primitive import head_outputs  # noqa: E402

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 5.0},
    "scale": {"scale": 0.25},
    "temperature": {"temperature": 2.5},
    "everything": {"softcap": 4.0, "scale": 0.5, "temperature": 2.0, "bias": torch.linspace(-2, 2, V)},
    "bias": {"bias": torch.linspace(-2, 2, V)},
}


@pytest.mark.parametrize("keep_bytes", [0, 2**30], ids=["recomputed", "kept"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("num_ids", [1, 5, 64])
def test_outputs_match_dense(
    monkeypatch: pytest.MonkeyPatch, num_ids: int, options: dict[str, Any], keep_bytes: int
) -> None:
    monkeypatch.setattr(primitive, "KEEP_BYTES", keep_bytes)
    compare(*problem(num_ids, fill=num_ids == 5), chunk_rows=100, realised_T=torch.arange(T), **options)


@pytest.mark.parametrize("keep_bytes", [0, 2**30], ids=["recomputed", "kept"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("num_ids", [1, 5, 64])
def test_outputs_on_classes_match_dense(
    monkeypatch: pytest.MonkeyPatch, num_ids: int, options: dict[str, Any], keep_bytes: int
) -> None:
    monkeypatch.setattr(primitive, "KEEP_BYTES", keep_bytes)
    groups = (torch.arange(V) * 7919) % C
    inputs = problem(num_ids, num_cells=C, fill=num_ids == 5)
    compare(*inputs, groups=groups, chunk_rows=100, realised_T=torch.arange(T), **options)


@pytest.mark.parametrize("keep_bytes", [0, 2**30], ids=["recomputed", "kept"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_outputs_with_the_realised_token_apart_match_dense(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], keep_bytes: int
) -> None:
    monkeypatch.setattr(primitive, "KEEP_BYTES", keep_bytes)
    groups = (torch.arange(V) * 7919) % (C - 1)
    groups[5] = C - 1  # alone in its class
    hidden_TD, head_VD, ids_TK = problem(9, num_cells=C, fill=True)
    realised_T = torch.arange(T) * 2 % V
    realised_T[::3] = 5  # alone, listed in some rows and not in others
    realised_T[1::7] = -1
    ids_TK[::2, 0] = groups[realised_T.clamp(min=0)][::2]  # its class is listed, perhaps twice
    compare(
        hidden_TD, head_VD, ids_TK, groups=groups, realised_T=realised_T, realised_cell=True, chunk_rows=100, **options
    )


def test_a_realised_token_apart_and_listed_classes_can_be_everything() -> None:
    hidden_TD, head_VD, _ = problem(1)
    groups = torch.arange(V) % C
    groups[5] = C
    ids_TK = torch.arange(C).repeat(T, 1)
    realised_T = torch.full((T,), 5)
    outputs, (grad_hidden, grad_head) = compare(
        hidden_TD, head_VD, ids_TK, groups=groups, realised_T=realised_T, realised_cell=True
    )
    assert bool((outputs.complement_T == -math.inf).all())
    assert bool(grad_hidden.isfinite().all() & grad_head.isfinite().all())


@pytest.mark.parametrize("others", [1e-3, 1e-7, 1e-12])
def test_a_class_without_its_realised_token_keeps_relative_precision(others: float) -> None:
    hidden_TD, head_VD, _ = problem(1)
    bias = torch.zeros(V)
    bias[0] = -math.log(others)
    groups = (torch.arange(V) >= V // 2).long()
    zeros_T = torch.zeros(T, dtype=torch.int64)
    options = {"groups": groups, "realised_T": zeros_T, "realised_cell": True, "bias": bias}
    compare(hidden_TD * 0.1, head_VD, zeros_T[:, None], **options)


def test_realised_cell_needs_classes() -> None:
    hidden_TD, head_VD, ids_TK = problem(2)
    with pytest.raises(ValueError, match="needs groups and realised_T"):
        head_outputs(hidden_TD, head_VD, ids_TK, realised_T=ids_TK[:, 0], realised_cell=True)


@pytest.mark.parametrize("realised_cell", [False, True])
def test_gradcheck_on_classes_with_a_realised_token(realised_cell: bool) -> None:
    torch.manual_seed(0)
    hidden_TD = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    head_VD = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    options = {"groups": torch.arange(8) % 4, "realised_T": torch.tensor([4, 0, 1, -1]), "realised_cell": realised_cell}

    def run(hidden_TD: Tensor, head_VD: Tensor) -> tuple[Tensor, ...]:
        outputs = head_outputs(hidden_TD, head_VD, torch.tensor([[0, 1], [2, 3], [3, 0], [1, 2]]), **options)
        real = [value for value in outputs if value is not None]
        return *real[:3], real[3].masked_fill(real[3] == -math.inf, 0.0)

    assert torch.autograd.gradcheck(run, (hidden_TD, head_VD))


@pytest.mark.parametrize("groups", [None, torch.arange(8) % 4], ids=["tokens", "classes"])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_gradcheck_in_float64(groups: Tensor | None, softcap: float | None) -> None:
    torch.manual_seed(0)
    hidden_TD = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    head_VD = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(8, dtype=torch.float64, requires_grad=True)
    ids_TK = torch.tensor([[0, 1], [2, 3], [3, 0], [1, 2], [0, 3]])
    realised_T = torch.tensor([7, 0, 1, 3, 2])

    def run(hidden_TD: Tensor, head_VD: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        options: dict[str, Any] = {"groups": groups, "realised_T": realised_T, "softcap": softcap, "bias": bias}
        outputs = head_outputs(hidden_TD, head_VD, ids_TK, temperature=1.5, chunk_rows=2, **options)
        return tuple(value for value in outputs if value is not None)

    assert torch.autograd.gradcheck(run, (hidden_TD, head_VD, bias))


@pytest.mark.parametrize("groups", [None, torch.arange(V) % C], ids=["tokens", "classes"])
def test_fill_has_no_value_no_gradient_and_no_effect(groups: Tensor | None) -> None:
    hidden_TD, head_VD, ids_TK = problem(5, num_cells=C)
    padded_TK = torch.cat([torch.full((T, 2), -1), ids_TK, torch.full((T, 1), -1)], -1)
    grads = []
    for ids in (ids_TK, padded_TK):
        hidden = hidden_TD.clone().requires_grad_()
        outputs = head_outputs(hidden, head_VD, ids, groups=groups)
        # Gradients that arrive at fill, even infinite ones, go nowhere.
        cotangent = torch.where(ids < 0, math.inf, 1.0)
        torch.autograd.backward([outputs.gathered_TK, outputs.complement_T], [cotangent, torch.ones(T)])
        grads.append(hidden.grad)
        assert bool((outputs.gathered_TK[ids < 0] == -math.inf).all())
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)


@pytest.mark.parametrize("groups", [None, torch.arange(V) % C], ids=["tokens", "classes"])
def test_an_id_listed_twice_counts_once_in_the_complement(groups: Tensor | None) -> None:
    hidden_TD, head_VD, ids_TK = problem(5, num_cells=C, fill=True)
    compare(hidden_TD, head_VD, torch.cat([ids_TK, ids_TK[:, :3]], -1), groups=groups)


@pytest.mark.parametrize("groups", [None, torch.arange(V) % C], ids=["tokens", "classes"])
def test_everything_listed_leaves_no_complement(groups: Tensor | None) -> None:
    hidden_TD, head_VD, _ = problem(1)
    num_cells = V if groups is None else C
    outputs, (grad_hidden, grad_head) = compare(hidden_TD, head_VD, torch.arange(num_cells).repeat(T, 1), groups=groups)
    assert bool((outputs.complement_T == -math.inf).all())
    assert bool(grad_hidden.isfinite().all() & grad_head.isfinite().all())


def test_no_ids_leave_everything_in_the_complement() -> None:
    hidden_TD, head_VD, _ = problem(1)
    outputs = head_outputs(hidden_TD, head_VD, torch.empty(T, 0, dtype=torch.int64))
    torch.testing.assert_close(outputs.complement_T, outputs.logsumexp_T)


@pytest.mark.parametrize("rest", [1e-2, 1e-5, 1e-8, 1e-20, 1e-60])
def test_complement_keeps_relative_precision(rest: float) -> None:
    # One listed token carries all but `rest`, through a bias; the others differ by their hidden states.
    hidden_TD, head_VD, _ = problem(1)
    bias = torch.zeros(V)
    bias[0] = -math.log(rest)
    ids_TK = torch.zeros(T, 1, dtype=torch.int64)
    compare(hidden_TD * 0.1, head_VD, ids_TK, bias=bias)
    hidden = (hidden_TD * 0.1).requires_grad_()
    outputs = head_outputs(hidden, head_VD, ids_TK, bias=bias)
    outputs.complement_T.sum().backward()
    probs_TV = torch.softmax((hidden_TD.double() * 0.1) @ head_VD.double()[1:].T, -1)
    torch.testing.assert_close(hidden.grad, (probs_TV @ head_VD[1:].double()).float(), rtol=1e-5, atol=1e-6)


def test_a_class_that_underflows_stays_finite() -> None:
    hidden_TD, head_VD, _ = problem(1)
    bias = torch.zeros(V)
    bias[C:] = 200.0
    groups = (torch.arange(V) >= C).long()
    hidden = hidden_TD.clone().requires_grad_()
    outputs = head_outputs(hidden, head_VD, torch.zeros(T, 1, dtype=torch.int64), groups=groups, bias=bias)
    outputs.gathered_TK.sum().backward()
    assert bool((outputs.gathered_TK[:, 0] - outputs.logsumexp_T > -70.0).all())
    assert hidden.grad is not None
    assert bool(hidden.grad.isfinite().all())


@pytest.mark.parametrize("groups", [None, torch.arange(V) % C], ids=["tokens", "classes"])
def test_chunk_size_does_not_matter(groups: Tensor | None) -> None:
    hidden_TD, head_VD, ids_TK = problem(5, num_cells=C)
    results = []
    for chunk_rows in (1, 7, T, 10 * T):
        hidden, head = hidden_TD.clone().requires_grad_(), head_VD.clone().requires_grad_()
        outputs = head_outputs(hidden, head, ids_TK, groups=groups, chunk_rows=chunk_rows)
        weigh(outputs).backward()
        results.append([*outputs[:3], hidden.grad, head.grad])
    for result in results[1:]:
        for value, expected in zip(result, results[0], strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-4)


def test_backward_can_run_twice() -> None:
    hidden_TD, head_VD, ids_TK = problem(5)
    hidden = hidden_TD.clone().requires_grad_()
    loss = weigh(head_outputs(hidden, head_VD, ids_TK))
    (first,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (second,) = torch.autograd.grad(loss, hidden)
    assert torch.equal(first, second)


@pytest.mark.parametrize("groups", [None, torch.arange(V) % C], ids=["tokens", "classes"])
def test_no_rows_give_empty_outputs_and_zero_gradient(groups: Tensor | None) -> None:
    hidden_TD, head_VD, ids_TK = (x[:0] if len(x) == T else x for x in problem(5, num_cells=C))
    head = head_VD.clone().requires_grad_()
    outputs = head_outputs(hidden_TD, head, ids_TK, groups=groups)
    assert [tuple(x.shape) for x in outputs[:3]] == [(0,), (0, 5), (0,)]
    weigh(outputs).backward()
    assert head.grad is not None
    assert not bool(head.grad.any())


def test_frozen_head_gets_no_gradient() -> None:
    hidden_TD, head_VD, ids_TK = problem(5)
    hidden = hidden_TD.clone().requires_grad_()
    weigh(head_outputs(hidden, head_VD, ids_TK)).backward()
    assert hidden.grad is not None
    assert head_VD.grad is None


@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_is_no_worse_than_plain_pytorch(autocast: bool) -> None:
    hidden_TD, head_VD, ids_TK = problem(5)
    if not autocast:
        hidden_TD, head_VD = hidden_TD.bfloat16(), head_VD.bfloat16()
    grads: dict[str, list[Tensor]] = {}
    for name in ("ours", "plain", "exact"):
        dtype = torch.float64 if name == "exact" else hidden_TD.dtype
        hidden = hidden_TD.to(dtype, copy=True).requires_grad_()
        head = head_VD.to(dtype, copy=True).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and name != "exact"):
            if name == "ours":
                outputs = head_outputs(hidden, head, ids_TK, chunk_rows=50)
                assert outputs.logsumexp_T.dtype == torch.float32
                losses_TK = outputs.logsumexp_T[:, None] - outputs.gathered_TK
            else:
                logits_TV = hidden @ head.T
                logits_TV = logits_TV if name == "exact" else logits_TV.float()
                losses_TK = logits_TV.logsumexp(-1, keepdim=True) - logits_TV.gather(-1, ids_TK)
        losses_TK.mean().backward()
        assert hidden.grad is not None
        assert head.grad is not None
        assert (hidden.grad.dtype, head.grad.dtype) == (dtype, dtype)
        grads[name] = [losses_TK.detach().double(), hidden.grad.double(), head.grad.double()]
    for ours, plain, exact in zip(grads["ours"], grads["plain"], grads["exact"], strict=True):
        assert (ours - exact).norm() <= 1.05 * (plain - exact).norm() + 1e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_VD": torch.zeros(V, D + 1)}, r"head has shape \(507, 124\), expected \[V, D=123\]"),
        ({"ids_TK": torch.zeros(T, 3, dtype=torch.int32)}, "ids has dtype torch.int32"),
        ({"bias": torch.zeros(V + 1)}, r"bias has shape \(508,\), expected \[V=507\]"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"head_VD": torch.zeros(V, D).double()}, "cast one of them"),
    ],
)
def test_inputs_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    hidden_TD, head_VD, ids_TK = problem(2)
    given: dict[str, Any] = {"hidden_TD": hidden_TD, "head_VD": head_VD, "ids_TK": ids_TK}
    with pytest.raises(ValueError, match=message):
        head_outputs(**{**given, **change})

"""The student seen in the teacher's vocabulary, against float64 references and hand-made cases.

Shapes: N positions, K stored entries, V student vocabulary, U teacher vocabulary.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from builders import build_bytelevel_tokenizer, build_metaspace_tokenizer  # noqa: E402
from torch import Tensor  # noqa: E402

from logitstore.consumer.cell_maps import SparseProjection  # noqa: E402
from logitstore.consumer.gold import gold_rows  # noqa: E402
from logitstore.consumer.matching import exact_matching, relaxed_matching  # noqa: E402
from logitstore.consumer.primitive import HeadOutputs, head_outputs  # noqa: E402
from logitstore.consumer.rows import TeacherRows, partition_rows, sampled_rows  # noqa: E402
from logitstore.consumer.xtoken import reachable_rows, xtoken_hkl, xtoken_pkl  # noqa: E402
from logitstore.errors import ConfigError  # noqa: E402
from logitstore.tokenizer import Tokenizer  # noqa: E402
from logitstore.vocabulary_maps import vocabulary_maps  # noqa: E402

# Teacher tokens: 2 0 1 a b ~     Student tokens: 2 20 201 a ab ?     (~ and ? have no counterpart)
TWO, ZERO, ONE, A, B, TILDE = range(6)
W = SparseProjection.from_csr(
    torch.tensor([0, 1, 3, 6, 7, 9, 9]),
    torch.tensor([TWO, TWO, ZERO, TWO, ZERO, ONE, A, A, B]),
    torch.tensor([1.0, 0.909, 0.091, 0.901, 0.090, 0.009, 1.0, 0.909, 0.091]),
    num_cells=6,
)
N, U = 200, 6


def outputs_of(logits_NV: Tensor, ids_NK: Tensor) -> HeadOutputs:
    return head_outputs(logits_NV, torch.eye(6, dtype=logits_NV.dtype), ids_NK, projection=W)


def whole_rows(log_p_NU: Tensor) -> TeacherRows:
    ids_NU = torch.arange(U).repeat(len(log_p_NU), 1)
    rows = partition_rows(ids_NU, log_p_NU.float(), torch.full((len(log_p_NU),), -math.inf))
    return reachable_rows(rows, W.reachable())


def random_pair() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    log_p_NU = torch.log_softmax(torch.randn(N, U, generator=generator, dtype=torch.float64) * 2, -1)
    return log_p_NU, torch.randn(N, 6, generator=generator, dtype=torch.float64) * 2


def projected(logits_NV: Tensor) -> Tensor:
    """[N, U] q~, with the mass that W sends nowhere at the token that nothing reaches."""
    dense_VU = torch.zeros(6, U + 1, dtype=torch.float64)
    dense_VU.index_put_((W.source_E, W.cell_E), W.weight_E.double(), accumulate=True)
    q_NU = torch.softmax(logits_NV, -1) @ dense_VU
    return torch.cat([q_NU[:, :TILDE], q_NU[:, TILDE:].sum(-1, keepdim=True)], -1)


def test_maps_of_two_tokenizers_give_a_projection_and_pairs(tmp_path: Path) -> None:
    student = Tokenizer.from_folder(build_bytelevel_tokenizer(tmp_path / "student"))
    teacher = Tokenizer.from_folder(build_metaspace_tokenizer(tmp_path / "teacher"))
    maps = vocabulary_maps(None, student, teacher)
    num_teacher, head_rows = len(maps.teacher_first_byte), len(maps.common) + 5
    projection = SparseProjection.of_tokens(maps.student_to_teacher, num_teacher, head_rows)
    exact = exact_matching(torch.tensor(maps.common), num_teacher, head_rows)
    relaxed = relaxed_matching(projection)
    assert bool(exact.unmatched_V[-5:].all() & relaxed.unmatched_V[-5:].all())
    pairs = exact.student_of_teacher_U >= 0
    assert int(pairs.sum()) > 100
    assert bool((relaxed.student_of_teacher_U >= 0)[pairs].all())  # what is identical is near enough
    for token in pairs.nonzero()[:, 0].tolist():
        twin = int(exact.student_of_teacher_U[token])
        if teacher.token_bytes[token]:
            assert student.token_bytes[twin] == teacher.token_bytes[token]
    reached = projection.reachable()
    assert bool(reached[pairs].all())
    torch.manual_seed(0)
    ids_NK = reached.nonzero()[:, 0].repeat(3, 1)
    outputs = head_outputs(torch.randn(3, 8), torch.randn(head_rows, 8), ids_NK, projection=projection)
    total_N = torch.cat([outputs.gathered_TK, outputs.complement_T[:, None]], -1).logsumexp(-1)
    torch.testing.assert_close(total_N, outputs.logsumexp_T, rtol=1e-5, atol=1e-5)


def test_projected_mass_of_a_hand_made_student() -> None:
    # All mass on "20": .909 of it at 2, .091 at 0.
    student = outputs_of(torch.tensor([[-50.0, 0.0, -50.0, -50.0, -50.0, -50.0]]), torch.tensor([[TWO, ZERO, A]]))
    masses = torch.exp(student.gathered_TK - student.logsumexp_T[:, None])
    torch.testing.assert_close(masses[:, :2], torch.tensor([[0.909, 0.091]]))
    assert float(masses[0, 2]) < 1e-20


def test_pkl_of_whole_rows_is_the_kl_to_the_projected_student() -> None:
    log_p_NU, logits_NV = random_pair()
    rows = whole_rows(log_p_NU)
    loss_N = xtoken_pkl(rows, outputs_of(logits_NV, rows.ids_NK))
    expected_N = (log_p_NU.exp() * (log_p_NU - projected(logits_NV).log())).sum(-1)
    torch.testing.assert_close(loss_N, expected_N, rtol=1e-5, atol=1e-6)
    twice_N = xtoken_pkl(rows, outputs_of(logits_NV, rows.ids_NK), temperature=2.0)
    torch.testing.assert_close(twice_N, 4 * loss_N)


def test_pkl_is_zero_with_zero_gradient_where_the_projected_student_agrees() -> None:
    _, logits_NV = random_pair()
    rows = whole_rows(projected(logits_NV).log())
    logits_NV.requires_grad_()
    loss_N = xtoken_pkl(rows, outputs_of(logits_NV, rows.ids_NK))
    loss_N.sum().backward()
    assert float(loss_N.detach().abs().max()) < 1e-9
    assert logits_NV.grad is not None
    assert float(logits_NV.grad.abs().max()) < 1e-6


@pytest.mark.parametrize("num_ids", [1, 2, 4])
def test_pkl_of_topk_rows_is_a_lower_bound_and_never_negative(num_ids: int) -> None:
    log_p_NU, logits_NV = random_pair()
    ids_NK = log_p_NU.topk(num_ids, -1).indices
    log_rest_N = log_p_NU.scatter(1, ids_NK, -math.inf).logsumexp(-1)
    rows = partition_rows(ids_NK, log_p_NU.gather(1, ids_NK).float(), log_rest_N.float())
    rows = reachable_rows(rows, W.reachable())
    rows.validate()
    loss_N = xtoken_pkl(rows, outputs_of(logits_NV, rows.ids_NK))
    exact_N = (log_p_NU.exp() * (log_p_NU - projected(logits_NV).log())).sum(-1)
    assert float(loss_N.min()) >= 0.0
    assert float((loss_N - exact_N).max()) <= 1e-6


def test_pkl_of_samples_is_unbiased_in_value_and_gradient() -> None:
    log_p_NU, logits_NV = random_pair()
    p_U, logits_V = log_p_NU[0].exp(), logits_NV[0]
    p_U = torch.cat([p_U[:TILDE] / p_U[:TILDE].sum(), torch.zeros(1)])  # on tokens that the student can reach
    num_rows, num_draws = 4000, 3
    draws = torch.multinomial(p_U, num_rows * num_draws, replacement=True, generator=torch.Generator().manual_seed(6))
    counts_NU = torch.zeros(num_rows, U, dtype=torch.int64).scatter_add_(
        1, draws.view(num_rows, num_draws), torch.ones(num_rows, num_draws, dtype=torch.int64)
    )
    ids_NU = torch.arange(U).repeat(num_rows, 1).masked_fill(counts_NU == 0, -1)
    rows = sampled_rows(ids_NU, torch.full((num_rows, U), math.nan), counts_NU, 1 / num_draws)
    rows = reachable_rows(rows, W.reachable())
    student_NV = logits_V.repeat(num_rows, 1).requires_grad_()
    loss_N = xtoken_pkl(rows, outputs_of(student_NV, rows.ids_NK))
    (gradient_NV,) = torch.autograd.grad(loss_N.sum(), student_NV)
    leaf_V = logits_V.clone().requires_grad_()
    exact = -(p_U[:TILDE] * projected(leaf_V[None])[0, :TILDE].log()).sum()
    (exact_gradient_V,) = torch.autograd.grad(exact, leaf_V)
    for estimates, truth in ((loss_N.detach()[:, None], exact.detach()[None]), (gradient_NV, exact_gradient_V)):
        error = (estimates.mean(0) - truth).abs() / (estimates.std(0) / math.sqrt(num_rows) + 1e-9)
        assert float(error.max()) < 4.0


def test_entries_that_no_student_token_reaches_join_the_rest() -> None:
    log_p = torch.tensor([[0.5, 0.3, 0.1, 0.1]]).log()
    rows = partition_rows(torch.tensor([[TILDE, TWO, -1, 77]]), log_p, torch.tensor([0.1]).log())
    some = reachable_rows(rows, W.reachable())
    some.validate()
    assert some.ids_NK.tolist() == [[-1, TWO, -1, -1]]
    assert some.log_rest_N is not None
    torch.testing.assert_close(some.log_masses_NK[0, 1].exp(), torch.tensor(0.3))
    torch.testing.assert_close(some.log_rest_N.exp(), torch.tensor([0.7]))
    sample = sampled_rows(torch.tensor([[TILDE, TWO]]), log_p[:, :2], torch.tensor([[1, 1]]), 0.5)
    left = reachable_rows(sample, W.reachable())
    assert left.log_rest_N is None
    assert left.ids_NK.tolist() == [[-1, TWO]]
    assert left.log_masses_NK[0].exp().tolist() == [0.0, 0.5]


def test_samples_are_refused_at_another_temperature() -> None:
    sample = sampled_rows(torch.tensor([[A, TWO]]), torch.zeros(1, 2), torch.tensor([[1, 1]]), 0.5)
    with pytest.raises(ConfigError, match="temperature 2 cannot be served"):
        xtoken_pkl(sample, outputs_of(torch.zeros(1, 6), sample.ids_NK), temperature=2.0)


def test_relaxed_pairs_take_the_heaviest_then_the_lowest() -> None:
    # 2 is taken by the identical token before 20 and 201; nobody is left for 0 and 1.
    matching = relaxed_matching(W)
    assert matching.student_of_teacher_U.tolist() == [0, -1, -1, 3, -1, -1]
    assert matching.unmatched_V.tolist() == [False, True, True, False, True, True]
    # Without the identical ones, the two-piece token goes before the three-piece one; ties by the lowest id.
    cut = SparseProjection.from_csr(
        torch.tensor([0, 3, 5, 7, 9]),
        torch.tensor([TWO, ZERO, ONE, TWO, ZERO, TWO, ONE, A, B]),
        torch.tensor([0.901, 0.090, 0.009, 0.909, 0.091, 0.909, 0.091, 0.5, 0.5]),
        num_cells=6,
    )
    assert relaxed_matching(cut).student_of_teacher_U.tolist() == [1, -1, -1, -1, -1, -1]
    assert relaxed_matching(cut, least_weight=0.5).student_of_teacher_U.tolist() == [1, -1, -1, 3, -1, -1]


def test_hkl_compares_loosely_matched_tokens_by_kl_and_others_by_rank() -> None:
    cut = SparseProjection.from_csr(
        torch.tensor([0, 2, 3, 3]), torch.tensor([0, 1, 2]), torch.tensor([0.909, 0.091, 1.0]), num_cells=4
    )
    matching = relaxed_matching(cut)  # teacher 0 with student 0, teacher 2 with student 1
    teacher = torch.tensor([[0.5, 0.2, 0.25, 0.05]])
    rows = partition_rows(torch.tensor([[2, 0, 1, 3]]), teacher[:, [2, 0, 1, 3]].log(), torch.tensor([-math.inf]))
    some = gold_rows(rows, matching, torch.tensor([1]))
    student = torch.tensor([[0.6, 0.3, 0.1]])
    outputs = head_outputs(
        student.log(), torch.eye(3), some.matched.ids_NK, num_top=4, top_among_V=matching.unmatched_V
    )
    kl = 0.25 * math.log(0.25 / 0.3) + 0.5 * math.log(0.5 / 0.6) + 0.25 * math.log(0.25 / 0.1)
    ranked = abs(0.2 - 0.1) + 0.05
    assert float(xtoken_hkl(some, outputs)) == pytest.approx(kl + ranked, abs=1e-6)

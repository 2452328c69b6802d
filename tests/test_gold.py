"""Distances by rank and by bytes, against float64 references and on spans whose right answer is known.

Shapes: N positions, K stored entries, V student vocabulary, U teacher vocabulary.
"""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from logitstore.consumer.gold import (  # noqa: E402
    GoldRows,
    generalised_jsd,
    gold,
    gold_rows,
    merge_realised,
    merge_realised_outputs,
    uld,
    unmatched_distance,
)
from logitstore.consumer.matching import TokenMatching, exact_matching  # noqa: E402
from logitstore.consumer.primitive import HeadOutputs, head_outputs  # noqa: E402
from logitstore.consumer.rows import TeacherRows, partition_rows, sampled_rows  # noqa: E402
from logitstore.errors import ConfigError  # noqa: E402

N, U, V = 61, 53, 67


def teacher_topk(log_p_NU: Tensor, num_ids: int, realised_N: Tensor) -> TeacherRows:
    """As they are stored: the realised token first, then the others of the top-k; float64 is cut to float32."""
    order_NK = log_p_NU.topk(num_ids, -1).indices
    others_NK = order_NK.masked_fill(order_NK == realised_N[:, None], -1)
    ids_NK = torch.cat([realised_N[:, None], others_NK], -1)
    logprobs_NK = log_p_NU.gather(1, ids_NK.clamp(min=0)).masked_fill(ids_NK < 0, -math.inf)
    is_listed_NU = torch.zeros(len(log_p_NU), log_p_NU.shape[1] + 1, dtype=torch.bool)
    is_listed_NU.scatter_(1, ids_NK.masked_fill(ids_NK < 0, log_p_NU.shape[1]), True)
    log_rest_N = log_p_NU.masked_fill(is_listed_NU[:, :-1], -math.inf).logsumexp(-1)
    rows = partition_rows(ids_NK, logprobs_NK.float(), log_rest_N.float())
    rows.validate()
    return rows


def outputs_of(logits_NV: Tensor, ids_NK: Tensor, num_top: int, among_V: Tensor | None = None) -> HeadOutputs:
    """The primitive on given logits: the hidden states are they, the head is the identity."""
    identity = torch.eye(logits_NV.shape[1], dtype=logits_NV.dtype)
    return head_outputs(logits_NV, identity, ids_NK, num_top=num_top, top_among_V=among_V)


def distributions(scale: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    log_p_NU = torch.log_softmax(torch.randn(N, U, generator=generator, dtype=torch.float64) * scale, -1)
    logits_NV = torch.randn(N, V, generator=generator, dtype=torch.float64) * scale
    return log_p_NU, logits_NV, torch.randint(U, (N,), generator=generator)


def sorted_distance(p_NU: Tensor, q_NV: Tensor) -> Tensor:
    """The definition: L1 of the sorted distributions, the shorter one padded with zeros."""
    size = max(p_NU.shape[1], q_NV.shape[1])
    p, q = (torch.nn.functional.pad(x, (0, size - x.shape[1])).sort(-1, descending=True).values for x in (p_NU, q_NV))
    return (p - q).abs().sum(-1)


def no_ids(num_rows: int = N) -> Tensor:
    return torch.full((num_rows, 1), -1)


def test_uld_of_whole_rows_is_the_sorted_distance() -> None:
    log_p_NU, logits_NV, _ = distributions()
    rows = teacher_topk(log_p_NU, U, log_p_NU.argmax(-1))
    loss_N = uld(rows, outputs_of(logits_NV, no_ids(), U + 1))
    # The last entry is -inf fill where the realised token stood among the top-k.
    expected_N = sorted_distance(log_p_NU.exp(), torch.softmax(logits_NV, -1))
    tail_N = torch.softmax(logits_NV, -1).sort(-1, descending=True).values[:, U:].sum(-1)
    assert float(tail_N.max()) > 0  # the student's tail, against nothing
    torch.testing.assert_close(loss_N, expected_N, rtol=0, atol=1e-6)


@pytest.mark.parametrize("num_ids", [1, 4, 20])
def test_uld_of_topk_rows_is_a_bound_of_stated_distance(num_ids: int) -> None:
    log_p_NU, logits_NV, realised_N = distributions()
    loss_N = uld(teacher_topk(log_p_NU, num_ids, realised_N), outputs_of(logits_NV, no_ids(), num_ids + 1))
    q_NV = torch.softmax(logits_NV, -1)
    exact_N = sorted_distance(log_p_NU.exp(), q_NV)
    # At least all but the last of the top-k count.
    known = max(num_ids - 1, 1)
    tails = [x.sort(-1, descending=True).values[:, known:].sum(-1) for x in (log_p_NU.exp(), q_NV)]
    missing_N = exact_N - loss_N
    assert float(missing_N.min()) >= -1e-6
    assert bool((missing_N <= 2 * torch.minimum(*tails) + 1e-6).all())


def test_uld_is_zero_when_sorted_alike() -> None:
    log_p_NU, _, realised_N = distributions()
    rows = teacher_topk(log_p_NU, 12, realised_N)
    student = outputs_of(log_p_NU.flip(-1), no_ids(), 13)  # the same probabilities, on other tokens
    assert float(uld(rows, student).max()) < 1e-6


def test_uld_counts_a_realised_token_of_unknown_rank_with_the_tail() -> None:
    # Teacher .5 .3 .1 .06 .04: the top-2 and the realised .04, whose rank a reader of the row cannot know.
    log_p = torch.tensor([[0.5, 0.3, 0.1, 0.06, 0.04]]).log()
    rows = teacher_topk(log_p, 2, torch.tensor([4]))
    logits = torch.tensor([[0.4, 0.4, 0.1, 0.05, 0.05]]).log()
    loss = uld(rows, outputs_of(logits, no_ids(1), 3))
    # |.5 - .4| + |.3 - .4|, and tails of .2 both.
    torch.testing.assert_close(loss, torch.tensor([0.2]))


def test_uld_needs_as_many_student_logits_as_entries() -> None:
    log_p_NU, logits_NV, realised_N = distributions()
    rows = teacher_topk(log_p_NU, 4, realised_N)
    with pytest.raises(ValueError, match="found 4, expected at least 5"):
        uld(rows, outputs_of(logits_NV, no_ids(), 4))


# Teacher tokens: a b ab c !     Student tokens: a b c abc ?
SMALL = exact_matching(torch.tensor([0, 1, 3, -1, -1]), num_teacher=5, head_rows=5)


def test_matching_of_two_tiny_vocabularies() -> None:
    assert SMALL.student_of_teacher_U.tolist() == [0, 1, -1, 2, -1]
    assert SMALL.unmatched_V.tolist() == [False, False, False, True, True]
    # Of two student tokens with the same bytes the first is taken, and the head's padding has no pair.
    double = exact_matching(torch.tensor([2, 2, -1]), num_teacher=3, head_rows=5)
    assert double.student_of_teacher_U.tolist() == [-1, -1, 0]
    assert double.unmatched_V.tolist() == [False, True, True, True, True]
    with pytest.raises(ValueError, match="expected ids below 3"):
        exact_matching(torch.tensor([3]), num_teacher=3, head_rows=1)


SPANS = {
    # teacher's first token and P(continuation), student's first token and P(continuation)
    "1:1 a": (0, 1.0, 0, 1.0),
    "1:2 ab": (2, 1.0, 0, 0.25),
    "2:1 ab c": (2, 0.5, 3, 1.0),
    "2:2 ab !": (2, 0.5, 0, 0.2),
}
TEACHER = [0.3, 0.1, 0.4, 0.15, 0.05]
STUDENT = [0.5, 0.2, 0.05, 0.2, 0.05]


@pytest.mark.parametrize("span", SPANS.values(), ids=SPANS)
def test_matched_part_on_spans_of_each_kind(span: tuple[int, float, int, float]) -> None:
    teacher_first, teacher_next, student_first, student_next = span
    p, q = torch.tensor([TEACHER], dtype=torch.float64), torch.tensor([STUDENT], dtype=torch.float64)
    rows = teacher_topk(p.log(), 5, torch.tensor([teacher_first]))
    continuation = torch.tensor([teacher_next]).log()
    cut = gold_rows(rows, SMALL, torch.tensor([student_first]), continuation)
    cut.matched.validate()
    student = outputs_of(q.log(), cut.matched.ids_NK, 6, SMALL.unmatched_V)
    student = merge_realised_outputs(student, torch.tensor([student_next], dtype=torch.float64).log())
    loss = generalised_jsd(cut.matched, student, 0.0)
    # By hand: the span, the tokens a, b, c that are matched and do not begin it, and everything else.
    cells = [(TEACHER[teacher_first] * teacher_next, STUDENT[student_first] * student_next)]
    for teacher_id, student_id in ((0, 0), (1, 1), (3, 2)):
        if teacher_id != teacher_first and student_id != student_first:
            cells.append((TEACHER[teacher_id], STUDENT[student_id]))
    cells.append((1 - sum(p for p, _ in cells), 1 - sum(q for _, q in cells)))
    expected = sum(p * math.log(p / q) for p, q in cells)
    assert float(loss) == pytest.approx(expected, abs=1e-6)


def test_a_row_whose_span_is_merged_still_sums_to_one() -> None:
    log_p_NU, _, realised_N = distributions()
    rows = teacher_topk(log_p_NU, 7, realised_N)
    continuation_N = -torch.linspace(0.0, 30.0, N)
    merged = merge_realised(rows, continuation_N)
    merged.validate()
    torch.testing.assert_close(merged.log_masses_NK[:, 0], rows.log_masses_NK[:, 0] + continuation_N)
    assert torch.equal(merged.log_masses_NK[:, 1:], rows.log_masses_NK[:, 1:])
    assert merged.log_rest_N is not None
    assert rows.log_rest_N is not None
    assert float(merged.log_rest_N[0]) == float(rows.log_rest_N[0])  # a span of one token changes nothing


def test_gold_is_zero_where_the_student_agrees_on_every_event() -> None:
    # The teacher writes "ab" as one token, the student as a then b; both give every event the same probability.
    teacher = torch.tensor([[0.3, 0.1, 0.4, 0.15, 0.05]], dtype=torch.float64)
    student = torch.tensor([[0.7, 0.1, 0.15, 0.03, 0.02]], dtype=torch.float64)  # a: .4 of it goes on with b
    cut = gold_rows(teacher_topk(teacher.log(), 5, torch.tensor([2])), SMALL, torch.tensor([0]))
    assert cut.matched.ids_NK.tolist()[0][0] == 0
    outputs = outputs_of(student.log().requires_grad_(), cut.matched.ids_NK, 6, SMALL.unmatched_V)
    continuation = torch.tensor([0.4 / 0.7], dtype=torch.float64).log()
    merged = merge_realised_outputs(outputs, continuation)
    loss = generalised_jsd(cut.matched, merged, 0.0)
    assert float(loss.detach()) == pytest.approx(0.0, abs=1e-6)


def test_gold_of_everything_matched_is_the_kl() -> None:
    log_p_NU, _, realised_N = distributions()
    logits_NU = torch.randn(N, U, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    matching = exact_matching(torch.arange(U), U, U)
    cut = gold_rows(teacher_topk(log_p_NU, U, realised_N), matching, realised_N)
    loss_N = gold(cut, outputs_of(logits_NU, cut.matched.ids_NK, U + 1, matching.unmatched_V))
    expected_N = (log_p_NU.exp() * (log_p_NU - torch.log_softmax(logits_NU, -1))).sum(-1)
    torch.testing.assert_close(loss_N, expected_N, rtol=1e-5, atol=1e-6)


def half_matched() -> TokenMatching:
    """Every other teacher token has the student token of half its number."""
    return exact_matching(torch.where(torch.arange(V) < U // 2, torch.arange(V) * 2, -1), U, V)


@pytest.mark.parametrize("num_ids", [1, 6, U])
def test_unmatched_part_is_a_bound_of_stated_distance(num_ids: int) -> None:
    log_p_NU, logits_NV, realised_N = distributions()
    matching = half_matched()
    first_N = torch.arange(N) % V  # any student token may begin the span
    cut = gold_rows(teacher_topk(log_p_NU, num_ids, realised_N), matching, first_N)
    loss_N = unmatched_distance(cut, outputs_of(logits_NV, cut.matched.ids_NK, num_ids + 9, matching.unmatched_V))
    # The definition, on the tokens without a pair that do not begin the span.
    is_out_NU = (matching.student_of_teacher_U >= 0).repeat(N, 1).scatter(1, realised_N[:, None], True)
    is_out_NV = (~matching.unmatched_V).repeat(N, 1).scatter(1, first_N[:, None], True)
    p_NU = log_p_NU.exp().masked_fill(is_out_NU, 0.0)
    q_NV = torch.softmax(logits_NV, -1).masked_fill(is_out_NV, 0.0)
    missing_N = sorted_distance(p_NU, q_NV) - loss_N
    listed_N = (cut.unmatched_NK > -math.inf).sum(-1)
    tails_N = torch.zeros(N, dtype=torch.float64)
    for x in (p_NU, q_NV):
        ranks = torch.arange(x.shape[1])
        tails_N += x.sort(-1, descending=True).values.masked_fill(ranks < listed_N[:, None], 0.0).sum(-1)
    assert float(missing_N.min()) >= -1e-6
    assert bool((missing_N <= tails_N + 1e-6).all())
    if num_ids == U:
        # Whole rows: the student's further tokens, of which only some are read, stand against nothing.
        assert float(missing_N.max()) < 0.2


def test_student_tokens_above_every_unlisted_entry_are_charged() -> None:
    # The teacher lists a and b, so that nothing else has more than .2; the student's unmatched "abc" has .6.
    cut = gold_rows(
        teacher_topk(torch.tensor([[0.6, 0.2, 0.1, 0.05, 0.05]]).log(), 2, torch.tensor([0])), SMALL, torch.tensor([0])
    )
    student = torch.tensor([[0.2, 0.1, 0.05, 0.6, 0.05]])
    loss = unmatched_distance(cut, outputs_of(student.log(), cut.matched.ids_NK, 5, SMALL.unmatched_V))
    torch.testing.assert_close(loss, torch.tensor([0.4]))


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9])
def test_generalised_jsd_equals_its_definition_and_is_zero_at_equality(beta: float) -> None:
    log_p_NU, _, realised_N = distributions()
    logits_NU = torch.randn(N, U, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    rows = teacher_topk(log_p_NU, U, realised_N)
    loss_N = generalised_jsd(rows, outputs_of(logits_NU, rows.ids_NK, 1), beta)
    p, q = log_p_NU.exp(), torch.softmax(logits_NU, -1)
    mixed = p if beta == 0 else beta * p + (1 - beta) * q
    expected_N = (p * (p / q).log()).sum(-1)
    if beta > 0:
        expected_N = beta * (p * (p / mixed).log()).sum(-1) + (1 - beta) * (q * (q / mixed).log()).sum(-1)
    torch.testing.assert_close(loss_N, expected_N, rtol=1e-5, atol=1e-6)
    same_NU = log_p_NU.clone().requires_grad_()
    at_equality_N = generalised_jsd(rows, outputs_of(same_NU, rows.ids_NK, 1), beta)
    at_equality_N.sum().backward()
    assert float(at_equality_N.detach().abs().max()) < 1e-9
    assert same_NU.grad is not None
    assert float(same_NU.grad.abs().max()) < 1e-6


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_gold_is_never_negative_and_has_finite_gradients(beta: float) -> None:
    log_p_NU, logits_NV, realised_N = distributions(scale=12.0)
    logits_NV = logits_NV.float().requires_grad_()
    matching = half_matched()
    cut = gold_rows(teacher_topk(log_p_NU, 6, realised_N), matching, torch.arange(N) % V, -torch.linspace(0, 9, N))
    student = outputs_of(logits_NV, cut.matched.ids_NK, 7, matching.unmatched_V)
    continuation_N = (-torch.linspace(5, 0, N)).requires_grad_()
    loss_N = gold(cut, student, continuation_N, beta=beta, temperature=2.0)
    loss_N.sum().backward()
    assert float(loss_N.detach().min()) >= 0.0
    assert logits_NV.grad is not None
    assert continuation_N.grad is not None
    assert bool(logits_NV.grad.isfinite().all() & continuation_N.grad.isfinite().all())


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_gradcheck_in_float64(beta: float) -> None:
    torch.manual_seed(0)
    log_p = torch.log_softmax(torch.randn(4, 5, dtype=torch.float64), -1)
    cut = gold_rows(
        teacher_topk(log_p, 4, torch.tensor([2, 0, 1, 2])),
        SMALL,
        torch.tensor([0, 0, 3, 3]),
        torch.tensor([-1.0, 0, 0, -2]),
    )
    logits = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    continuation = (-torch.rand(4, dtype=torch.float64)).requires_grad_()

    def run(logits: Tensor, continuation: Tensor) -> Tensor:
        student = outputs_of(logits, cut.matched.ids_NK, 5, SMALL.unmatched_V)
        return gold(cut, student, continuation, beta=beta)

    assert torch.autograd.gradcheck(run, (logits, continuation))


def test_fill_changes_nothing() -> None:
    log_p_NU, logits_NV, realised_N = distributions()
    rows = teacher_topk(log_p_NU, 6, realised_N)
    fill_NK = torch.full((N, 3), -1)
    assert rows.log_rest_N is not None
    padded = TeacherRows(
        torch.cat([rows.ids_NK, fill_NK], -1),
        torch.cat([rows.log_masses_NK, torch.full((N, 3), -math.inf)], -1),
        rows.log_rest_N,
    )
    matching = half_matched()
    losses: list[list[Tensor]] = []
    for some in (rows, padded):
        cut = gold_rows(some, matching, realised_N)
        student = outputs_of(logits_NV, cut.matched.ids_NK, 12, matching.unmatched_V)
        losses.append([gold(cut, student, beta=0.5), uld(some, outputs_of(logits_NV, no_ids(), 12))])
    for plain_N, padded_N in zip(*losses, strict=True):
        torch.testing.assert_close(plain_N, padded_N, rtol=0, atol=1e-6)


def test_rows_move_to_a_device_together() -> None:
    log_p_NU, _, realised_N = distributions()
    cut = gold_rows(teacher_topk(log_p_NU, 3, realised_N), half_matched(), realised_N)
    moved = cut.to("cpu")
    assert isinstance(moved, GoldRows)
    assert torch.equal(moved.ceiling_N, cut.ceiling_N)
    assert torch.equal(half_matched().to("cpu").unmatched_V, half_matched().unmatched_V)


def test_samples_and_a_beta_that_is_none_are_refused() -> None:
    ids = torch.tensor([[1, 2]])
    sample = sampled_rows(ids, torch.tensor([[-1.0, -2.0]]), torch.tensor([[0, 3]]), 0.02)
    student = outputs_of(torch.zeros(1, 5), ids, 5)
    with pytest.raises(ConfigError, match="uld pairs tokens by rank"):
        uld(sample, student)
    with pytest.raises(ConfigError, match="gold pairs tokens by rank"):
        gold_rows(sample, SMALL, torch.tensor([0]))
    with pytest.raises(ConfigError, match="cannot be merged in sampled rows"):
        merge_realised(sample, torch.tensor([0.0]))
    exact = teacher_topk(torch.tensor([TEACHER]).log(), 3, torch.tensor([0]))
    with pytest.raises(ConfigError, match="beta is 1, expected"):
        generalised_jsd(exact, student, 1.0)

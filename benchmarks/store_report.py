"""What the store's benchmark writes down."""

from __future__ import annotations

from typing import Any

import numpy as np
from store_measures import Measured
from store_rows import TeacherRows

_MARGIN = 0.05

NOTES = """\
Bytes are all that is stored for the signal: checksums, indexes, models and the mass outside rows, and seal and metadata
spread over a block of 4 MiB of text; text and token ids, which all signals share, have rows of their own. Rows of
`topk` have the realised token besides.

KL is generalised, over the stored entries, in nats a row: sum of p log(p / q) - p + q, where p is exact. Entries whose
log-prob is not stored (those that `threshold` drew, unless "all log-probs") and the draws of RS-KD have none.
Max error is of a log-prob, in nats.

Speeds are the processor's seconds on one thread, median of several, all in one run. Ours are of the row stream with its
checksums; those of scalars are of whole parts with digests.

Bits an id are all that the stream takes beyond the ideal cost of its log-probs and counts; "order 0" and "order 1" are
ideal code lengths of adaptive models (`benchmarks/store_ids.py`). The rivals are re-implementations, more than fair
ones (`benchmarks/store_rivals.py`).

The steps and tails of the smallest rows of `topk` were chosen on rows of earlier teachers of this schedule.
DistillKit's KL is that of its least squares as torch's float32 solver does them here, which is far from the best fit in
the same bytes: rows of both are shown, and no row of ours has a fifth of the best fit's KL in 36 % of the bytes.
Teachers are small and peaked by seeing their text often; rows are one block of 60,000, so models weigh more than in a
full one."""


def table_of(lines: list[Measured]) -> str:
    heads = (
        "layout", "bytes/token", "KL(true ‖ decoded)", "max error", "encode tok/s", "decode tok/s",
        "bits/id", "order 0", "order 1",
    )  # fmt: skip
    rows = [heads, ("---",) + ("---:",) * (len(heads) - 1)]
    for line in lines:
        bits = ("",) * 3 if line.id_bits is None else tuple(f"{bits:.2f}" for bits in line.id_bits)
        distortion = ("–" if value is None else f"{value:.2g}" for value in (line.kl, line.max_error))
        rates = ("" if rate is None else f"{_rounded(rate):,.0f}" for rate in (line.encode_rate, line.decode_rate))
        rows.append((line.name, f"{line.num_bytes:.2f}", *distortion, *rates, *bits))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def goals_of(vocabulary: str, lines: list[Measured]) -> list[str]:
    """What was asked for, and what came of it."""
    by_name = {line.name: line for line in lines}
    recommended = by_name["DistillKit recommended, k=128"]
    budget = by_name["DistillKit budget, k=50"]
    top_128, top_64 = (by_name[f"topk:{k}, step 0.1"] for k in (128, 64))
    small_128, small_50 = _smallest(lines, "topk:128", recommended), _smallest(lines, "topk:50", budget)
    rows, all_rows = by_name["threshold:12, step 0.1"], by_name["threshold:12, step 0.1, all log-probs"]
    scalars = by_name["scalars, all eight"].num_bytes
    most, most_all = (20, 26) if vocabulary == "32k" else (22, 28)
    assert rows.id_bits is not None
    best = by_name["DistillKit recommended, k=128, best fit"]
    checks = [
        (small_128.num_bytes / recommended.num_bytes, 0.36, f"{small_128.name}: of DistillKit's bytes", ".3f"),
        (small_128.kl / recommended.kl, 0.2, f"{small_128.name}: of DistillKit's KL", ".3g"),
        (small_128.max_error / recommended.max_error, 0.2, f"{small_128.name}: of DistillKit's max error", ".3g"),
        (top_128.kl / best.kl, 0.2, f"{top_128.name}: of its KL, had it the best fit", ".3g"),
        (top_128.max_error / best.max_error, 0.2, f"{top_128.name}: of its max error, had it the best fit", ".3g"),
        (small_50.num_bytes / budget.num_bytes, 0.42, f"{small_50.name}: of DistillKit budget's bytes", ".3f"),
        (small_50.kl / budget.kl, 0.2, f"{small_50.name}: of DistillKit budget's KL", ".3g"),
        (rows.num_bytes + scalars, most, "threshold:12 and scalars, bytes a token", ".2f"),
        (all_rows.num_bytes + scalars, most_all, "the same with all log-probs, bytes a token", ".2f"),
        (rows.id_bits[0] / rows.id_bits[2], 1 + _MARGIN, "threshold:12, bits an id of order 1's", ".3f"),
        (top_128.id_bits[0] / top_128.id_bits[2], 1 + _MARGIN, "topk:128, bits an id of order 1's", ".3f"),
    ]
    lines_ = [
        f"- {'met' if found <= limit else '**missed**'}: {what}: {found:{form}}, at most {limit:g} was asked"
        for found, limit, what, form in checks
    ]
    rates = [
        (rows.decode_rate, 1e6, "threshold:12, decoded tokens/s of a core"),
        (top_64.decode_rate, 3e5, "topk:64, decoded tokens/s of a core"),
        (top_64.encode_rate, 3e4, "topk:64, encoded tokens/s of a core"),
    ]
    return lines_ + [
        f"- {'met' if found >= limit else '**missed**'}: {what}: {_rounded(found):,.0f}, {limit:,.0f} were asked"
        for found, limit, what in rates
    ]


def _smallest(lines: list[Measured], selection: str, rival: Measured) -> Measured:
    """Of the rows of a selection, the smallest whose KL is at most a fifth of the rival's, if any is."""
    rows = [line for line in lines if line.name.startswith(f"{selection},")]
    return min(rows, key=lambda line: (line.kl > 0.2 * rival.kl, line.num_bytes))


def _rounded(rate: float) -> float:
    return float(f"{rate:.3g}")


def describe(teacher: TeacherRows, history: list[dict[str, Any]]) -> str:
    """How the teacher was trained, and how peaked it is."""
    stages = "; ".join(
        f"{stage['stage']} stage: {stage['epochs']} epochs over {stage['training_tokens']:,} tokens, at last loss "
        f"{stage['loss_nats']}"
        for stage in history
    )
    of = {"trained on": ~teacher.held_out, "held out": teacher.held_out}
    peaks = "; ".join(
        f"{name}: {int(rows.sum()):,} rows, entropy {teacher.entropy[rows].mean():.2f} nats (median "
        f"{np.median(teacher.entropy[rows]):.2f}), loss {-teacher.realised_logp[rows].mean():.2f}"
        for name, rows in of.items()
        if rows.any()
    )
    entries = len(teacher.thr_ids) / teacher.num_rows
    sampled = teacher.thr_sampled.sum() / teacher.num_rows
    return (
        f"Teacher: {stages}.\n\nRows: {peaks}. Theta {teacher.theta:g}: {entries:.2f} entries a row, "
        f"{sampled:.2f} of them sampled."
    )

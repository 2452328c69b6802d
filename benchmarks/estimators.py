"""Estimators side by side, at about the same number of entries, on a teacher's real distributions.

    python benchmarks/estimators.py 32k --entries 12

The student is a stand-in halfway there: the geometric mean of the teacher and its average distribution, with noise of
one nat on every logit. Spreads are mean squared errors against the whole distribution, in float64 (``estimates.py``);
bytes are those of stored parts, log-probs of sampled entries left out.
"""

from __future__ import annotations

import argparse
from dataclasses import astuple

import numpy as np
import torch
from estimates import Spread, Sums, Truth, certain_of, rows_of, theta_for, with_replacement_weights
from store_corpus import load_corpus
from store_teachers import ensure_teacher
from torch import Tensor

from logitstore.producer.packing import Windows
from logitstore.producer.scoring import Measures, score_block
from logitstore.producer.selection import Policy, Sample, Threshold, TopK, TopP, Union
from logitstore.producer.teacher import Teacher
from logitstore.selections import selection_name
from logitstore.signals import stage_sparse
from logitstore.token_parts import TokenBlock

_CHUNK_ROWS = 64
_PUBLISHED = "RS-KD"  # nothing kept for certain
_COLUMNS = ("entries", "weight sum", "logit gradient", "hidden gradient", "loss", "angle", "bytes a row")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vocabulary", choices=["32k", "131k"], help="whose teacher, see store_teachers.py")
    parser.add_argument("--entries", type=float, default=12.0, help="a row, on average")
    parser.add_argument("--rows", type=int, default=1536, help="to measure spreads on")
    parser.add_argument("--stored-rows", type=int, default=20_000, help="to count bytes on")
    options = parser.parse_args()
    teacher = Teacher(ensure_teacher(options.vocabulary, minutes=30), options.vocabulary)
    documents = load_corpus(options.vocabulary).held_out
    with torch.inference_mode():
        hidden_RD, realised_R = _hidden(teacher, documents, options.rows)
        policies = _policies(teacher, hidden_RD[::6], realised_R[::6], options.entries)
        spreads = _spreads(teacher, hidden_RD, realised_R, policies)
    print("\n".join([f"| {' | '.join(('estimator', *_COLUMNS))} |", f"|{'---|' * (1 + len(_COLUMNS))}"]))
    for (name, policy), spread in zip(policies.items(), spreads, strict=True):
        columns = [f"{value:.3g}" for value in astuple(spread)]
        if not name.startswith(_PUBLISHED):
            columns.append(f"{_stored_bytes(teacher, documents, options.stored_rows, policy):.1f}")
        print(f"| {name} | {' | '.join(columns)} |", flush=True)


def _hidden(teacher: Teacher, documents: list[np.ndarray], num_rows: int) -> tuple[Tensor, Tensor]:
    """Final hidden states [R, D] and realised tokens [R], evenly from all documents."""
    hidden, realised = [], []
    for document in _prefix(documents, 4 * num_rows):
        ids = torch.from_numpy(document).long()
        hidden.append(teacher.hidden(ids, torch.arange(len(ids)))[:-1])
        realised.append(ids[1:])
    picked = torch.linspace(0, sum(map(len, realised)) - 1, num_rows).long()
    return torch.cat(hidden)[picked], torch.cat(realised)[picked]


def _prefix(documents: list[np.ndarray], num_rows: int) -> list[np.ndarray]:
    ends = np.cumsum([len(document) for document in documents])
    return documents[: int(np.searchsorted(ends, num_rows)) + 1]


def _policies(teacher: Teacher, hidden_RD: Tensor, realised_R: Tensor, entries: float) -> dict[str, Policy]:
    """What is compared, at that many entries a row."""
    probs_RV, few = torch.softmax(teacher.head(hidden_RD), -1, dtype=torch.float32), round(entries / 3)
    alone_RV, beside_RV = (certain_of(probs_RV, realised_R, number) for number in (1, few))
    policies: list[Policy] = [
        Threshold(_rounded(theta_for(probs_RV, alone_RV, entries))),
        Union((TopK(few), Threshold(_rounded(theta_for(probs_RV, beside_RV, entries))))),
        Sample(_draws_for(probs_RV, alone_RV, entries)),
        Union((TopK(few), Sample(_draws_for(probs_RV, beside_RV, entries)))),
        TopK(round(entries)),
        TopP(0.98, 2 * round(entries)),
    ]
    published = Sample(_draws_for(probs_RV, torch.zeros_like(alone_RV), entries))
    named = {selection_name(policy.to_json()): policy for policy in policies}
    return {**named, f"{_PUBLISHED}:{published.num_draws}": published}


def _rounded(theta: float) -> float:
    return float(f"{theta:.2g}")


def _draws_for(probs_RV: Tensor, certain_RV: Tensor, entries: float) -> int:
    """Draws with replacement that hit so many tokens, those kept for certain among them."""
    misses_RV = torch.log1p(-probs_RV.double().masked_fill(certain_RV, 0.0))
    num_draws = 1
    while float((certain_RV.sum(-1) - (num_draws * misses_RV).expm1().sum(-1)).mean()) < entries:
        num_draws += max(1, num_draws // 20)
    return num_draws


def _spreads(teacher: Teacher, hidden_RD: Tensor, realised_R: Tensor, policies: dict[str, Policy]) -> list[Spread]:
    chunks = [teacher.head(h_RD).softmax(-1).sum(0) for h_RD in hidden_RD.split(_CHUNK_ROWS)]
    average_V = torch.stack(chunks).sum(0) / len(hidden_RD)
    generator = torch.Generator().manual_seed(0)
    totals: dict[str, Sums] = {}
    for number, (h_RD, r_R) in enumerate(zip(hidden_RD.split(_CHUNK_ROWS), realised_R.split(_CHUNK_ROWS), strict=True)):
        logits_RV = teacher.head(h_RD)
        noise_RV = torch.randn(logits_RV.shape, generator=generator)
        student_RV = (logits_RV.log_softmax(-1) + average_V.log()) / 2 + noise_RV
        truth = Truth(rows_of(logits_RV, r_R, seed=number), student_RV, teacher.head.linear.weight, h_RD)
        for name, policy in policies.items():
            if name.startswith(_PUBLISHED):
                found = truth.of_weights(*with_replacement_weights(truth.rows.probs_RV, policy.max_entries, number))
            else:
                found = truth.of_policy(policy)
            totals[name] = totals[name] + found if number else found
    return [total.spread() for total in totals.values()]


def _stored_bytes(teacher: Teacher, documents: list[np.ndarray], num_rows: int, policy: Policy) -> float:
    """Of a stored part, all of it, by row."""
    chosen = _prefix(documents, num_rows)
    ids = np.concatenate(chosen).astype(np.int32)
    ends = np.cumsum([len(document) for document in chosen]).astype(np.int64)
    tokens = TokenBlock(ids, np.ones(len(ids), np.int32), ends, np.ones(len(ends), bool))
    words = np.arange(len(ends)).astype(np.uint64)
    scored = score_block(teacher, tokens, words, Windows(2048, 0), 512, Measures(policy=policy))
    assert scored.sparse is not None, "a policy makes a sparse signal"
    return stage_sparse(scored.sparse).num_bytes / int(scored.scored.sum())


if __name__ == "__main__":
    main()

"""What the benchmark's teachers say: exact rows, to which every layout is held.

    python benchmarks/store_rows.py 131k --rows 60000

Documents that the teacher was trained on and held-out ones take turns, so that every stretch of rows has both. Each is
scored alone, from its BOS, whose own row is left out: row t is the distribution of token t given those before it.

Shapes: T rows, K candidates, V vocabulary, R rows of one chunk, E entries.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from store_corpus import VOCABULARIES, load_corpus, token_bytes
from store_rivals import DRAWS
from store_teachers import BUILD, ensure_teacher, teacher_history
from torch import Tensor

from logitstore.counter_random import uniform_words
from logitstore.producer.policy import Rows
from logitstore.producer.systematic import MIN_THETA, Threshold
from logitstore.signals import STARTS_FLOOR_NATS
from logitstore.sparse import offsets_of
from logitstore.token_starts import start_masks

K = 128
MEAN_ENTRIES = 12.0
_CHUNK_LOGITS, _DOCUMENTS_EACH = 1 << 21, 8
_CALIBRATION_ROWS = 4096
_CALIBRATION_MARGIN = 0.05


@dataclass(frozen=True)
class TeacherRows:
    """Rows as the teacher has them; log-probs in nats, normalised over the vocabulary, before any rounding.

    Attributes:
        tokens: int32 [T], the realised tokens.
        doc_start: bool [T], the first token after a BOS, which is no row.
        held_out: bool [T], of a document that the teacher was not trained on.
        realised_logp: float32 [T].
        rank: int32 [T], of the realised token, 0 for the likeliest; the smaller id first among equals.
        argmax_id: int32 [T].
        argmax_logp: float32 [T].
        entropy: float32 [T], nats.
        starts: float32 [T, C], log of the mass of tokens that start at a boundary, by class.
        topk_ids, topk_logp: int32 and float32 [T, K], by (log-prob descending, id ascending).
        topk_log_rest: float32 [T, K], log of the mass outside the first k + 1 candidates.
        thr_offsets: int64 [T + 1], of the rows of a threshold selection.
        thr_ids, thr_logp, thr_sampled: int32, float32 and bool [E], the realised token first, the others by
            (log-prob descending, id ascending).
        thr_log_rest: float32 [T], log of the mass of what has no entry.
        draws: int32 [T, DRAWS], tokens drawn with replacement, by id.
        theta: float64 [], of the threshold.
        steps: int64 [], training steps of the teacher.
    """

    tokens: np.ndarray
    doc_start: np.ndarray
    held_out: np.ndarray
    realised_logp: np.ndarray
    rank: np.ndarray
    argmax_id: np.ndarray
    argmax_logp: np.ndarray
    entropy: np.ndarray
    starts: np.ndarray
    topk_ids: np.ndarray
    topk_logp: np.ndarray
    topk_log_rest: np.ndarray
    thr_offsets: np.ndarray
    thr_ids: np.ndarray
    thr_logp: np.ndarray
    thr_sampled: np.ndarray
    thr_log_rest: np.ndarray
    draws: np.ndarray
    theta: np.ndarray
    steps: np.ndarray

    @property
    def num_rows(self) -> int:
        return len(self.tokens)

    def save(self, path: Path) -> None:
        np.savez(path, **{field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def load(cls, path: Path) -> TeacherRows:
        with np.load(path) as arrays:
            return cls(**{field.name: arrays[field.name] for field in fields(cls)})


def ensure_rows(vocabulary: str, num_rows: int, minutes: float, build: Path = BUILD) -> TeacherRows:
    """Cached rows of the teacher as it is now, at least ``num_rows`` of them, or rows made now."""
    model = ensure_teacher(vocabulary, minutes, build)
    steps = sum(stage["steps"] for stage in teacher_history(vocabulary, build))
    path = build / f"rows-{vocabulary}.npz"
    if path.exists():
        rows = TeacherRows.load(path)
        if rows.steps == steps and rows.num_rows >= num_rows:
            return _checked(rows, path)
    rows = score(model, vocabulary, num_rows, steps)
    rows.save(path)
    return _checked(rows, path)


def _checked(rows: TeacherRows, path: Path) -> TeacherRows:
    """What is called threshold:12 has to have about 12 entries a row."""
    entries = len(rows.thr_ids) / rows.num_rows
    if abs(entries / MEAN_ENTRIES - 1) > _CALIBRATION_MARGIN:
        raise SystemExit(f"{path}: rows of {MEAN_ENTRIES:g} entries were expected, found {entries:.2f}; delete it")
    return rows


@torch.inference_mode()
def score(model: torch.nn.Module, vocabulary: str, num_rows: int, steps: int) -> TeacherRows:
    documents, held_out = _taking_turns(vocabulary, num_rows)
    torch.manual_seed(1)
    theta = _calibrate(model, documents)
    policy, chunks = Threshold(theta), []
    starts_VC = torch.from_numpy(start_masks(*token_bytes(vocabulary), model.config.vocab_size))
    done = 0
    for logits_RV, tokens_R, words_R in _scored(model, documents):
        chunks.append(_score_chunk(logits_RV, tokens_R, words_R, starts_VC, policy))
        done += len(tokens_R)
        if len(chunks) % 500 == 0:
            print(f"{vocabulary}: {done} rows of {num_rows}", flush=True)
    joined = {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}
    lengths = [len(document) - 1 for document in documents]
    starts = np.concatenate([np.arange(length) == 0 for length in lengths])
    return TeacherRows(
        **{name: values for name, values in joined.items() if name != "thr_counts"},
        doc_start=starts,
        held_out=np.repeat(held_out, lengths),
        thr_offsets=offsets_of(joined["thr_counts"].astype(np.int64)),
        theta=np.float64(theta),
        steps=np.int64(steps),
    )


def _taking_turns(vocabulary: str, num_rows: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Documents of ``num_rows`` rows in all, half of them held out as far as there are such, evenly mixed."""
    corpus = load_corpus(vocabulary)
    held_out = _prefix(corpus.held_out, num_rows // 2)
    training = _prefix(corpus.training, num_rows - sum(len(document) - 1 for document in held_out))
    place = np.concatenate([(np.arange(len(group)) + 0.5) / max(1, len(group)) for group in (training, held_out)])
    order = np.argsort(place, kind="stable")
    both = training + held_out
    return [both[number] for number in order], order >= len(training)


def _prefix(documents: list[np.ndarray], num_rows: int) -> list[np.ndarray]:
    ends = np.cumsum([len(document) - 1 for document in documents])
    return documents[: int(np.searchsorted(ends, num_rows)) + 1]


def _hidden(model: torch.nn.Module, documents: list[np.ndarray]) -> Iterator[Tensor]:
    """[length - 1, D] of each document."""
    for begin in range(0, len(documents), _DOCUMENTS_EACH):
        group = documents[begin : begin + _DOCUMENTS_EACH]
        ids = torch.zeros(len(group), max(map(len, group)), dtype=torch.int64)
        for place, document in enumerate(group):
            ids[place, : len(document)] = torch.from_numpy(document)
        hidden = model.model(ids, use_cache=False).last_hidden_state  # causal: what is padded follows, and is not seen
        yield from (hidden[place, : len(document) - 1] for place, document in enumerate(group))


def _scored(model: torch.nn.Module, documents: list[np.ndarray]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Chunks of rows, none of two documents: logits, realised tokens, random words."""
    head_VD = model.get_input_embeddings().weight
    chunk_rows = max(1, _CHUNK_LOGITS // len(head_VD))
    for number, (document, hidden_RD) in enumerate(zip(documents, _hidden(model, documents), strict=True)):
        length = len(document) - 1
        words = uniform_words(0, np.full(length, number, np.uint64), np.arange(length)).view(np.int64)
        columns = (hidden_RD @ head_VD.T, torch.from_numpy(document[1:]).long(), torch.from_numpy(words))
        yield from zip(*(column.split(chunk_rows) for column in columns), strict=True)


def _score_chunk(
    logits_RV: Tensor, tokens_R: Tensor, words_R: Tensor, starts_VC: Tensor, policy: Threshold
) -> dict[str, np.ndarray]:
    num_rows, num_tokens = logits_RV.shape
    logp_RV = torch.log_softmax(logits_RV, -1)
    probs_RV = logp_RV.exp()
    top_RK = torch.topk(logp_RV, K, sorted=False).indices.sort(-1).values
    top_RK = top_RK.gather(-1, logp_RV.gather(-1, top_RK).sort(dim=-1, descending=True, stable=True).indices)
    top_logp_RK, realised_R1 = logp_RV.gather(-1, top_RK), logp_RV.gather(-1, tokens_R[:, None])
    entropy_R = -torch.linalg.vecdot(probs_RV, logp_RV)
    kept = policy.select(Rows(logits_RV, probs_RV, top_RK[:, 0], tokens_R, words_R))
    kept_logp_E = logp_RV[kept.row_E, kept.id_E]
    others_E = kept.id_E != tokens_R[kept.row_E]
    order = np.lexsort((kept.id_E.numpy(), -kept_logp_E.numpy(), others_E.numpy(), kept.row_E.numpy()))
    cumulative_RV = probs_RV.double().cumsum(-1)
    uniform_RN = torch.rand(num_rows, DRAWS, dtype=torch.float64) * cumulative_RV[:, -1:]
    chunk = {
        "draws": torch.searchsorted(cumulative_RV, uniform_RN.sort(-1).values).clamp(max=num_tokens - 1).int(),
        "tokens": tokens_R.int(),
        "realised_logp": realised_R1[:, 0],
        "rank": _rank(logp_RV, tokens_R, top_RK),
        "argmax_id": top_RK[:, 0].int(),
        "argmax_logp": top_logp_RK[:, 0],
        "entropy": entropy_R,
        "starts": (probs_RV @ starts_VC).log().clamp(min=STARTS_FLOOR_NATS),
        "topk_ids": top_RK.int(),
        "topk_logp": top_logp_RK,
        "topk_log_rest": _log_rest(probs_RV, top_RK),
        "thr_counts": torch.bincount(kept.row_E, minlength=num_rows),
        "thr_ids": kept.id_E[order].int(),
        "thr_logp": kept_logp_E[order],
        "thr_sampled": kept.draws_E[order] > 0,
        "thr_log_rest": probs_RV.index_put_((kept.row_E, kept.id_E), torch.tensor(0.0)).sum(-1).log(),
    }
    return {name: values.numpy() for name, values in chunk.items()}


def _rank(logp_RV: Tensor, tokens_R: Tensor, top_RK: Tensor) -> Tensor:
    """int32 [R]: most are found among the candidates; the others are counted."""
    found_RK = top_RK == tokens_R[:, None]
    rank_R = found_RK.int().argmax(-1).int()
    for row in (~found_RK.any(-1)).nonzero()[:, 0].tolist():
        token, logp_V = int(tokens_R[row]), logp_RV[row]
        rank_R[row] = (logp_V > logp_V[token]).sum() + (logp_V[:token] == logp_V[token]).sum()
    return rank_R


def _log_rest(probs_RV: Tensor, top_RK: Tensor) -> Tensor:
    """float32 [R, K]: added up from the small end, never a difference."""
    top_probs_RK = probs_RV.gather(-1, top_RK)
    probs_RV.scatter_(-1, top_RK, 0.0)
    after_RK = torch.cat([top_probs_RK[:, 1:], probs_RV.sum(-1, keepdim=True)], -1).double()
    probs_RV.scatter_(-1, top_RK, top_probs_RK)
    return after_RK.flip(-1).cumsum(-1).flip(-1).log().float()


def _calibrate(model: torch.nn.Module, documents: list[np.ndarray]) -> float:
    """The theta, two figures, at which rows have ``MEAN_ENTRIES`` entries on average."""
    # Not every n-th of them: held-out ones take turns with others.
    shuffled = np.random.default_rng(1).permutation(len(documents))
    sample = _prefix([documents[number] for number in shuffled], _CALIBRATION_ROWS)
    likely, below, forced = [], 0.0, []
    for logits_RV, tokens_R, _ in _scored(model, sample):
        probs_RV = torch.softmax(logits_RV, -1)
        best = probs_RV.max(-1)
        chosen = probs_RV >= MIN_THETA
        likely.append(probs_RV[chosen])
        below += float(probs_RV.sum() - likely[-1].sum())
        realised_R = probs_RV.gather(-1, tokens_R[:, None])[:, 0]
        forced.append(torch.stack([best.values, realised_R.where(tokens_R != best.indices, 1.0)]))
    likely_E, forced_2R = torch.cat(likely), torch.cat(forced, -1)
    low, high = np.log(MIN_THETA), 0.0
    for _ in range(20):
        theta = np.exp((low + high) / 2)
        kept = (likely_E / theta).clamp(max=1).sum() + below / theta + (1 - forced_2R / theta).clamp(min=0).sum()
        low, high = (np.log(theta), high) if kept / forced_2R.shape[1] > MEAN_ENTRIES else (low, np.log(theta))
    return float(f"{np.exp(high):.2g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("vocabulary", choices=VOCABULARIES)
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--minutes", type=float, default=30, help="to train the teacher for, where there is none")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = ensure_rows(arguments.vocabulary, arguments.rows, arguments.minutes)
    for name, of in (("trained on", ~rows.held_out), ("held out", rows.held_out)):
        loss, entropy = -rows.realised_logp[of].mean(), rows.entropy[of].mean()
        print(f"{arguments.vocabulary}, {name}: {of.sum()} rows, loss {loss:.2f}, entropy {entropy:.2f} nats")
    print(f"theta {rows.theta:g}: {len(rows.thr_ids) / rows.num_rows:.2f} entries a row")


if __name__ == "__main__":
    main()

"""What each term charges, token by token, in float64 and plain loops: from stored rows, byte counts and dense logits.

Nothing here is shared with ``consumer`` but the decoding of parts and the pairs of an alignment.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from test_batch_loss import dense_logits
from torch import Tensor

from logitstore.alignment_parts import read_pairs
from logitstore.consumer.objectives import Objective
from logitstore.consumer.stream import PlacedBin, Stream
from logitstore.consumer.teacher_columns import TeacherColumns
from logitstore.signals import START_CLASSES, SparseSignal, read_scalars, read_sparse
from logitstore.store import Store
from logitstore.token_parts import TokenBlock, read_tokens
from logitstore.token_starts import start_masks
from logitstore.tokenizer import Tokenizer
from logitstore.vocabulary_classes import VocabularyClasses


@dataclass
class Word:
    """What a teacher says of one charged token.

    Attributes:
        entries: (token, mass) as stored, the teacher's token of the text first; empty where it has no row.
        rest: mass outside them; None: they are a sample.
        span: charged tokens of its span, as places in the batch; empty unless all are charged in one piece and scored.
        pieces: log-probs of the teacher's tokens of that span.
        following: the charged token after the span; None if there is none in the piece.
        starts: mass of tokens that start at a boundary.
        entropy, top: of the row.
    """

    entries: list[tuple[int, float]] = field(default_factory=list)
    rest: float | None = 0.0
    span: list[int] = field(default_factory=list)
    pieces: list[float] = field(default_factory=list)
    following: int | None = None
    starts: float = math.nan
    entropy: float = math.nan
    top: float = math.nan

    @property
    def continuation(self) -> float:
        return sum(self.pieces[1:])


def words(store: Store, stream: Stream, bins: list[PlacedBin], number: int, temperature: float) -> list[Word]:
    """The word of teacher ``number`` on every charged token, in the order of a batch."""
    columns, found = stream.data.teachers[number], []
    places: list[tuple[int, int, int]] = []  # (bin, piece, token)
    for place, (block, pieces) in enumerate(bins):
        for each, piece in enumerate(pieces):
            places += [(place, each, t) for t in range(piece.begin + 1, piece.end) if block.charged[t]]
    blocks = {stream.data.load(n).tokens.ids.tobytes(): n for n in stream.data.train_blocks}
    known = [_Said(store, columns, blocks[block.tokens.ids.tobytes()], block.tokens) for block, _ in bins]
    where = {place: n for n, place in enumerate(places)}
    for place, each, token in places:
        said, word = known[place], Word()
        row = said.row_of.get(token)
        if row is not None and said.signal.rows.scored[row]:
            word.entries, word.rest = _entries(said.signal, row, temperature)
            for name in ("starts", "entropy", "top"):
                setattr(word, name, said.scalars[name][row])
        mine, theirs = said.spans.get(token, ([], []))
        logprobs = [said.logprob(t) for t in theirs]
        if mine and all((place, each, t) in where for t in mine) and not any(map(math.isnan, logprobs)):
            word.span, word.pieces = [where[place, each, t] for t in mine], logprobs
            word.following = where.get((place, each, mine[-1] + 1))
        found.append(word)
    return found


class _Said:
    """A teacher's signal on a block, and which of its tokens stand for which of the student's."""

    def __init__(self, store: Store, columns: TeacherColumns, block: int, student: TokenBlock) -> None:
        self.signal = read_sparse(store.column_part(columns.sparse, block))
        assert columns.scalars is not None
        scalars, _ = read_scalars(store.column_part(columns.scalars, block))
        starts = sum(np.exp(scalars[f"starts@{name}"].astype(np.float64)) for name in START_CLASSES)
        self.scalars = {"starts": starts, "entropy": scalars["entropy"], "top": np.exp(scalars["argmax_logprob"])}
        if columns.alignment is None:
            self.row_of = {t: t for t in range(student.num_tokens)}
            self.spans = {t: ([t], [t]) for t in range(student.num_tokens)}
            return
        assert columns.tokens is not None
        pairs = np.stack(read_pairs(store.column_part(columns.alignment, block)), 1).tolist()
        self.row_of = {mine: theirs for theirs, mine in pairs}
        self.spans = _spans(pairs, read_tokens(store.column_part(columns.tokens, block)), student)

    def logprob(self, token: int) -> float:
        """Of a teacher's token of the text: its row's first entry, which is no draw."""
        rows = self.signal.rows
        return -float(rows.quanta[rows.offsets[token]]) * rows.step_nats if rows.scored[token] else math.nan


def _spans(pairs: list[list[int]], theirs: TokenBlock, mine: TokenBlock) -> dict[int, tuple[list[int], list[int]]]:
    """By student token: its span's tokens and the teacher's, both those of the bytes up to the next shared beginning.

    Bytes are counted, where the code walks over tokens.
    """
    begins = _places(mine)
    marks = sorted({begins[s] for _, s in pairs if mine.byte_lengths[s]})
    found: dict[int, tuple[list[int], list[int]]] = {}
    by_place = [_by_place(side) for side in (mine, theirs)]
    for teacher, student in pairs:
        if not mine.byte_lengths[student]:
            found[student] = ([student], [teacher])
            continue
        document, first = begins[student]
        end = min((place for doc, place in marks if doc == document and place > first), default=10**9)
        span = tuple([t for place, t in side[document] if first <= place < end] for side in by_place)
        found.update(dict.fromkeys(span[0], span))
    return found


def _places(tokens: TokenBlock) -> list[tuple[int, int]]:
    """(document, first byte) of each token."""
    document = np.repeat(np.arange(len(tokens.ends)), np.diff(tokens.ends, prepend=0))
    before = np.concatenate([[0], np.cumsum(tokens.byte_lengths)])
    return [(int(d), int(before[t] - before[tokens.begins[d]])) for t, d in enumerate(document)]


def _by_place(tokens: TokenBlock) -> dict[int, list[tuple[int, int]]]:
    """By document, (first byte, token) of the tokens that have bytes."""
    found: dict[int, list[tuple[int, int]]] = {}
    for token, (document, place) in enumerate(_places(tokens)):
        if tokens.byte_lengths[token]:
            found.setdefault(document, []).append((place, token))
    return found


def _entries(signal: SparseSignal, row: int, temperature: float) -> tuple[list[tuple[int, float]], float | None]:
    rows = signal.rows
    begin, end = rows.offsets[row], rows.offsets[row + 1]
    entries = list(zip(*(x[begin:end].tolist() for x in (rows.ids, rows.quanta, rows.draws)), strict=True))
    if signal.draw_weight is not None:
        weights = [n * signal.draw_weight if n else math.exp(-q * rows.step_nats) for _, q, n in entries]
        return [(entry[0], weight) for entry, weight in zip(entries, weights, strict=True)], None
    masses = [math.exp(-quantum * rows.step_nats / temperature) for _, quantum, _ in entries]
    rest = math.exp(signal.rest[row, signal.temperatures.index(temperature)])
    total = sum(masses) + rest
    return [(entry[0], mass / total) for entry, mass in zip(entries, masses, strict=True)], rest / total


Charged = tuple[Tensor, Tensor]
"""Of a token: what a term's divergence charges, and what it charges of the text beside."""


class DenseTerms:
    """The terms of one teacher on a batch; each method gives None where the term does not speak."""

    def __init__(
        self, logits: Tensor, targets: list[int], said: list[Word], columns: TeacherColumns, student: Tokenizer
    ) -> None:
        self.logits, self.targets, self.said, self.maps, self.student = logits, targets, said, columns.maps, student
        self.temperature, self.objective = 1.0, Objective({"ce": 1.0})
        self.log_q = logits.log_softmax(-1)
        self.none = torch.zeros((), dtype=torch.float64)
        starts = start_masks(student.token_bytes, student.special_ids, logits.shape[1]).any(axis=1)
        self.starts = np.flatnonzero(starts).tolist()

    def term(self, name: str) -> Callable[[int], Charged | None]:
        if self.maps is None and name not in ("chunk_likelihood", "uld"):
            return self.kl
        return getattr(self, name)

    def q(self, n: int) -> Tensor:
        return (self.logits[n] / self.temperature).softmax(-1)

    def kl(self, n: int) -> Charged | None:
        """A teacher with the student's tokens; padding of its head is outside."""
        word, q = self.said[n], self.q(n)
        if not word.entries:
            return None
        cells = [(p, q[u]) for u, p in word.entries if u < self.student.vocab_size]
        return self._divergence(cells, word), self.none

    def first_byte_kl(self, n: int) -> Charged | None:
        assert self.maps is not None
        word, classes, q = self.said[n], self.maps.first_byte, self.q(n)
        realised = int(classes.student_class[self.targets[n]])
        if not word.entries or _class(classes, word.entries[0][0]) != realised:
            return None
        masses: dict[int, float] = {}
        for token, mass in word.entries:
            if (found := _class(classes, token)) >= 0:
                masses[found] = masses.get(found, 0.0) + mass
        members = {c: np.flatnonzero(classes.student_class == c).tolist() for c in {*masses, realised}}
        beside = self.log_q[n][members[realised]].logsumexp(-1) - self.log_q[n][self.targets[n]]
        return self._divergence([(p, q[members[c]].sum()) for c, p in masses.items()], word), beside

    def chunk_likelihood(self, n: int) -> Charged | None:
        word, tau = self.said[n], self.objective.tau
        if not word.span:
            return None
        teacher = torch.tensor(sum(word.pieces), dtype=torch.float64)
        student = sum(self.log_q[each][self.targets[each]] for each in word.span)
        after = word.following
        if self.objective.debias and after is not None and self.said[after].entries:
            if self.said[after].starts < 0.1:
                return None
            teacher = teacher + math.log(self.said[after].starts)
            student = student + self.log_q[after][self.starts].logsumexp(-1)
        if n != word.span[-1]:
            return self.none, self.none
        p, q = ((x.clamp(max=-1e-6) / tau).exp() for x in (teacher, student))
        return tau * (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()), self.none

    def uld(self, n: int) -> Charged | None:
        word = self.said[n]
        if not word.entries:
            return None
        known = [(u, p) for u, p in word.entries if self.maps is not None or u < self.student.vocab_size]
        masses = [p for _, p in known]
        if len(masses) > 1 and masses[0] <= min(masses[1:]):
            masses = masses[1:]
        gaps = [p - q for p, q in zip(_falling(masses), self.q(n).sort(descending=True).values, strict=False)]
        return sum(map(abs, gaps)) + abs(sum(gaps)), self.none

    def gold(self, n: int) -> Charged | None:
        return self._paired(n, self._exact_pairs)

    def xtoken_hkl(self, n: int) -> Charged | None:
        return self._paired(n, self._relaxed_pairs)

    @cached_property
    def _exact_pairs(self) -> dict[int, int]:
        """Teacher token -> student token of the same bytes, the lowest."""
        assert self.maps is not None
        return {u: v for v, u in reversed(list(enumerate(self.maps.common.tolist()))) if u >= 0}

    @cached_property
    def _relaxed_pairs(self) -> dict[int, int]:
        best = {}
        for v, weights in enumerate(self._projection()):
            if weights:
                u, weight = max(weights, key=lambda each: (each[1], -each[0]))
                if weight >= 0.6:
                    best[v] = (u, weight)
        pairs: dict[int, int] = {}
        for v, (u, weight) in best.items():  # ascending, so the lowest of equals stays
            if u not in pairs or weight > best[pairs[u]][1]:
                pairs[u] = v
        return pairs

    def xtoken_pkl(self, n: int) -> Charged | None:
        word, q = self.said[n], self.q(n)
        if not word.entries:
            return None
        image = {
            u: sum(weight * q[v] for v, weight in self._stand_ins[u]) for u, _ in word.entries if u in self._stand_ins
        }
        return self._divergence([(p, image[u]) for u, p in word.entries if u in image], word), self.none

    @cached_property
    def _stand_ins(self) -> dict[int, list[tuple[int, float]]]:
        """By teacher token, the student tokens that stand for it, with their weights."""
        found: dict[int, list[tuple[int, float]]] = {}
        for v, weights in enumerate(self._projection()):
            for u, weight in weights:
                found.setdefault(u, []).append((v, weight))
        return found

    def _projection(self) -> list[list[tuple[int, float]]]:
        """By student token, the teacher tokens it stands for with their weights, which sum to one."""
        assert self.maps is not None
        projection = self.maps.student_to_teacher
        rows = []
        for begin, end in zip(projection.indptr[:-1], projection.indptr[1:], strict=True):
            weights = projection.weights[begin:end].astype(np.float64)
            rows.append(list(zip(projection.ids[begin:end].tolist(), weights / max(weights.sum(), 1e-9), strict=True)))
        return rows

    def _paired(self, n: int, pairs: dict[int, int]) -> Charged | None:
        word, q = self.said[n], self.q(n)
        if self.temperature != 1.0 and not (word.entries and len(word.span) == len(word.pieces) == 1):
            return None
        if not word.span:
            return None
        if not word.entries:
            return self.none, self.none  # inside a span, which its first token answers for
        first, others = word.entries[0][1], word.entries[1:]
        follow = sum(self.log_q[each][self.targets[each]] for each in word.span[1:])
        cells = [(first * math.exp(word.continuation), q[self.targets[n]] * torch.as_tensor(follow).exp())]
        cells += [(p, q[pairs[u]]) for u, p in others if u in pairs and pairs[u] != self.targets[n]]
        # The span's first token is charged with the cells, paired or not.
        unpaired = sorted(set(range(len(q))) - set(pairs.values()) - {self.targets[n]})
        theirs = _falling([p for u, p in others if u not in pairs])
        ours = q[unpaired].sort(descending=True).values[: len(word.entries)]
        assert word.rest is not None
        ceiling = min([word.rest, *(p for _, p in others)])
        distance = sum(
            abs(theirs[rank] - mass) if rank < len(theirs) else (mass - ceiling).clamp(min=0.0)
            for rank, mass in enumerate(ours)
        )
        return self._divergence(cells, word) + distance, self.none

    def _divergence(self, cells: list[tuple[float, Tensor]], word: Word) -> Tensor:
        """T^2 KL on the cells and the rest; of a sample, the cross-entropy."""
        if word.rest is None:
            return -sum(p * q.log() for p, q in cells)  # type: ignore[return-value]
        rest = 1.0 - sum(p for p, _ in cells)
        found = sum(p * (math.log(p) - q.log()) for p, q in cells)
        if rest > 1e-12:
            found = found + rest * (math.log(rest) - (1.0 - sum(q for _, q in cells)).log())
        return self.temperature**2 * found  # type: ignore[return-value]


def _class(classes: VocabularyClasses, token: int) -> int:
    return int(classes.teacher_class[token]) if token < len(classes.teacher_class) else -1


def _falling(masses: list[float]) -> list[float]:
    return sorted(masses, reverse=True)


@dataclass
class DenseLoss:
    """What a batch comes to.

    Attributes:
        total: with its gradient.
        terms: sums of the divergences, as ``<term>/<teacher>``, and ``ce``.
        num_spoken: how many tokens each term speaks of.
        span_sizes: of the spans that it has, as (student's tokens, teacher's).
    """

    total: Tensor
    terms: dict[str, float]
    num_spoken: dict[str, int]
    span_sizes: set[tuple[int, int]]


def dense_loss(
    store: Store,
    model: torch.nn.Module,
    student: Tokenizer,
    stream: Stream,
    bins: list[PlacedBin],
    objective: Objective,
    temperature: float,
    shares: Callable[[list[list[Word]], int], list[float]] | None = None,
) -> DenseLoss:
    """The objective on a batch.

    Args:
        shares: of the teachers at a token, given their words; their weights if not given.
    """
    logits, teachers = dense_logits(model, bins), stream.data.teachers
    targets = stream.collate(bins).targets.tolist()
    said = [words(store, stream, bins, number, temperature) for number in range(len(teachers))]
    weights = [columns.weight for columns in teachers]
    ce = [-logits[n].log_softmax(-1)[target] for n, target in enumerate(targets)]
    total = objective.weight("ce") * sum(ce)
    terms, num_spoken = {"ce": torch.stack(ce).sum().item()}, {}
    for number, columns in enumerate(teachers):
        dense = DenseTerms(logits, targets, said[number], columns, student)
        dense.temperature, dense.objective = temperature, objective
        for name in objective.teacher_terms:
            key, charge = f"{name}/{columns.name}", dense.term(name)
            terms[key], num_spoken[key] = 0.0, 0
            for n in range(len(targets)):
                share = (shares(said, n) if shares else weights)[number]
                found = charge(n)
                if found is not None:
                    terms[key] += torch.as_tensor(found[0]).item()
                    num_spoken[key] += 1
                charged = ce[n] if found is None else found[0] + found[1]
                total = total + objective.weight(name) * share * charged
    sizes = {(len(word.span), len(word.pieces)) for each in said for word in each if word.span}
    return DenseLoss(total, terms, num_spoken, sizes)  # type: ignore[arg-type]

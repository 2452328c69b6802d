"""What the alignment's benchmark writes down."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from alignment_corpora import DISORDER
from alignment_end_to_end import EndToEnd
from alignment_judging import Judged
from alignment_measures import PIECE_TOKENS, Raced

NOTES = f"""\
A span is a stretch between two neighbouring boundaries that both tokenisations share. Coverage is the share of the
student's tokens in spans that are right, as judged without logitstore's own tables and proofs: the bytes that the
tokenizers themselves give for the span's tokens, put together, are those of the source; where a tokenizer normalises,
its own normaliser makes of the source what the span's pieces spell, but for white space, and an unknown token stands
for anything but nothing (`benchmarks/alignment_judging.py`).

"{DISORDER}" was not asked for and does not count in the goals: letters under heaps of random marks, which NFKC sorts.

Same image is the share of shared beginnings at which the student's token is the first of those that the teacher's
token is mapped to by its bytes; elsewhere a loss that maps the teacher's candidates in that way is wrong about the
token that is there. Digits are the beginnings where one comes next.

Speeds are by one thread's processor time. The kernel's are of the student's tokens, from byte lengths to stored bits
and counts. Rivals are re-implementations in plain Python (`benchmarks/alignment_rivals.py`), run on pieces of
{PIECE_TOKENS:,} student tokens and judged by the true bytes; ours are given with and without the proof of the bytes."""


@dataclass(frozen=True)
class Pair:
    """A teacher's and a student's tokenizer, and their alignments by corpus."""

    teacher: str
    student: str
    is_lossless: bool
    judged: Mapping[str, Judged]
    rates: Mapping[str, float]

    @property
    def name(self) -> str:
        return f"{self.teacher} → {self.student}"

    def total(self, count: Callable[[Judged], int]) -> int:
        return sum(count(found) for found in self.judged.values())


@dataclass(frozen=True)
class Goal:
    text: str
    is_met: bool

    def __str__(self) -> str:
        return f"- {'met' if self.is_met else '**missed**'}: {self.text}"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def pairs_table(pairs: Sequence[Pair]) -> str:
    """One row for each ordered pair, all corpora together."""
    heads = ("teacher → student", "coverage", "wrong spans", "longest span", "same image", "on digits", "M tokens/s")
    return table(heads, map(_pair_row, pairs))


def _pair_row(pair: Pair) -> tuple[str, ...]:
    return (
        pair.name,
        _percent(pair.total(lambda found: found.num_correct), pair.total(lambda found: found.num_tokens)),
        f"{pair.total(lambda found: found.num_wrong_spans):,}",
        str(max(found.longest for found in pair.judged.values())),
        _percent(pair.total(lambda found: found.num_same), pair.total(lambda found: found.num_shared), 1),
        _percent(pair.total(lambda found: found.num_same_digits), pair.total(lambda found: found.num_shared_digits), 1),
        f"{min(pair.rates.values()) / 1e6:.0f}–{max(pair.rates.values()) / 1e6:.0f}",
    )


def corpora_table(pairs: Sequence[Pair]) -> str:
    """Lowest coverage of any pair by corpus, of those without and with normalisation, and the longest span."""
    heads = ("corpus", "lossless pairs, lowest", "normalising pairs, lowest", "of", "longest span")
    rows = []
    for corpus in pairs[0].judged:
        cells = [corpus]
        for is_lossless in (True, False):
            chosen = [pair for pair in pairs if pair.is_lossless == is_lossless]
            worst = min(chosen, key=lambda pair: pair.judged[corpus].coverage, default=None)
            cells.append("" if worst is None else f"{100 * worst.judged[corpus].coverage:.3f} %")
            if not is_lossless:
                cells.append("" if worst is None else worst.name)
        rows.append((*cells, str(max(pair.judged[corpus].longest for pair in pairs))))
    return table(heads, rows)


def race_table(races: Mapping[str, Sequence[Raced]]) -> str:
    """By corpus: milliseconds, coverage, and how many times ours."""
    names = [raced.name for raced in next(iter(races.values()))]
    rows = []
    for corpus, found in races.items():
        ours = found[0].seconds
        assert ours is not None
        rows.append((corpus, *(_raced_cell(raced, ours) for raced in found)))
    return table(("corpus", *names), rows)


def _raced_cell(raced: Raced, ours: float) -> str:
    if raced.seconds is None or raced.coverage is None:
        return "refused"
    times = "" if raced.seconds == ours else f", {_rounded(raced.seconds / ours):,.0f}×"
    return f"{1000 * raced.seconds:,.3g} ms{times}, {100 * raced.coverage:.1f} %"


def end_to_end_table(measured: Mapping[str, EndToEnd]) -> str:
    rows = [
        (
            name,
            f"{found.num_bytes / found.alone / 1e6:.2f}",
            f"{found.num_bytes / found.stored / 1e6:.2f}",
            f"{100 * found.share:.1f} %",
        )
        for name, found in measured.items()
    ]
    return table(("teacher → student", "tokenizer alone, MB/s", "text to stored alignment, MB/s", "share"), rows)


def goals_of(
    pairs: Sequence[Pair], races: Mapping[str, Sequence[Raced]], measured: Mapping[str, EndToEnd]
) -> list[Goal]:
    """What was asked for, and what came of it."""
    goals = []
    for is_lossless, asked, kind in ((True, 1.0, "lossless"), (False, 0.999, "normalising")):
        cells = [
            (found.coverage, f"{pair.name}, {corpus}")
            for pair in pairs
            if pair.is_lossless == is_lossless
            for corpus, found in pair.judged.items()
            if corpus != DISORDER
        ]
        if cells:
            worst, where = min(cells)
            num_below = sum(coverage < asked for coverage, _ in cells)
            below = f", {num_below} of {len(cells)} below" if num_below else ""
            text = f"coverage of every {kind} pair and corpus: {100 * worst:.4f} % ({where}){below}"
            goals.append(Goal(f"{text}; {100 * asked:g} % was asked", worst >= asked))
    slowest = min(rate for pair in pairs if pair.is_lossless for rate in pair.rates.values())
    goals.append(
        Goal(f"kernel, slowest lossless pair: {slowest / 1e6:.0f} M tokens/s; 20 M were asked", slowest >= 20e6)
    )
    for corpus, asked_times in (("English", 1_000), ("Chinese", 100_000)):
        ours, rival = races[corpus][0].seconds, races[corpus][2].seconds
        assert ours is not None
        assert rival is not None
        times = _rounded(rival / ours)
        goals.append(
            Goal(f"{corpus}: {times:,.0f} times as fast as the DP; {asked_times:,} were asked", times >= asked_times)
        )
    for name, found in measured.items():
        text = f"end to end, {name}: {100 * found.share:.1f} % of the speed of the tokenizer alone; 70 % was asked"
        goals.append(Goal(text, found.share >= 0.7))
    return goals


def _percent(part: int, whole: int, digits: int = 4) -> str:
    return f"{100 * part / whole:.{digits}f} %" if whole else "–"


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")

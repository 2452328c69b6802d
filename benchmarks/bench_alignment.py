"""``make bench-alignment``: whether alignments of two tokenisations are right, how fast they are, and what others do.

Cuts ten corpora with six tokenizers, aligns every ordered pair, and judges each span by what the tokenizers say of
themselves. Trains four of the tokenizers unless build/bench-alignment has them. Writes benchmarks/RESULTS-alignment.md;
``--quick`` takes little text and writes to build/bench-alignment/quick.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import permutations
from pathlib import Path

# Both before tokenizers is imported: speeds are of one thread.
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("RAYON_NUM_THREADS", "1")

from alignment_corpora import CORPORA, LONG, SIZE, load_corpus
from alignment_end_to_end import EndToEnd, measure_end_to_end
from alignment_judging import cut, judge
from alignment_measures import Raced, kernel_rate, pieces_of, race
from alignment_report import NOTES, Pair, corpora_table, end_to_end_table, goals_of, pairs_table, race_table
from alignment_rivals import StringDP, TwoPointer, array_table, canonical_spellings, decoded_spellings, list_table
from alignment_tokenizers import NAMES, BenchTokenizer, byte_alphabet, load_tokenizer

from logitstore.token_parts import TokenBlock
from logitstore.vocabulary_maps import vocabulary_maps

BUILD = Path("build/bench-alignment")
RESULTS = Path("benchmarks/RESULTS-alignment.md")
RACES = (("tekken 131k", "SentencePiece 32k"), ("ByteLevel", "Llama-3-style"))
END_TO_END = ("tekken 131k", ("SentencePiece 32k", "ByteLevel", "Unigram, NFKC", "WordPiece, lower-cased"))


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    size: int = SIZE
    """Bytes of a corpus."""
    end_to_end_bytes: int = 8_000_000
    num_pieces: int = 3
    """That rivals align."""
    vocab_size: int = 8192
    corpora: tuple[str, ...] = CORPORA


QUICK = Scale(
    size=20_000, end_to_end_bytes=100_000, num_pieces=1, vocab_size=4096, corpora=("English", "Chinese", LONG)
)


def measure_pairs(names: Sequence[str], scale: Scale, build: Path) -> list[Pair]:
    """Every ordered pair of tokenizers on every corpus."""
    loaded = {name: load_tokenizer(name, build, scale.vocab_size) for name in names}
    texts = {corpus: load_corpus(corpus, scale.size) for corpus in scale.corpora}
    blocks = {(name, corpus): cut(loaded[name], texts[corpus]) for name in names for corpus in scale.corpora}
    return [_measure_pair(loaded[a], loaded[b], texts, blocks) for a, b in permutations(names, 2)]


def _measure_pair(
    teacher: BenchTokenizer,
    student: BenchTokenizer,
    texts: dict[str, list[str]],
    blocks: dict[tuple[str, str], TokenBlock],
) -> Pair:
    image = vocabulary_maps(None, student.ours, teacher.ours).first_student
    judged, rates = {}, {}
    for corpus, documents in texts.items():
        both = blocks[teacher.name, corpus], blocks[student.name, corpus]
        judged[corpus] = judge(teacher, student, both, documents, image)
        rates[corpus] = kernel_rate(both)
    pair = Pair(teacher.name, student.name, teacher.is_lossless and student.is_lossless, judged, rates)
    lowest = min(found.coverage for found in judged.values())
    print(
        f"{pair.name:50s} lowest coverage {100 * lowest:.3f} %, {min(rates.values()) / 1e6:.0f} M tokens/s", flush=True
    )
    return pair


def measure_races(teacher: str, student: str, scale: Scale, build: Path) -> dict[str, list[Raced]]:
    """Ours and the rivals on every corpus but the long documents, which add nothing to pieces."""
    sides = [load_tokenizer(name, build, scale.vocab_size) for name in (teacher, student)]
    alphabet = byte_alphabet()
    rivals = (
        StringDP("string DP (NeMo-RL)", canonical_spellings, array_table),
        StringDP("in lists", canonical_spellings, list_table),
        StringDP("in lists, ByteLevel read", decoded_spellings(alphabet), list_table),
        TwoPointer("two-pointer (TRL)", alphabet),
    )
    found = {}
    for corpus in scale.corpora:
        if corpus != LONG:
            pieces = pieces_of(sides[1], load_corpus(corpus, scale.size), scale.num_pieces)
            found[corpus] = race(sides[0], sides[1], pieces, rivals)
            print(
                f"{teacher} → {student}, {corpus}: ",
                *(f"{each.name} {each.seconds}" for each in found[corpus]),
                flush=True,
            )
    return found


def measure_ends(teacher: str, students: Sequence[str], scale: Scale, build: Path) -> dict[str, EndToEnd]:
    """English text into a store, by pair."""
    texts = load_corpus("English", scale.end_to_end_bytes)
    loaded = {name: load_tokenizer(name, build, scale.vocab_size) for name in (teacher, *students)}
    found = measure_end_to_end(loaded[teacher], [loaded[name] for name in students], texts, build / "store")
    return {f"{teacher} → {name}": each for name, each in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke test: figures mean little")
    arguments = parser.parse_args()
    scale, build = (QUICK, BUILD / "quick") if arguments.quick else (Scale(), BUILD)
    ends = measure_ends(*END_TO_END, scale, build)
    pairs = measure_pairs(NAMES, scale, build)
    races = {(teacher, student): measure_races(teacher, student, scale, build) for teacher, student in RACES}
    sections = [
        "# Alignment of two tokenisations",
        f"Written by `make bench-alignment` on {datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, one thread.",
        "\n".join(map(str, goals_of(pairs, races[RACES[0]], ends))),
        NOTES,
        "## Pairs, all corpora together",
        pairs_table(pairs),
        "## Corpora",
        corpora_table(pairs),
    ]
    for (teacher, student), found in races.items():
        sections += [f"## Next to others: {teacher} → {student}", race_table(found)]
    sections += ["## End to end", end_to_end_table(ends)]
    results = build / RESULTS.name if arguments.quick else RESULTS
    results.write_text("\n\n".join(sections) + "\n")
    print(f"wrote {results}")


if __name__ == "__main__":
    main()

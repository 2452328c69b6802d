"""Plans: where blocks end, who is held out, and what a plan's identity is."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logitstore.documents import Document, Segment
from logitstore.plan import (
    ALL_HELD_OUT,
    DEFAULT_BLOCK_BYTES,
    SMALLEST_BLOCK_BYTES,
    BlockCutter,
    Plan,
    PlanBlock,
    PlanSettings,
    block_digest,
    split_hash,
)

SETTINGS = PlanSettings(block_bytes=2000, held_out_below=0)


def text_document(text: str) -> Document:
    return Document((Segment("text", text),))


def corpus_of(num_documents: int, seed: int = 0, mean_bytes: int = 100) -> list[Document]:
    rng = np.random.default_rng(seed)
    lengths = rng.geometric(1 / mean_bytes, num_documents)
    return [text_document(f"{seed}.{n}:" + "x" * int(length)) for n, length in enumerate(lengths)]


def cut(documents: list[Document], plan_settings: PlanSettings = SETTINGS) -> list[list[Document]]:
    cutter = BlockCutter(plan_settings)
    blocks = [block for document in documents for block in cutter.add(document)]
    return [*blocks, *cutter.flush()]


def digests(documents: list[Document]) -> list[str]:
    return [block_digest(block) for block in cut(documents)]


# Cuts

CORPUS = corpus_of(1200)


def test_blocks_hold_all_documents_in_order():
    assert [document for block in cut(CORPUS) for document in block] == CORPUS
    assert digests(CORPUS) == digests(CORPUS)


@pytest.mark.parametrize("mean_bytes", [20, 100, 700, 1500])
def test_block_sizes_are_around_the_target(mean_bytes):
    blocks = cut(corpus_of(300_000 // mean_bytes, mean_bytes=mean_bytes))
    sizes = np.array([sum(document.num_bytes for document in block) for block in blocks])
    last = np.array([block[-1].num_bytes for block in blocks])
    assert (sizes[:-1] >= SETTINGS.block_bytes // 4).all()
    assert (sizes - last < SETTINGS.block_bytes * 2).all(), "a block ends with the document that makes it too large"
    assert 0.7 * SETTINGS.block_bytes < sizes.mean() < 1.4 * SETTINGS.block_bytes


def test_document_larger_than_a_block_ends_its_block():
    large = text_document("y" * 10_000)
    blocks = cut([*CORPUS[:3], large, *CORPUS[3:6]])
    assert blocks[0][-1] == large
    assert sum(block.count(large) for block in blocks) == 1


@settings(max_examples=40)
@given(st.data())
def test_edit_rekeys_only_neighbouring_blocks(data):
    """Cuts are found again soon after any edit, wherever it was: content-defined, not counted from the start."""
    edited = list(CORPUS)
    position = data.draw(st.integers(0, len(edited) - 1))
    match data.draw(st.sampled_from(["insert", "delete", "replace"])):
        case "insert":
            edited[position:position] = [text_document("new")] * data.draw(st.integers(1, 3))
        case "delete":
            del edited[position : position + data.draw(st.integers(1, 3))]
        case "replace":
            edited[position] = text_document("z" * data.draw(st.integers(1, 3000)))
    before, after = digests(CORPUS), digests(edited)
    lost = sum((Counter(before) - Counter(after)).values())
    assert lost <= 12
    # What changed is one run of blocks: all others are still there, in order, before and behind it.
    same_front = next((n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
    same_back = next(
        (n for n, (a, b) in enumerate(zip(before[::-1], after[::-1], strict=False)) if a != b), len(before)
    )
    assert same_front + same_back >= len(before) - 12


def test_edit_rekeys_two_blocks_on_average():
    rng = np.random.default_rng(1)
    before, lost = digests(CORPUS), []
    for position in rng.integers(0, len(CORPUS), 60).tolist():
        after = digests([*CORPUS[:position], *CORPUS[position + 1 :]])
        lost.append(len(set(before) - set(after)))
    assert len(before) > 40
    assert np.mean(lost) < 3


def test_appending_documents_keeps_all_blocks_but_the_last():
    assert digests(CORPUS)[:-1] == digests([*CORPUS, *corpus_of(100, seed=1)])[: len(digests(CORPUS)) - 1]


def test_block_digest_is_of_the_documents_in_order():
    a, b = CORPUS[:2]
    assert len({block_digest([a]), block_digest([a, b]), block_digest([b, a]), block_digest([b])}) == 4


# Settings


def test_settings_of_a_small_corpus_give_many_blocks():
    assert PlanSettings.for_corpus(0, 0.05).block_bytes == SMALLEST_BLOCK_BYTES
    assert PlanSettings.for_corpus(64 << 20, 0.05).block_bytes == 1 << 20
    assert PlanSettings.for_corpus(1 << 50, 0.05).block_bytes == DEFAULT_BLOCK_BYTES
    assert PlanSettings.for_corpus(1 << 50, 0.05, block_bytes=12345).block_bytes == 12345


def test_settings_hold_out_the_fraction_asked_for():
    documents = corpus_of(4000, mean_bytes=5)
    held_out = [PlanSettings.for_corpus(1, 0.1).holds_out(document) for document in documents]
    assert 0.08 < np.mean(held_out) < 0.12
    assert not any(PlanSettings.for_corpus(1, 0.0).holds_out(document) for document in documents)
    assert all(PlanSettings.for_corpus(1, 1.0).holds_out(document) for document in documents)
    assert PlanSettings.for_corpus(1, 1.0).held_out_below == ALL_HELD_OUT


def test_settings_read_back():
    kept = PlanSettings(1 << 20, (1 << 64) - 1, "ab" * 32)
    assert PlanSettings.from_json(kept.to_json()) == kept


def test_split_is_by_prompt():
    answers = [Document((Segment("prompt", "p"), Segment("completion", answer))) for answer in "ab"]
    assert split_hash(answers[0]) == split_hash(answers[1])


# Plans

BLOCKS = (
    PlanBlock("aa" * 32, "train", 2, 10, (1, 3), (0, 1)),
    PlanBlock("bb" * 32, "held_out", 1, 5, (1,), (1,)),
)
PLAN = Plan(PlanSettings(4096, 7, "aa" * 32), BLOCKS, ("s3://b/a.jsonl", "naïve.txt"))


@pytest.mark.parametrize("plan", [PLAN, Plan(PLAN.settings, (), ())])
def test_plan_reads_back_from_parquet(plan):
    assert Plan.from_parquet(plan.to_parquet()) == plan
    assert plan.to_parquet() == plan.to_parquet()


def test_identity_ignores_sources_and_settings():
    moved = dataclasses.replace(
        PLAN,
        sources=("elsewhere",),
        settings=PlanSettings(1, 2, "cc"),
        blocks=tuple(dataclasses.replace(block, sources=(0,) * block.num_documents) for block in BLOCKS),
    )
    assert moved.identity == PLAN.identity
    assert moved.to_parquet() != PLAN.to_parquet()


@pytest.mark.parametrize(
    "blocks",
    [
        BLOCKS[::-1],
        BLOCKS[:1],
        (dataclasses.replace(BLOCKS[0], digest="cc" * 32), BLOCKS[1]),
        (dataclasses.replace(BLOCKS[0], split="held_out"), BLOCKS[1]),
        (dataclasses.replace(BLOCKS[0], multiplicities=(1, 2)), BLOCKS[1]),
    ],
    ids=["order", "fewer", "digest", "split", "multiplicity"],
)
def test_identity_sees_what_a_plan_means(blocks):
    assert dataclasses.replace(PLAN, blocks=blocks).identity != PLAN.identity

"""Ingest: a corpus, read in a stream, becomes a plan and text parts.

Memory holds a block of each split and about a hundred bytes a document (to find exact duplicates), never the corpus.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from logitstore.columns import TEXT_ID, find_answers
from logitstore.corpus import CorpusFile, FieldMap, ReadReport, read_documents
from logitstore.digests import digest_json
from logitstore.documents import Document
from logitstore.errors import CorpusError
from logitstore.manifest import Manifest
from logitstore.plan import (
    ALL_HELD_OUT,
    HELD_OUT,
    TRAIN,
    BlockCutter,
    Plan,
    PlanBlock,
    PlanBlocks,
    PlanSettings,
    block_digest,
    split_hash,
)
from logitstore.store import Store
from logitstore.text_parts import stage_text, text_recipe


@dataclass(frozen=True)
class Ingested:
    """What ingest found. ``report`` is None when the plan was known already and nothing was read."""

    plan_digest: str
    plan: Plan
    report: ReadReport | None


def ingest(
    store: Store,
    files: list[CorpusFile],
    settings: PlanSettings,
    fields: FieldMap | None = None,
    on_error: str = "raise",
    progress: Callable[[Document], None] = lambda document: None,
    current: Manifest | None = None,
) -> Ingested:
    """Read a corpus, store its text by blocks, and write its plan. Unchanged files are not read again.

    Args:
        store: where to.
        files: as ``list_files`` names them.
        settings: how to cut and split.
        fields: names of the rows' fields.
        on_error: ``raise`` or ``skip`` for unreadable rows.
        progress: called for every document read.
        current: newest version of the dataset, whose texts need not be looked for.

    Raises:
        CorpusError: a row cannot be read, or there is no document at all.
    """
    fields = fields or FieldMap()
    recipe = plan_recipe(files, settings, fields, on_error)
    known = store.answer(recipe)
    if known is not None:
        plan = store.plan(known.result["plan"])
        # Text that a repair has dropped is read again.
        if not find_answers(store, plan, [], current).lacking([TEXT_ID]):
            return Ingested(known.result["plan"], plan, None)
    reading = _Reading(store, settings)
    report = ReadReport()
    reading.take(read_documents(files, fields, on_error, report), progress)
    if reading.num_documents == 0:
        skipped = f" ({report.num_skipped} unreadable rows, {report.num_empty} empty)"
        raise CorpusError(
            f"{', '.join(file.source for file in files[:3])}: no documents found{skipped}; expected rows with "
            "`text`, `prompt` and `completion`, or `messages`"
        )
    if (below := reading.held_out_below()) != settings.held_out_below:
        reading = _Reading(store, replace(settings, held_out_below=below))
        report = ReadReport()
        reading.take(read_documents(files, fields, on_error, report), progress)
    plan = reading.plan()
    digest = store.commit_result(recipe, {"plan": store.put_plan(plan)}, {}).result["plan"]
    # A run on a dataset that exists asks with the settings of its plan, which are settled further than those of before.
    store.commit_result(plan_recipe(files, plan.settings, fields, on_error), {"plan": digest}, {})
    return Ingested(digest, store.plan(digest), report)


def plan_recipe(files: list[CorpusFile], settings: PlanSettings, fields: FieldMap, on_error: str) -> dict[str, Any]:
    """What a plan is made from. Paths enter as a digest only: a record never holds where a user keeps things."""
    listing = [[file.url, str(file.size), file.version] for file in files]
    return {
        "kind": "plan",
        "version": "1",
        "files": digest_json(listing),
        "fields": {name: str(value) for name, value in vars(fields).items()},
        "on_error": on_error,
        "settings": settings.to_json(),
    }


@dataclass
class _Reading:
    """One pass over the corpus."""

    store: Store
    settings: PlanSettings
    blocks: list[tuple[str, str, list[int], int, int]] = field(default_factory=list)
    multiplicities: array = field(default_factory=lambda: array("I"))
    source_numbers: array = field(default_factory=lambda: array("I"))
    sources: dict[str, int] = field(default_factory=dict)
    smallest_split_hash: int = (1 << 64) - 1
    largest_split_hash: int = 0

    def __post_init__(self) -> None:
        self._seen: dict[bytes, int] = {}
        self._cutters = {split: BlockCutter(self.settings) for split in (TRAIN, HELD_OUT)}
        self._members: dict[str, list[int]] = {TRAIN: [], HELD_OUT: []}

    @property
    def num_documents(self) -> int:
        return len(self.multiplicities)

    def held_out_below(self) -> int:
        """The setting, unless the corpus is so small that a fraction of it lands whole on one side of the split.

        Then the prompt whose turn comes first is held out; a corpus of a single prompt is for training.
        """
        asked, smallest, largest = self.settings.held_out_below, self.smallest_split_hash, self.largest_split_hash
        if asked in (0, ALL_HELD_OUT) or smallest < asked <= largest or (smallest == largest >= asked):
            return asked
        return smallest + (smallest < largest)

    def take(self, documents: Iterable[Document], progress: Callable[[Document], None]) -> None:
        for document in documents:
            progress(document)
            self._add(document)
        for split, cutter in self._cutters.items():
            for finished in cutter.flush():
                self._finish(split, finished)

    def plan(self) -> Plan:
        blocks = PlanBlocks.of(
            PlanBlock(
                digest,
                split,
                len(members),
                num_bytes,
                tuple(self.multiplicities[number] for number in members),
                tuple(self.source_numbers[number] for number in members),
                num_chats,
            )
            for digest, split, members, num_bytes, num_chats in self.blocks
        )
        train = [digest for digest, held_out in zip(blocks.digests, blocks.held_out, strict=True) if not held_out]
        calibration = self.settings.calibration_block or min(train or blocks.digests)
        return Plan(replace(self.settings, calibration_block=calibration), blocks, tuple(self.sources))

    def _add(self, document: Document) -> None:
        key = document.digest()[:16]
        if key in self._seen:
            self.multiplicities[self._seen[key]] += 1
            return
        number = self._seen[key] = self.num_documents
        self.multiplicities.append(1)
        self.source_numbers.append(self.sources.setdefault(document.source, len(self.sources)))
        split = HELD_OUT if self.settings.holds_out(document) else TRAIN
        drawn = split_hash(document)
        self.smallest_split_hash = min(self.smallest_split_hash, drawn)
        self.largest_split_hash = max(self.largest_split_hash, drawn)
        self._members[split].append(number)
        for finished in self._cutters[split].add(document):
            self._finish(split, finished)

    def _finish(self, split: str, documents: list[Document]) -> None:
        digest = block_digest(documents)
        num_bytes = sum(document.num_bytes for document in documents)
        num_chats = sum(document.is_chat for document in documents)
        self.blocks.append((digest, split, self._members[split], num_bytes, num_chats))
        self._members[split] = []
        recipe = text_recipe(digest)
        if self.store.answer(recipe) is None:
            stats = {"num_rows": num_bytes, "num_documents": len(documents)}
            self.store.commit_part(recipe, stage_text(documents), stats, {})

"""Plans: a corpus as a list of blocks, written once, before anything is scored.

Blocks are runs of consecutive documents. Where one ends depends on the digests of its last documents alone, so that
inserting or deleting documents changes the neighbouring blocks and no others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from logitstore import tables
from logitstore.digests import digest_bytes
from logitstore.documents import Document
from logitstore.plan_blocks import HELD_OUT, TRAIN, PlanBlock, PlanBlocks

__all__ = [
    "HELD_OUT",
    "TRAIN",
    "BlockCutter",
    "Plan",
    "PlanBlock",
    "PlanBlocks",
    "PlanSettings",
    "block_digest",
    "split_hash",
]

DEFAULT_BLOCK_BYTES = 4 << 20
SMALLEST_BLOCK_BYTES = 32 << 10
DEFAULT_HELD_OUT = 0.05
_BLOCKS_WANTED = 64
_HASH_RANGE = 1 << 64
ALL_HELD_OUT = _HASH_RANGE - 1
"""``held_out_below`` of those who ask for no training documents."""


@dataclass(frozen=True)
class PlanSettings:
    """How a corpus is cut and split. Kept with the plan, so that a grown corpus is cut as before.

    Attributes:
        block_bytes: canonical UTF-8 bytes that a block has on average.
        held_out_below: documents whose prompt digest, as an integer of 64 bits, lies below this are held out.
        calibration_block: digest of the block that whatever must be settled once for a dataset (a threshold) is settled
            on. Empty for a new dataset: the training block with the smallest digest becomes it.
    """

    block_bytes: int
    held_out_below: int
    calibration_block: str = ""

    @classmethod
    def for_corpus(cls, corpus_bytes: int, held_out: float, block_bytes: int | None = None) -> PlanSettings:
        """Settings for a new dataset: small corpora get small blocks, so that a kill costs minutes."""
        wanted = max(1, corpus_bytes // _BLOCKS_WANTED)
        scaled = 1 << (wanted.bit_length() - 1)
        chosen = block_bytes or min(DEFAULT_BLOCK_BYTES, max(SMALLEST_BLOCK_BYTES, scaled))
        return cls(chosen, min(ALL_HELD_OUT, int(held_out * _HASH_RANGE)))

    def holds_out(self, document: Document) -> bool:
        return split_hash(document) < self.held_out_below

    def to_json(self) -> dict[str, str]:
        return {
            "block_bytes": str(self.block_bytes),
            "held_out_below": str(self.held_out_below),
            "calibration_block": self.calibration_block,
        }

    @classmethod
    def from_json(cls, data: dict[str, str]) -> PlanSettings:
        return cls(int(data["block_bytes"]), int(data["held_out_below"]), data["calibration_block"])


def split_hash(document: Document) -> int:
    """64 bits of the digest of the prompt: documents that share a prompt are never on both sides of the split."""
    return int.from_bytes(document.prompt_digest()[:8], "big")


@dataclass(frozen=True)
class Plan:
    """A corpus as a list of blocks.

    Attributes:
        blocks: any iterable of blocks will do; it is kept as columns.
    """

    settings: PlanSettings
    blocks: PlanBlocks
    sources: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", PlanBlocks.of(self.blocks))

    @property
    def has_chats(self) -> bool:
        """Whether chat templates bear on the tokens of this corpus."""
        return bool(self.blocks.num_chats.any())

    @property
    def identity(self) -> str:
        """Digest of what the plan means: its blocks, their split and multiplicities; not of paths or encodings."""
        return self.blocks.identity

    def to_parquet(self) -> bytes:
        header = {"format": 1, "settings": self.settings.to_json(), "sources": list(self.sources)}
        return tables.write_table(self.blocks.to_columns(), header)

    @classmethod
    def from_parquet(cls, data: bytes) -> Plan:
        table = tables.StoredTable(data)
        settings = PlanSettings.from_json(table.header["settings"])
        return cls(settings, PlanBlocks.from_table(table), tuple(table.header["sources"]))


@dataclass
class BlockCutter:
    """Gathers the documents of one split and says where blocks end."""

    settings: PlanSettings
    documents: list[Document] = field(default_factory=list)
    num_bytes: int = 0

    def add(self, document: Document) -> Iterator[list[Document]]:
        """Take one more document; yields the finished block if it is the last one of it."""
        self.documents.append(document)
        self.num_bytes += document.num_bytes
        if self._ends_with(document):
            yield from self.flush()

    def flush(self) -> Iterator[list[Document]]:
        if self.documents:
            finished, self.documents, self.num_bytes = self.documents, [], 0
            yield finished

    def _ends_with(self, document: Document) -> bool:
        target = self.settings.block_bytes
        smallest, largest = target // 4, target * 2
        if self.num_bytes < smallest:
            return False
        # Past the smallest size a document ends the block with a probability in proportion to its bytes, read off its
        # own digest: the expected size is the target whatever the lengths of documents are.
        chance = min(1.0, document.num_bytes / (target - smallest))
        drawn = int.from_bytes(document.digest()[8:16], "big")
        return self.num_bytes >= largest or drawn < chance * _HASH_RANGE


def block_digest(documents: list[Document]) -> str:
    """Digest of the ordered document digests."""
    return digest_bytes(b"logitstore.block.1" + b"".join(document.digest() for document in documents))

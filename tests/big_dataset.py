"""A dataset version of 100,000 blocks, of which no part exists, and what opening it takes."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import numpy as np

from logitstore.column_cells import ColumnCells
from logitstore.manifest import Column, Manifest
from logitstore.plan import Plan, PlanBlocks, PlanSettings
from logitstore.store import Store
from logitstore.versions import create_version

NUM_BLOCKS = 100_000


def write_big_dataset(url: str) -> Manifest:
    """A version of 100,000 blocks and five columns, of a thousand documents a block; no part of it exists."""
    rng = np.random.default_rng(0)
    blocks = PlanBlocks(
        rng.integers(0, 256, (NUM_BLOCKS, 32), np.uint8),
        rng.random(NUM_BLOCKS) < 0.05,
        np.full(NUM_BLOCKS, 1000),
        rng.integers(3 << 20, 5 << 20, NUM_BLOCKS),
        np.zeros(NUM_BLOCKS, np.int64),
        np.column_stack([np.arange(NUM_BLOCKS), rng.integers(0, 1000, NUM_BLOCKS), np.full(NUM_BLOCKS, 2)]),
        np.column_stack([np.arange(NUM_BLOCKS), np.full(NUM_BLOCKS, 1000), np.arange(NUM_BLOCKS) // 100]),
    )
    sources = tuple(f"s3://bucket/corpus/file-{number:05d}.jsonl" for number in range(NUM_BLOCKS // 100))
    plan = Plan(PlanSettings(4 << 20, 1 << 60, "00" * 32), blocks, sources)
    kinds = ("text", "tokens", "tokens", "signal", "alignment")
    columns = tuple(
        Column({"kind": kind, "n": str(number)}, kind, random_cells(rng), {}, random_pages(rng))
        for number, kind in enumerate(kinds)
    )
    store = Store.open_or_create(url)
    manifest = Manifest(store.put_plan(plan), plan, columns)
    digest = store._put("manifests", manifest.to_parquet())
    assert create_version(store.storage, "big", 1, digest, manifest.identity)
    return manifest


def random_cells(rng: np.random.Generator) -> ColumnCells:
    stats = ("num_rows", "num_scored", "num_entries", "bytes.sparse", "bytes.rest", "bytes.metadata")
    return ColumnCells(
        np.ones(NUM_BLOCKS, bool),
        rng.integers(0, 256, (NUM_BLOCKS, 32), np.uint8),
        rng.integers(0, 256, (NUM_BLOCKS, 32), np.uint8),
        {name: rng.integers(900_000, 1_100_000, NUM_BLOCKS) for name in stats},
    )


def random_pages(rng: np.random.Generator) -> tuple[tuple[int, str], ...]:
    return tuple((end, rng.bytes(32).hex()) for end in (*range(256, NUM_BLOCKS, 256), NUM_BLOCKS))


OPEN = textwrap.dedent("""
    import json, sys, time
    import logitstore, logitstore.store
    began = time.perf_counter()
    manifest = logitstore.open(sys.argv[1]).dataset("big").manifest
    cell, block = manifest.columns[3].cells[77_777], manifest.plan.blocks[77_777]
    identity, seconds = manifest.identity, time.perf_counter() - began
    peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    found = [identity, cell.part, block.digest, list(block.multiplicities), int(peak.split()[1]) << 10, seconds]
    print(json.dumps(found))
""")


def open_elsewhere(url: str) -> dict:
    """What a fresh process finds in the dataset, the most memory that it had in all, and the seconds of opening.

    Importing the library is in the memory, not in the seconds.
    """
    ran = subprocess.run([sys.executable, "-c", OPEN, url], capture_output=True, text=True, check=True)
    names = ("identity", "part", "block", "multiplicities", "peak_bytes", "seconds")
    return dict(zip(names, json.loads(ran.stdout), strict=True))

"""A store as format 1 wrote it, kept in ``corpora/stores``: every later version has to read it.

    python tests/golden_store.py       make it anew (only while the format is not released)

It has text, tokens of two tokenizers, their alignment, and the scalars and two sparse signals of a made-up teacher, the
second of them with draws, in standard codecs; two versions, one of them pinned.
"""

from __future__ import annotations

import io
import json
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from stores import DATASET, fill_store, signal_template

from logitstore.columns import next_manifest, recipe_for
from logitstore.digests import digest_json
from logitstore.manifest import Manifest
from logitstore.pins import pin
from logitstore.recipes import Answer
from logitstore.signals import SparseSignal, read_sparse, stage_sparse
from logitstore.sparse import NOT_STORED, SparseRows
from logitstore.store import Store
from logitstore.versions import find_version

FOLDER = Path(__file__).parent / "corpora/stores"
ARCHIVE, FACTS = FOLDER / "format-1.tar.gz", FOLDER / "format-1.json"


def unpack(folder: Path) -> tuple[Store, dict[str, Any]]:
    """The store below ``folder``, and what is known of it."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return Store.open(str(folder / "store")), json.loads(FACTS.read_text())


def facts_of(manifest: Manifest) -> dict[str, Any]:
    """Contents by column and block, in the order of both."""
    contents = {
        f"{column.kind} {column.label} {column.id[:8]}": [
            None if cell is None else cell.content for cell in column.cells
        ]
        for column in manifest.columns
    }
    return {"identity": manifest.identity, "contents": dict(sorted(contents.items()))}


def add_draws(store: Store, manifest: Manifest) -> tuple[str, dict[str, Any]]:
    """A signal whose last two entries a row were drawn, for every block but the last: its id and template."""
    (topk,) = manifest.find("signal", signal="sparse")
    template = signal_template("sparse", topk.template["tokens"])
    template["selection"] = {"policy": "threshold", "theta": "0.2"}
    for block, cell in list(enumerate(topk.cells))[:-1]:
        assert cell is not None
        recipe = recipe_for(template, manifest.plan.blocks[block].digest, answers_of(store, manifest, block))
        assert recipe is not None
        found = read_sparse(store.part(cell.part))
        drawn = np.flatnonzero(found.rows.counts)[:, None] * 0 + np.array([2, 3])
        drawn = (found.rows.offsets[:-1][found.rows.counts > 0][:, None] + drawn).reshape(-1)
        quanta, draws, ids = found.rows.quanta.copy(), found.rows.draws.copy(), found.rows.ids.copy()
        quanta[drawn], draws[drawn] = NOT_STORED, 1
        ids[drawn] = np.sort(ids[drawn].reshape(-1, 2), axis=1).reshape(-1)
        rows = SparseRows(found.rows.offsets, ids, quanta, draws)
        part = stage_sparse(SparseSignal(rows, found.rest[:, :1], (1.0,), 0.2), portable=True)
        stats = {"num_rows": rows.num_rows, "num_entries": rows.num_entries}
        store.commit_part(recipe, part, stats, {"device": "none"})
    return digest_json(template), template


def answers_of(store: Store, manifest: Manifest, block: int) -> dict[str, Any]:
    found = {column.id: column.cells[block] for column in manifest.columns}
    return {id_: Answer({"part": cell.part, "content": cell.content}, {}) for id_, cell in found.items() if cell}


def write() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store, version = fill_store(str(folder / "store"), folder, num_documents=8)
        pin(store.storage, find_version(store.storage, DATASET, version.number))
        template_id, template = add_draws(store, version.manifest)
        columns = {column.id: (dict(column.template), column.label) for column in version.manifest.columns}
        columns[template_id] = (template, "made-up")
        plan = version.manifest.plan_digest
        second = store.publish(DATASET, lambda current: next_manifest(store, current, plan, columns))
        FACTS.write_text(json.dumps(facts_of(second.manifest), indent=1) + "\n")
        with tarfile.open(ARCHIVE, "w:gz") as archive:
            for path in sorted((folder / "store").rglob("*")):
                if path.is_file() and "tmp" not in path.relative_to(folder).parts:
                    member = tarfile.TarInfo(path.relative_to(folder).as_posix())
                    data = path.read_bytes()
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))


if __name__ == "__main__":
    write()

"""A store that format 1 wrote is read, verified, grown and copied by this version, content by content."""

from __future__ import annotations

import zarr
from golden_store import DATASET, facts_of, unpack

from logitstore.copying import copy_dataset
from logitstore.signals import read_scalars, read_sparse
from logitstore.store import Store
from logitstore.token_parts import read_tokens
from logitstore.verification import verify
from logitstore.versions import find_version


def test_golden_store_is_whole(tmp_path):
    store, facts = unpack(tmp_path)
    assert verify(store).faults == ()
    assert facts_of(store.dataset(DATASET).manifest) == facts
    assert store.dataset(DATASET).number == 2


def test_signals_of_the_golden_store_read(tmp_path):
    store, _ = unpack(tmp_path)
    manifest = store.dataset(DATASET).manifest
    topk, draws = manifest.find("signal", signal="sparse")
    if draws.template["selection"]["policy"] == "topk":
        topk, draws = draws, topk
    (scalars,) = manifest.find("signal", signal="scalars")
    (tokens,) = (column for column in manifest.find("tokens") if column.label == "teacher")
    assert (topk.num_holes, draws.num_holes, scalars.num_holes) == (0, 1, 0)
    for block in range(len(manifest.plan.blocks) - 1):
        block_tokens = read_tokens(store.column_part(tokens, block))
        kept, drawn = read_sparse(store.column_part(topk, block)), read_sparse(store.column_part(draws, block))
        firsts = kept.rows.offsets[:-1][kept.rows.scored]
        assert (kept.rows.ids[firsts] == block_tokens.ids[block_tokens.positions() > 0]).all()
        assert (kept.rows.offsets == drawn.rows.offsets).all()
        assert drawn.rows.draws.sum() == 2 * len(firsts)
        assert drawn.draw_weight == 0.2
        values, scored = read_scalars(store.column_part(scalars, block))
        assert (scored == kept.rows.scored).all()
        assert len(values) == 9


def test_plain_zarr_reads_the_golden_store(tmp_path):
    store, _ = unpack(tmp_path)
    for column in store.dataset(DATASET).manifest.columns:
        cell = column.cells[0]
        group = zarr.open_group(str(tmp_path / "store/parts" / cell.part), mode="r")
        for name in sorted(store.part(cell.part).array_names()):
            assert group[name][...].shape == group[name].shape


def test_golden_store_is_copied_whole(tmp_path):
    store, facts = unpack(tmp_path)
    destination = Store.open_or_create(str(tmp_path / "copy"))
    copy_dataset(store, destination, find_version(store.storage, DATASET, 2))
    assert facts_of(destination.dataset(DATASET).manifest) == facts
    assert verify(destination).faults == ()

"""Streams that format 1 wrote decode to the values that they were made of; their mutations do no harm."""

from __future__ import annotations

import tracemalloc

import codec_corpus
import numpy as np
import pytest

from logitstore.codecs.quantised import decode_columns
from logitstore.codecs.row_stream import decode_rows

STREAMS = sorted(path for path in codec_corpus.FOLDER.iterdir() if path.suffix != ".npy")


@pytest.mark.parametrize("path", STREAMS, ids=lambda path: path.name)
def test_stream_of_format_1_decodes(path):
    expected = np.load(path.with_name(path.name + ".npy"), allow_pickle=False)
    if path.suffix == ".rows":
        assert (decode_rows(path.read_bytes()).rectangle(expected.shape[1]) == expected).all()
    else:
        found = decode_columns(path.read_bytes(), codec_corpus.STEPS, len(expected))
        assert (found.view(np.uint32) == expected.view(np.uint32)).all()


def test_corpus_has_every_kind_of_stream():
    assert {path.suffix for path in STREAMS} == {".rows", ".columns"}
    assert len(STREAMS) >= 6


def test_mutated_streams_are_refused_or_decode_within_bounds():
    """Nothing but DamageError leaves a decoder, and none holds more than a few times the array that was declared."""
    codec_corpus.fuzz(20, seed=0)  # compiles
    tracemalloc.start()
    refused, decoded = codec_corpus.fuzz(2500, seed=1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert refused > 1500
    assert decoded > 20
    assert peak < 16 << 20

"""Ids from outside: read from Parquet, checked before anything runs, laid beside a block's rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from teachers import token_block

from logitstore.errors import ConfigError
from logitstore.producer.given import Given, GivenIds
from logitstore.producer.selection import Union, parse_selection

A, B, C = "aa" * 32, "bb" * 32, "cc" * 32


def _write(path: Path, rows: list[tuple[Any, Any, Any]]) -> str:
    documents, positions, ids = zip(*rows, strict=True) if rows else ((), (), ())
    table = pa.table(
        {
            "document": pa.array(documents, pa.string()),
            "position": pa.array(positions, pa.int32()),
            "ids": pa.array(ids, pa.list_(pa.int32())),
        }
    )
    pq.write_table(table, path, row_group_size=2)
    return str(path)


def test_given_ids_stand_at_their_tokens(tmp_path: Path) -> None:
    url = _write(tmp_path / "ids.parquet", [(B, 2, [7, 8]), (A, 1, [5]), (C, 0, [1]), (B, 0, []), (A, 2, [9, 6, 3])])
    given = GivenIds.read(url).block([B, "dd" * 32, A], token_block([[0, 0, 0], [0, 0], [0, 0, 0]]))
    expected = [[-1] * 3, [-1] * 3, [7, 8, -1], [-1] * 3, [-1] * 3, [-1] * 3, [5, -1, -1], [9, 6, 3]]
    assert given.table(np.arange(8)).tolist() == expected
    assert given.table(np.array([6, 2])).tolist() == [[5, -1], [7, 8]]
    assert given.table(np.array([0])).shape == (1, 0)


def test_digest_is_of_the_content_alone(tmp_path: Path) -> None:
    rows = [(A, 1, [5]), (B, 0, [1, 2]), (B, 1, [3])]
    one, same, other, moved = (
        GivenIds.read(_write(tmp_path / f"{number}.parquet", found)).digest
        for number, found in enumerate(
            [rows, rows[::-1], [(A, 1, [6]), *rows[1:]], [(A, 1, [5]), (A, 2, [1, 2]), rows[2]]]
        )
    )
    assert one == same
    assert len({one, other, moved}) == 3


def test_file_of_no_rows_gives_nothing(tmp_path: Path) -> None:
    source = GivenIds.read(_write(tmp_path / "none.parquet", []))
    assert source.block([A], token_block([[1, 2]])).table(np.arange(2)).shape == (2, 0)
    assert Given(source).max_entries == 0


def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    given = Given(GivenIds.read(_write(tmp_path / "ids.parquet", [(A, 0, [5, 99])])))
    given.check_vocabulary(100, "t")
    with pytest.raises(ConfigError, match="token id 99 is outside the vocabulary of t, which has 99 tokens"):
        given.check_vocabulary(99, "t")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(A, 1, [5]), (B, 0, [1]), (A, 1, [6])], f"position 1 of document {A} is given twice"),
        ([("aa", 0, [1])], "64 hexadecimal digits, found 'aa'"),
        ([("zz" * 32, 0, [1])], "64 hexadecimal digits"),
        ([(A, 0, [-1])], "whole numbers from 0"),
        ([(A, None, [1])], "without a document, position or list"),
        ([(A, 0, [None, 1])], "nothing in one of its places"),
    ],
)
def test_impossible_rows_are_refused(tmp_path: Path, rows: list[tuple[Any, Any, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GivenIds.read(_write(tmp_path / "ids.parquet", rows))


def test_position_past_the_end_is_refused(tmp_path: Path) -> None:
    source = GivenIds.read(_write(tmp_path / "ids.parquet", [(A, 3, [1])]))
    with pytest.raises(ConfigError, match="has 3 tokens of this teacher, found positions 3 to 3"):
        source.block([A], token_block([[0, 0, 0]]))


def test_files_that_are_no_such_table_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read a Parquet file there"):
        parse_selection(f"given:{tmp_path / 'nothing.parquet'}")
    (tmp_path / "text.parquet").write_text("no")
    with pytest.raises(ConfigError, match="cannot read a Parquet file there"):
        parse_selection(f"given:{tmp_path / 'text.parquet'}")
    pq.write_table(pa.table({"document": [A], "ids": [[1]]}), tmp_path / "columns.parquet")
    with pytest.raises(ConfigError, match="position is not among document, ids"):
        parse_selection(f"given:{tmp_path / 'columns.parquet'}")
    pq.write_table(pa.table({"document": [A], "position": ["x"], "ids": [[1]]}), tmp_path / "types.parquet")
    with pytest.raises(ConfigError, match="whole numbers"):
        parse_selection(f"given:{tmp_path / 'types.parquet'}")


def test_given_in_a_union_may_have_a_plus_in_its_name(tmp_path: Path) -> None:
    url = _write(tmp_path / "a+b.parquet", [(A, 1, [5])])
    policy = parse_selection(f"given:{url}+topk:8")
    assert isinstance(policy, Union)
    assert policy.max_entries == 9

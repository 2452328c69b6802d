"""Corpora: what is listed, what is read, and what is said about rows and files that cannot be."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import zipfile

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from logitstore.corpus import FieldMap, ReadReport, list_files, read_documents
from logitstore.documents import Segment
from logitstore.errors import ConfigError, CorpusError

ROWS = [
    {"text": "plain"},
    {"prompt": "2+2=", "completion": "4"},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "héllo 🎉"}]},
]
SEGMENTS = [
    (Segment("text", "plain"),),
    (Segment("prompt", "2+2="), Segment("completion", "4")),
    (Segment("user", "hi"), Segment("assistant", "héllo 🎉")),
]


def write_lines(path, rows):
    path.write_bytes(b"".join(row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows))
    return str(path)


def read(*patterns, **options):
    return list(read_documents(list_files(patterns), **options))


def read_one_error(path, **options):
    with pytest.raises(CorpusError) as caught:
        read(str(path), **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_list_files_sorts_and_deduplicates(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        (tmp_path / name).write_text("{}")
    found = list_files([f"{tmp_path}/c.txt", f"{tmp_path}/*.jsonl", str(tmp_path)])
    assert [os.path.basename(file.url) for file in found] == ["a.jsonl", "b.jsonl", "c.txt"]
    assert all(file.size == 2 for file in found)


def test_list_files_takes_supported_visible_files_of_a_folder(tmp_path):
    for name in ("a.py", "sub/b.jsonl.gz", "sub/c.pyc", ".git/d.txt", "e.png", "sub/deep/F.PARQUET"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    found = [os.path.relpath(file.url, tmp_path) for file in list_files([str(tmp_path)])]
    assert found == ["a.py", "sub/b.jsonl.gz", "sub/deep/F.PARQUET"]


def test_list_files_version_changes_with_the_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    [before] = list_files([str(path)])
    os.utime(path, ns=(1, 1))
    [after] = list_files([str(path)])
    assert before.version != after.version


@pytest.mark.parametrize("pattern", ["nowhere.jsonl", "*.jsonl", "empty", "nosuch://x/y.jsonl"])
def test_list_files_names_a_pattern_that_matches_nothing(tmp_path, pattern):
    (tmp_path / "empty").mkdir()
    pattern = pattern if "://" in pattern else f"{tmp_path}/{pattern}"
    with pytest.raises(CorpusError, match=pattern.replace("*", r"\*")):
        list_files([pattern])


def test_list_files_takes_a_name_with_glob_characters_literally(tmp_path):
    path = tmp_path / "a[1].txt"
    path.write_text("x")
    assert [file.url for file in list_files([str(path)])] == [str(path)]


def test_read_documents_from_a_remote_file_system_by_file_glob_and_folder():
    fs = fsspec.filesystem("memory")
    fs.pipe("/corpus/a.jsonl", b'{"text": "a"}')
    fs.pipe("/corpus/sub/b.txt", b"b")
    patterns = ["memory://corpus", "memory://corpus/**/*.txt", "memory://corpus/a.jsonl"]
    assert [document.text for document in read(*patterns)] == ["a", "b"]


def test_read_documents_from_an_archive(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("rows/t.jsonl", '{"text": "zipped"}')
    for pattern in (f"zip://rows/*.jsonl::{tmp_path}/a.zip", f"zip://rows/t.jsonl::{tmp_path}/a.zip"):
        first, second = list_files([pattern]), list_files([pattern])
        assert first == second
        assert [document.text for document in read_documents(first)] == ["zipped"]


def test_read_documents_reads_every_kind_of_row_from_lines(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [b"\xef\xbb\xbf", *ROWS[:2], b"\n", b"  \r\n", ROWS[2]])
    documents = read(path)
    assert [document.segments for document in documents] == SEGMENTS
    assert {document.source for document in documents} == {path}


@pytest.mark.parametrize("suffix", ["gz", "bz2", "zst"])
def test_read_documents_decompresses_lines(tmp_path, suffix):
    data = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)
    compressed = {"gz": gzip.compress, "bz2": bz2.compress, "zst": lambda data: pa.compress(data, "zstd", asbytes=True)}
    path = tmp_path / f"a.jsonl.{suffix}"
    path.write_bytes(compressed[suffix](data) * 2)
    assert [document.segments for document in read(str(path))] == SEGMENTS * 2


def write_table(path, table):
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=2)
        return
    opener = pa.ipc.new_file if path.suffix == ".feather" else pa.ipc.new_stream
    with opener(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


@pytest.mark.parametrize("name", ["a.parquet", "a.feather", "a.arrow"])
def test_read_documents_reads_every_kind_of_row_from_tables(tmp_path, name):
    path = tmp_path / name
    write_table(
        path,
        pa.Table.from_pylist(
            [{**dict.fromkeys(("text", "prompt", "completion", "messages")), **row} for row in ROWS] * 3
        ),
    )
    assert [document.segments for document in read(str(path))] == SEGMENTS * 3


@pytest.mark.parametrize("name", ["a.parquet", "a.feather", "a.arrow"])
def test_read_documents_names_the_row_of_a_table_that_is_not_utf8(tmp_path, name):
    binary = pa.array([b"good", b"bad\xff", b"fine"], pa.binary())
    text = pa.StringArray.from_buffers(3, *binary.buffers()[1:])
    write_table(tmp_path / name, pa.table({"text": text}))
    assert f"{name}, row 2: unreadable row: invalid UTF-8" in read_one_error(tmp_path / name)
    assert [document.text for document in read(str(tmp_path / name), on_error="skip")] == ["good", "fine"]


def test_read_documents_names_the_columns_of_a_table_that_has_none_of_ours(tmp_path):
    write_table(tmp_path / "a.parquet", pa.table({"body": ["x"], "id": [1]}))
    message = read_one_error(tmp_path / "a.parquet", on_error="skip")
    assert "found body, id: map the names, e.g. text=body" in message


def test_read_documents_reads_text_files_whole(tmp_path):
    (tmp_path / "a.md").write_bytes(b"# Title\r\n\xef\xbb\xbfx\n")
    (tmp_path / "b.unknown").write_bytes(b"\xef\xbb\xbfafter a byte order mark")
    assert [document.text for document in read(f"{tmp_path}/*")] == ["# Title\r\n\ufeffx\n", "after a byte order mark"]


def test_read_documents_prefers_messages_then_prompt_then_text(tmp_path):
    row = {"text": "t", "prompt": "p", "completion": "c", "messages": [{"role": "user", "content": "m"}]}
    rows = [row, {**row, "messages": None}, {**row, "messages": None, "completion": None}]
    path = write_lines(tmp_path / "a.jsonl", rows)
    assert [document.segments[0].role for document in read(path)] == ["user", "prompt", "text"]


def test_read_documents_maps_field_names(tmp_path):
    row = {"conversation": [{"from": "user", "value": "hi"}]}
    path = write_lines(tmp_path / "a.jsonl", [row, {"body": "text"}])
    fields = FieldMap.parse("messages=conversation, role=from,content=value,text=body")
    assert [document.text for document in read(path, fields=fields)] == ["hi", "text"]


def test_field_map_refuses_an_unknown_name_with_the_nearest():
    with pytest.raises(ConfigError, match="unknown name 'promt', did you mean 'prompt'"):
        FieldMap.parse("promt=question")
    with pytest.raises(ConfigError, match="expected NAME=FIELD, found 'text'"):
        FieldMap.parse("text")


def test_read_documents_counts_empty_rows_and_does_not_yield_them(tmp_path):
    rows = [{"text": ""}, {"messages": []}, {"prompt": "", "completion": ""}, {"text": " "}]
    report = ReadReport()
    assert len(read(write_lines(tmp_path / "a.jsonl", rows), report=report)) == 1
    assert (report.num_documents, report.num_empty, report.num_skipped) == (1, 3, 0)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b'{"text": "cut', "expected one JSON object per line"),
        (b"[" * 100_000, "expected one JSON object per line"),
        (b'{"text": "\xff"}', "invalid UTF-8 at byte 10"),
        (b'{"text": "\\ud800"}', "lone surrogate"),
        ([1, 2], "expected an object with fields, found a list"),
        ({"body": "x"}, "expected fields 'text', 'prompt' + 'completion' or 'messages', found body"),
        ({"prompt": "x"}, "found prompt"),
        ({"text": 3}, "expected a string in 'text', found a number"),
        ({"messages": "x"}, "expected a list in 'messages', found a string"),
        ({"messages": ["x"]}, r"expected an object in messages[0], found a string"),
        ({"messages": [{"role": "human", "content": "x"}]}, "unknown role 'human'"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "unknown role ['user']"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "expected a string in 'messages[0].content'"),
        ({"messages": [{"role": "user"}]}, "found null"),
    ],
)
def test_read_documents_names_an_unreadable_row_by_file_and_line(tmp_path, row, reason):
    line = row if isinstance(row, bytes) else json.dumps(row).encode()
    path = write_lines(tmp_path / "a.jsonl", [{"text": "good"}, b"\n", line + b"\n", {"text": "after"}])
    message = read_one_error(path)
    assert message.startswith(f"{path}:3: unreadable row: ")
    assert reason in message
    report = ReadReport()
    assert [document.text for document in read(path, on_error="skip", report=report)] == ["good", "after"]
    assert (report.num_documents, report.num_skipped, report.errors) == (2, 1, [message])


def test_read_documents_keeps_the_first_few_errors(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [b"x\n"] * 9)
    report = ReadReport()
    assert read(path, on_error="skip", report=report) == []
    assert report.num_skipped == 9
    assert [message.split(": ")[0] for message in report.errors] == [f"{path}:{line}" for line in range(1, 6)]


def test_read_documents_refuses_a_binary_file(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"ab\0c")
    (tmp_path / "b.png").write_bytes(b"\x89PNG")
    assert "found a zero byte" in read_one_error(tmp_path / "a.bin")
    assert "expected UTF-8 text, found other bytes at 0" in read_one_error(tmp_path / "b.png")


@pytest.mark.parametrize("name", ["a.parquet", "a.feather", "a.arrow", "a.jsonl.gz", "a.jsonl.zst", "a.jsonl.xz"])
def test_read_documents_names_a_file_that_is_cut_short(tmp_path, name):
    path = tmp_path / name
    rows = [{"text": os.urandom(16).hex()} for _ in range(500)]
    if path.suffix in {".gz", ".zst", ".xz"}:
        codec = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix)
        data = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        path.write_bytes(pa.compress(data, codec, asbytes=True) if codec else lzma.compress(data))
    else:
        write_table(path, pa.Table.from_pylist(rows))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert f"{path}: cannot be read, it may be damaged or cut short" in read_one_error(path, on_error="skip")


def test_read_documents_names_a_file_that_has_gone(tmp_path):
    files = list_files([write_lines(tmp_path / "a.jsonl", ROWS)])
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(CorpusError, match=r"a\.jsonl: no such file"):
        list(read_documents(files))


def test_read_documents_names_a_file_that_is_forbidden(tmp_path, monkeypatch):
    files = list_files([write_lines(tmp_path / "a.jsonl", ROWS)])

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(fsspec, "open", refuse)  # root may read everything, so take the right away here
    with pytest.raises(CorpusError, match=r"a\.jsonl: permission denied"):
        list(read_documents(files))


def test_read_documents_streams(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "first"}, b"not json\n"])
    assert next(iter(read_documents(list_files([path])))).text == "first"

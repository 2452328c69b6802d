"""Reading a corpus in a stream: JSON lines, Parquet, Arrow IPC and plain text, from any fsspec URL.

Nothing is loaded whole but a record at a time (a line, a batch of a thousand rows, a text file), so a corpus may be
larger than memory.
"""

from __future__ import annotations

import io
import json
import lzma
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from logitstore.corpus_files import (
    ARROW_EXTENSIONS,
    LINE_EXTENSIONS,
    PARQUET_EXTENSIONS,
    CorpusFile,
    list_files,
)
from logitstore.corpus_rows import FieldMap, UnreadableRow, missing_columns, parse_row
from logitstore.documents import Document
from logitstore.errors import CorpusError

__all__ = ["CorpusFile", "FieldMap", "ReadReport", "list_files", "read_documents"]

ROWS_PER_BATCH = 1024
MAX_KEPT_ERRORS = 5

# What decompressors, Arrow and file systems raise for files that are missing, forbidden, cut short or damaged.
_FILE_ERRORS = (OSError, EOFError, ValueError, ImportError, pa.ArrowException, zlib.error, lzma.LZMAError)

Record = tuple[str, object]
"""Where a row stands in its file, and the row, or an ``UnreadableRow``: one bad row must not end its file's stream."""


@dataclass
class ReadReport:
    """What reading has come across so far; complete when the iterator is exhausted."""

    num_documents: int = 0
    num_skipped: int = 0
    """Unreadable rows, with ``on_error="skip"``."""
    num_empty: int = 0
    """Rows without any content: never documents."""
    errors: list[str] = field(default_factory=list)
    """The first few messages about unreadable rows."""


def read_documents(
    files: Iterable[CorpusFile],
    fields: FieldMap | None = None,
    on_error: str = "raise",
    report: ReadReport | None = None,
) -> Iterator[Document]:
    """Documents of ``files``, in order, as a stream.

    Args:
        files: what ``list_files`` found. The extension decides the format; unknown ones are text, one document a file.
        fields: names of the fields in rows.
        on_error: ``"raise"``, or ``"skip"``, which counts unreadable rows in ``report`` and goes on. Files
            that cannot be read always raise.
        report: counts documents, skipped and empty rows; updated while the stream is read.

    Raises:
        CorpusError: a file that is missing, forbidden or damaged, or (``on_error="raise"``) an unreadable row, named by
            file and line, or file and row.
    """
    fields = fields or FieldMap()
    report = report if report is not None else ReadReport()
    for file in files:
        for where, row in _read_records(file, fields):
            try:
                document = parse_row(row, fields, file.source)
            except UnreadableRow as error:
                message = f"{where}: unreadable row: {error}"
                if on_error == "raise":
                    raise CorpusError(message) from None
                report.num_skipped += 1
                if len(report.errors) < MAX_KEPT_ERRORS:
                    report.errors.append(message)
                continue
            if document is None:
                report.num_empty += 1
            else:
                report.num_documents += 1
                yield document


def _read_records(file: CorpusFile, fields: FieldMap) -> Iterator[Record]:
    try:
        with _open(file) as stream:
            if file.extension in LINE_EXTENSIONS:
                yield from _read_lines(stream, file.source)
            elif file.extension in PARQUET_EXTENSIONS:
                yield from _read_parquet(stream, file.source, fields)
            elif file.extension in ARROW_EXTENSIONS:
                yield from _read_arrow(stream, file.source, fields)
            else:
                yield file.source, _read_text(stream, fields)
    except FileNotFoundError:
        raise CorpusError(f"{file.source}: no such file: it was there when the corpus was listed") from None
    except PermissionError:
        raise CorpusError(f"{file.source}: permission denied: give this user the right to read it") from None
    except _FILE_ERRORS as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CorpusError(f"{file.source}: cannot be read, it may be damaged or cut short: {reason}") from error


@contextmanager
def _open(file: CorpusFile) -> Iterator[IO[bytes]]:
    """The decompressed bytes of ``file``."""
    if file.source.lower().endswith(".zst"):
        # fsspec knows zstd only where an extra package is installed; pyarrow always brings it.
        with fsspec.open(file.url, "rb") as raw, pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd") as stream:
            yield io.BufferedReader(stream)
    else:
        with fsspec.open(file.url, "rb", compression="infer") as stream:
            yield stream


def _read_lines(stream: IO[bytes], source: str) -> Iterator[Record]:
    for number, line in enumerate(stream, start=1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line.strip():
            yield f"{source}:{number}", _parse_line(line)


def _parse_line(line: bytes) -> object:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        return UnreadableRow(f"invalid UTF-8 at byte {error.start}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return UnreadableRow(f"expected one JSON object per line, found {text.strip()[:40]!r} ({error})")


def _read_parquet(stream: IO[bytes], source: str, fields: FieldMap) -> Iterator[Record]:
    table = pq.ParquetFile(stream)
    columns = _select_columns(table.schema_arrow, source, fields)
    yield from _read_batches(table.iter_batches(ROWS_PER_BATCH, columns=columns), source)


def _read_arrow(stream: IO[bytes], source: str, fields: FieldMap) -> Iterator[Record]:
    """Both IPC formats: files start with a magic string, streams do not."""
    if stream.read(6) == b"ARROW1":
        stream.seek(0)
        reader = pa.ipc.open_file(stream)
        batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
    else:
        stream.seek(0)
        reader = pa.ipc.open_stream(stream)
        batches = iter(reader)
    columns = _select_columns(reader.schema, source, fields)
    small = (batch.slice(start, ROWS_PER_BATCH) for batch in batches for start in range(0, len(batch), ROWS_PER_BATCH))
    yield from _read_batches((batch.select(columns) for batch in small), source)


def _select_columns(schema: pa.Schema, source: str, fields: FieldMap) -> list[str]:
    problem = missing_columns(schema.names, fields)
    if problem is not None:
        raise CorpusError(f"{source}: {problem}")
    return [name for name in fields.columns if name in schema.names]


def _read_batches(batches: Iterable[pa.RecordBatch], source: str) -> Iterator[Record]:
    rows = (row for batch in batches for row in _to_rows(batch))
    for number, row in enumerate(rows, start=1):
        yield f"{source}, row {number}", row


def _to_rows(batch: pa.RecordBatch) -> list[Any]:
    try:
        return batch.to_pylist()
    except UnicodeDecodeError as error:
        # One value that is not UTF-8 fails the whole batch: convert row by row to tell which.
        if len(batch) == 1:
            return [UnreadableRow(f"invalid UTF-8 at byte {error.start}")]
        return [row for index in range(len(batch)) for row in _to_rows(batch.slice(index, 1))]


def _read_text(stream: IO[bytes], fields: FieldMap) -> object:
    try:
        text = stream.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return UnreadableRow(f"expected UTF-8 text, found other bytes at {error.start}; {_known_formats()}")
    if "\0" in text:
        return UnreadableRow(f"expected text, found a zero byte, as in binary files; {_known_formats()}")
    return {fields.text: text}


def _known_formats() -> str:
    known = sorted(LINE_EXTENSIONS | PARQUET_EXTENSIONS | ARROW_EXTENSIONS)
    return f"other formats go by their extension ({', '.join(known)})"

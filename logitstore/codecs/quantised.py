"""Zarr v3 codec ``logitstore.quantised``: columns of multiples of a step, entropy coded, one in the light of another.

For ``float32 [T, S]`` arrays whose column s holds ``step_s`` times whole numbers, NaN and -inf. What a teacher says of
a token hangs together: how likely its guess is all but tells the entropy. So each column is coded in contexts that
another column gives, or as the difference from it, whichever is smallest; and ids by how frequent they are.

    version u32 · rows u32 · columns u32                                               little-endian
    per column: form u8 · parent u8 · sign i8 · origin i64 · ids u32 · the ids, if form is IDS · ``numbers``
    CRC32C u32
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from zarr.abc.codec import ArrayBytesCodec
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer, NDBuffer
from zarr.core.common import JSON, parse_named_configuration
from zarr.registry import register_codec

from logitstore.codecs import QUANTISED
from logitstore.codecs.candidates import pack_order, place_ids, unpack_order
from logitstore.codecs.numbers import NumberReader, encode_numbers
from logitstore.codecs.rans import ALPHABET, code_bits, count_symbols, symbols_of
from logitstore.errors import DamageError
from logitstore.sharding import with_crc, without_crc

CODEC_NAME = QUANTISED
VERSION = 1
PLAIN, DIFFERENCE, IDS = 0, 1, 2
"""Forms of a column: its numbers; each one's difference from the parent's; places among the ids in use."""

_HEADER, _COLUMN = struct.Struct("<III"), struct.Struct("<BBbqI")
_NO_PARENT = 255
_NAN, _MINUS_INFINITY, _FIRST = 0, 1, 2
_LARGEST = (1 << 31) - 1
_SAMPLE_ROWS = 1 << 15


@dataclass(frozen=True)
class _Form:
    form: int
    parent: int  # a column to the left, or _NO_PARENT


def encode_columns(values: np.ndarray, steps: tuple[str, ...]) -> bytes:
    """Encode float32 [T, S] values, S < 255.

    Args:
        values: of which column s holds multiples of ``steps[s]`` (in float32), NaN and -inf only.
        steps: decimals.

    Raises:
        ValueError: a value is none of these.
    """
    num_rows, num_columns = values.shape
    pieces = [_HEADER.pack(VERSION, num_rows, num_columns)]
    coded: list[np.ndarray] = []
    for column, step in enumerate(steps):
        numbers, sign, origin = _numbers_of(values[:, column], step)
        form = _best_form(numbers, coded)
        order, written = np.empty(0, np.int32), numbers
        if form.form == IDS:
            order, places = place_ids(numbers)
            written = places.astype(np.int64)
        pieces.append(_COLUMN.pack(form.form, form.parent, sign, origin, len(order)))
        if form.form == IDS:
            pieces.append(pack_order(order))
        pieces.append(encode_numbers(*_in_contexts(form, written, coded), ALPHABET))
        coded.append(numbers)
    return with_crc(b"".join(pieces))


def decode_columns(data: bytes | memoryview, steps: tuple[str, ...], num_rows: int) -> np.ndarray:
    """The inverse of ``encode_columns``: float32 [num_rows, S].

    Raises:
        DamageError: the checksum does not hold, or these are not such columns.
    """
    body = memoryview(without_crc(memoryview(data), "columns"))
    if len(body) < _HEADER.size or _HEADER.unpack(body[: _HEADER.size]) != (VERSION, num_rows, len(steps)):
        raise DamageError(f"columns: version {VERSION} and a shape of {(num_rows, len(steps))} were expected")
    coded: list[np.ndarray] = []
    position = _HEADER.size
    values = np.empty((num_rows, len(steps)), np.float32)
    for column, step in enumerate(steps):
        numbers, sign, origin, used = _read_column(body[position:], coded, num_rows)
        position += used
        coded.append(numbers)
        values[:, column] = (origin + sign * (numbers - _FIRST)).astype(np.float32) * np.float32(step)
        values[numbers == _NAN, column] = np.nan
        values[numbers == _MINUS_INFINITY, column] = -np.inf
    if position != len(body):
        raise DamageError(f"columns: {position} bytes were declared, found {len(body)}")
    return values


def _read_column(data: memoryview, coded: list[np.ndarray], num_rows: int) -> tuple[np.ndarray, int, int, int]:
    """Numbers int64 [T], their sign and origin, and the bytes that they took."""
    if len(data) < _COLUMN.size:
        raise DamageError("columns: end too early")
    kind, parent, sign, origin, num_ids = _COLUMN.unpack(data[: _COLUMN.size])
    form, position = _Form(kind, parent), _COLUMN.size
    if kind not in (PLAIN, DIFFERENCE, IDS) or (parent != _NO_PARENT and parent >= len(coded)):
        raise DamageError(f"columns: form {kind} and parent {parent} of column {len(coded)}")
    if abs(origin) > _LARGEST or sign not in (-1, 1) or num_ids > num_rows:
        raise DamageError(f"columns: origin {origin}, sign {sign}, {num_ids} ids in {num_rows} rows")
    if kind == DIFFERENCE and parent == _NO_PARENT:
        raise DamageError("columns: differences from no column")
    order = np.empty(0, np.int32)
    if kind == IDS:
        order, used = unpack_order(data[position:], num_ids, "columns: ids")
        position += used
    reader = NumberReader(data[position:], "columns")
    written = reader.read(_contexts(form, coded, num_rows))
    reader.finish()
    if kind == IDS and written.max(initial=-1) >= len(order):
        raise DamageError("columns: an id that there is not")
    numbers = _undo(form, written, order, coded)
    if numbers.min(initial=0) < 0 or numbers.max(initial=0) > _LARGEST:
        raise DamageError("columns: a number out of range")
    return numbers, sign, origin, position + reader.num_bytes


def _numbers_of(values: np.ndarray, step: str) -> tuple[np.ndarray, int, int]:
    """Numbers int64 [T], with their sign and origin: finite values are (origin + sign * (number - _FIRST)) steps.

    Numbers grow from the end of the range that most values are near, because small ones are told apart best.
    """
    finite, is_nan = np.isfinite(values), np.isnan(values)
    rounded = np.rint(np.where(finite, values, 0) / np.float32(step)) + 0.0  # there is no -0
    exact = (rounded * np.float32(step)).view(np.uint32) == values.view(np.uint32)
    if not (exact | is_nan | (values == -np.inf)).all() or np.abs(rounded).max(initial=0) > _LARGEST // 4:
        wrong = values[~(exact | is_nan | (values == -np.inf))][:1]
        raise ValueError(f"a column of multiples of {step}, NaN and -inf was expected, found {wrong}")
    whole = rounded.astype(np.int64)
    low, high = (int(whole[finite].min()), int(whole[finite].max())) if finite.any() else (0, 0)
    middle = np.median(whole[finite]) if finite.any() else 0
    sign, origin = (1, low) if middle - low <= high - middle else (-1, high)
    numbers = np.where(finite, sign * (whole - origin) + _FIRST, np.where(is_nan, _NAN, _MINUS_INFINITY))
    return numbers, sign, origin


def _best_form(numbers: np.ndarray, coded: list[np.ndarray]) -> _Form:
    """The form that takes the fewest bits on evenly spaced rows, its tables counted."""
    picked = slice(None, None, max(1, len(numbers) // _SAMPLE_ROWS))
    sample, sample_coded = numbers[picked], [column[picked] for column in coded]
    scale = len(numbers) / max(1, len(sample))

    def bits(form: _Form) -> float:
        order, places = place_ids(sample) if form.form == IDS else (np.empty(0), sample)
        written, contexts = _in_contexts(form, places.astype(np.int64), sample_coded)
        if written.max(initial=0) > _LARGEST:
            return np.inf
        counts_CS = np.zeros((ALPHABET, ALPHABET), np.int64)
        count_symbols(contexts, written, counts_CS)
        return scale * code_bits(counts_CS) + 12 * np.count_nonzero(counts_CS) + 8 * len(order)

    return min(_forms(len(coded)), key=bits)


def _forms(num_coded: int) -> Iterator[_Form]:
    for parent in (_NO_PARENT, *range(num_coded)):
        yield _Form(PLAIN, parent)
        yield _Form(IDS, parent)
        if parent != _NO_PARENT:
            yield _Form(DIFFERENCE, parent)


def _contexts(form: _Form, coded: list[np.ndarray], num_rows: int) -> np.ndarray:
    if form.parent == _NO_PARENT:
        return np.zeros(num_rows, np.int32)
    return symbols_of(coded[form.parent])


def _in_contexts(form: _Form, numbers: np.ndarray, coded: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """What is written, int64 [T], and in which contexts, int32 [T]."""
    contexts = _contexts(form, coded, len(numbers))
    if form.form != DIFFERENCE:
        return numbers, contexts
    difference = numbers - coded[form.parent]
    return np.where(difference < 0, -2 * difference - 1, 2 * difference), contexts


def _undo(form: _Form, written: np.ndarray, order: np.ndarray, coded: list[np.ndarray]) -> np.ndarray:
    if form.form == PLAIN:
        return written
    if form.form == IDS:
        return order[written].astype(np.int64)
    return coded[form.parent] + np.where(written & 1, -(written + 1) // 2, written // 2)


@dataclass(frozen=True)
class QuantisedCodec(ArrayBytesCodec):
    """The array -> bytes codec of float32 [T, S] arrays whose column s holds multiples of ``steps[s]``."""

    steps: tuple[str, ...]

    is_fixed_size = False

    @classmethod
    def from_dict(cls, data: dict[str, JSON]) -> Self:
        _, configuration = parse_named_configuration(data, CODEC_NAME)
        return cls(steps_of(configuration))

    def to_dict(self) -> dict[str, JSON]:
        return {"name": CODEC_NAME, "configuration": {"steps": list(self.steps)}}

    def validate(self, *, shape: tuple[int, ...], dtype: Any, chunk_grid: Any) -> None:
        if len(shape) != 2 or shape[1] != len(self.steps) or dtype.to_native_dtype() != np.float32:
            raise ValueError(
                f"{CODEC_NAME} takes float32 [T, {len(self.steps)}] arrays, found {dtype} of shape {shape}"
            )

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        raise NotImplementedError(f"{CODEC_NAME}: the encoded size depends on the values")

    def _encode_sync(self, chunk_array: NDBuffer, chunk_spec: ArraySpec) -> Buffer:
        values = np.ascontiguousarray(chunk_array.as_numpy_array())
        return chunk_spec.prototype.buffer.from_bytes(encode_columns(values, self.steps))

    def _decode_sync(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> NDBuffer:
        values = decode_columns(chunk_bytes.to_bytes(), self.steps, chunk_spec.shape[0])
        return chunk_spec.prototype.nd_buffer.from_numpy_array(values)

    async def _encode_single(self, chunk_array: NDBuffer, chunk_spec: ArraySpec) -> Buffer:
        return self._encode_sync(chunk_array, chunk_spec)

    async def _decode_single(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> NDBuffer:
        return self._decode_sync(chunk_bytes, chunk_spec)


def steps_of(configuration: Any) -> tuple[str, ...]:
    """The steps that a codec's configuration holds.

    Raises:
        ValueError: they are not decimals above 0, or not from 1 to 254 of them.
    """
    steps = configuration.get("steps") if isinstance(configuration, dict) else None
    if not isinstance(steps, list) or not 1 <= len(steps) < _NO_PARENT or not all(isinstance(s, str) for s in steps):
        raise ValueError(f"{CODEC_NAME}: 1 to 254 steps were expected, as decimals, found {steps!r}")
    if not all(0 < float(step) < np.inf for step in steps):
        raise ValueError(f"{CODEC_NAME}: steps above 0 were expected, found {steps!r}")
    return tuple(steps)


register_codec(CODEC_NAME, QuantisedCodec)  # where the entry point is not installed

"""Rows of integers of a fixed number of bits each."""

from __future__ import annotations

import numba
import numpy as np


@numba.njit(cache=True, nogil=True)
def pack_bits(values: np.ndarray, width: int, out: np.ndarray) -> None:
    """Highest bit first; rows end on whole bytes."""
    for row in range(values.shape[0]):
        held, num_bits, at = np.uint64(0), 0, 0
        for column in range(values.shape[1]):
            held = (held << np.uint64(width)) | np.uint64(values[row, column])
            num_bits += width
            while num_bits >= 8:
                num_bits -= 8
                out[row, at] = (held >> np.uint64(num_bits)) & np.uint64(0xFF)
                at += 1
        if num_bits:
            out[row, at] = (held << np.uint64(8 - num_bits)) & np.uint64(0xFF)


@numba.njit(cache=True, nogil=True)
def unpack_bits(packed: np.ndarray, width: int, out: np.ndarray) -> None:
    """The inverse of ``pack_bits``, into ``out``."""
    mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    for row in range(out.shape[0]):
        held, num_bits, at = np.uint64(0), 0, 0
        for column in range(out.shape[1]):
            while num_bits < width:
                held = (held << np.uint64(8)) | np.uint64(packed[row, at])
                num_bits += 8
                at += 1
            num_bits -= width
            out[row, column] = (held >> np.uint64(num_bits)) & mask

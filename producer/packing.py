"""Documents to windows, windows to packed batches: a function of the block's tokens alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from logitstore.token_parts import TokenBlock


@dataclass(frozen=True)
class Windows:
    """How documents longer than the teacher's context are cut.

    Attributes:
        length: tokens that the teacher sees at once.
        overlap: of these, how many of a later window only repeat context.
    """

    length: int
    overlap: int

    def to_json(self) -> dict[str, str]:
        return {"length": str(self.length), "overlap": str(self.overlap)}


@dataclass(frozen=True)
class Window:
    """Inputs ``begin`` to ``end`` of the block's tokens; the outputs from ``first`` on are new."""

    begin: int
    first: int
    end: int


@dataclass(frozen=True)
class PackedBatch:
    """Windows in one row.

    Attributes:
        ids: int64 [N], input tokens.
        positions: int64 [N], restarting with each window.
        outputs: int64 [R], positions in the row whose next-token distribution is kept.
        rows: int64 [R], the rows of the block (the predicted tokens) that they belong to.
    """

    ids: np.ndarray
    positions: np.ndarray
    outputs: np.ndarray
    rows: np.ndarray


def cut_windows(tokens: TokenBlock, windows: Windows) -> list[Window]:
    """Every token but each document's first is predicted exactly once, in the first window that reaches it.

    A document's last token is no input: nothing follows it.
    """
    cut = []
    for begin, end in zip(tokens.begins.tolist(), tokens.ends.tolist(), strict=True):
        first, last = begin, end - 1
        while first < last:
            start = begin if first == begin else first - windows.overlap
            stop = min(start + windows.length, last)
            cut.append(Window(start, first, stop))
            first = stop
    return cut


def pack(tokens: TokenBlock, windows: Windows, batch_tokens: int) -> list[PackedBatch]:
    """Packed batches of at most ``batch_tokens`` tokens (one window, if that is longer), in a fixed order."""
    batches: list[list[Window]] = []
    room = 0
    # Longest first: windows of like length share a batch, and no batch is left half empty by a long one.
    for window in sorted(cut_windows(tokens, windows), key=lambda w: (w.begin - w.end, w.begin)):
        size = window.end - window.begin
        if size > room or not batches:
            batches.append([])
            room = max(batch_tokens, size)
        batches[-1].append(window)
        room -= size
    return [_packed(tokens, batch) for batch in batches]


def _packed(tokens: TokenBlock, windows: list[Window]) -> PackedBatch:
    inputs = np.concatenate([np.arange(w.begin, w.end) for w in windows])
    positions = np.concatenate([np.arange(w.end - w.begin) for w in windows])
    is_new = np.concatenate([np.arange(w.begin, w.end) >= w.first for w in windows])
    return PackedBatch(tokens.ids[inputs].astype(np.int64), positions, np.flatnonzero(is_new), inputs[is_new] + 1)

"""Columns that need no model are filled beside the teacher: on a thread of its own, which the teacher never waits for.

Its work is in the tokenizers and in compiled code, which hold no interpreter lock. It has one block in hand at a time,
and what it has done is in the store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Self

from logitstore.text_columns import TextColumns

_POLL_SECONDS = 0.1
_PATIENCE_SECONDS = 10.0


class FillingBeside:
    """Fills the tokens and alignments of a run while the body of the ``with`` goes on.

    What teachers are about to read is cut first, for all blocks in the order of the walk, and everything else after
    that. If the body ends with an error, the thread stops after the block that it has in hand.
    """

    def __init__(self, texts: TextColumns, blocks: Collection[int], teacher_tokens: Collection[str]) -> None:
        """
        Args:
            texts: whose columns to fill.
            blocks: those where something is missing.
            teacher_tokens: the tokens columns that teachers read.
        """
        self._texts, self._blocks, self._first = texts, blocks, teacher_tokens
        self.has_more = bool(blocks) and bool(texts.requested.keys() - set(teacher_tokens))
        """Whether there is more to fill than teachers' tokens."""
        self._stopped = threading.Event()
        self._done: SimpleQueue[int] = SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="logitstore columns", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join(_PATIENCE_SECONDS)  # a store that does not answer must not keep an interrupt

    def check(self) -> None:
        """Raise the error that the thread has ended with, if it has."""
        if self._error is not None:
            raise self._error

    def finish(self, finish_block: Callable[[int], None]) -> None:
        """Wait until all is filled; ``finish_block`` is told of each block, those that are done already first."""
        is_over = False
        while not is_over:
            is_over = not self._thread.is_alive()  # before the queue is emptied, so that nothing stays in it
            with suppress(Empty):
                while True:
                    finish_block(self._done.get(timeout=_POLL_SECONDS * (not is_over)))
        self.check()

    def _run(self) -> None:
        try:
            for columns in (self._first, *([self._texts.requested] if self.has_more else [])):
                for number in self._texts.filling(self._blocks, columns):
                    if columns is not self._first:
                        self._done.put(number)
                    if self._stopped.is_set():
                        return
        except BaseException as error:  # whatever it is, it is raised where the run can end with it
            self._error = error

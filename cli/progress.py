"""Progress on standard error: a bar where there is a terminal, a plain line now and then where there is a log."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LOG_SECONDS = 30.0
"""How often a log gets a line."""


class Bar:
    """One bar at a time; rates are tokens per second over the whole of it."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.console = Console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=quiet or not self.console.is_terminal,
        )
        self._logs = not quiet and not self.console.is_terminal
        self._logged = 0.0
        self._task: TaskID | None = None
        self._num_tokens = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def start(self, description: str, total: float | None) -> None:
        """Begin a new bar in the place of the last one."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._num_tokens, self._logged = 0, time.monotonic()
        self._task = self._progress.add_task(description, total=total, note="")

    def add(self, amount: float, *, num_tokens: int = 0, note: str = "") -> None:
        """Move on by ``amount`` of the total."""
        assert self._task is not None, "start() comes first"
        self._num_tokens += num_tokens
        elapsed = self._progress.tasks[-1].elapsed or 0.0
        rate = f"{self._num_tokens / elapsed:,.0f} tokens/s" if elapsed > 0 and self._num_tokens else ""
        self._progress.update(self._task, advance=amount, note=" ".join(filter(None, (rate, note))))
        self._log()

    def show(self, done: float, total: float) -> None:
        """Say how far it is, in all."""
        assert self._task is not None, "start() comes first"
        self._progress.update(self._task, completed=done, total=total)
        self._log()

    def show_bytes(self, done: float, total: float) -> None:
        """Say how many bytes are done, in all, and how many that was a second."""
        elapsed = self._progress.tasks[-1].elapsed or 0.0
        if self._task is not None and elapsed > 0:
            self._progress.update(self._task, note=f"{done / elapsed / 1e6:,.1f} MB/s")
        self.show(done, total)

    def _log(self) -> None:
        if not self._logs or time.monotonic() - self._logged < LOG_SECONDS:
            return
        self._logged, task = time.monotonic(), self._progress.tasks[-1]
        share = f"{task.percentage:.0f}%" if task.total else ""
        # Rich's own estimate looks at the last half minute only, in which a log may have seen nothing.
        elapsed = task.elapsed or 0.0
        left = elapsed * (task.total / task.completed - 1) if task.total and task.completed else None
        remaining = "" if left is None else f"{left / 60:.0f} min left"
        parts = filter(None, (share, task.fields["note"], remaining))
        self.console.print(f"{task.description}: {', '.join(parts)}", markup=False, highlight=False, soft_wrap=True)


class ProduceBar(Bar):
    """What ``logitstore.producer.run`` reports, on a bar over the bytes that are still to be scored."""

    def begin(self, teacher: str, num_blocks: int, num_bytes: int) -> None:
        self.start(f"{teacher}: {num_blocks} blocks", num_bytes)

    def advance(self, num_tokens: int) -> None:
        self.add(0, num_tokens=num_tokens)

    def finish_block(self, num_bytes: int) -> None:
        self.add(num_bytes)


class AlignBar(Bar):
    """What ``logitstore.aligning`` reports, on a bar over the bytes that are still to be aligned."""

    def begin(self, num_blocks: int, num_bytes: int) -> None:
        self._done, self._total = 0, num_bytes
        self.start(f"aligning: {num_blocks} blocks", num_bytes)

    def finish_block(self, num_bytes: int) -> None:
        self._done += num_bytes
        self.show_bytes(self._done, self._total)


class TrainBar(Bar):
    """What ``logitstore.consumer.trainer`` reports, on a bar over the steps that are still to be made."""

    def begin(self, step: int, total_steps: int) -> None:
        self._total_steps = total_steps
        self.start("training", max(0, total_steps - step))

    def advance(self, step: int, num_tokens: int, loss: float) -> None:
        self.add(1, num_tokens=num_tokens, note=f"step {step}/{self._total_steps} loss {loss:.4f}")


def hide_model_bars() -> None:
    """Keep transformers from drawing bars of its own (loading and saving weights) into ours."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()

"""What a person sees while a run goes on: a bar on a terminal, plain lines elsewhere."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


class Progress:
    """Loss, tokens per second and time left; every evaluation leaves a line."""

    def __init__(self, console: Console, steps: int, label: str, first: int = 0):
        self._console, self._steps, self._label = console, steps, label
        self._bar: Bar | None = None
        self._start = self._printed = time.monotonic()
        self._first = first  # a resumed run does not start at 0

    def __enter__(self) -> "Progress":
        self._start = self._printed = time.monotonic()
        if self._console.is_terminal:
            self._bar = Bar(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task(self._label, total=self._steps, completed=self._first, note="")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def stepped(self, step: int, loss: float, tokens_per_s: float) -> None:
        """Training loss in nats per token."""
        note = f"loss {loss:.3f}  {tokens_per_s:,.0f} tok/s"
        if self._bar:
            self._bar.update(self._task, completed=step, note=note)
        elif time.monotonic() - self._printed > 10 or step == self._steps:
            self._printed = time.monotonic()
            left = (self._printed - self._start) / max(step - self._first, 1) * (self._steps - step)
            self._console.print(
                f"{self._label} {step}/{self._steps}  {note}  {left:.0f} s left", highlight=False
            )

    def evaluated(self, step: int, loss: float, bpb: float | None) -> None:
        """Validation loss in nats per token, and in bits per byte where known."""
        text = f"{self._label} {step}/{self._steps}  val loss {loss:.4f}"
        self._console.print(text if bpb is None else f"{text}  val bpb {bpb:.4f}", highlight=False)

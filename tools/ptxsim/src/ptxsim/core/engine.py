"""Asynchronous work: operations wait in pipes and take effect when the schedule says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

SCHEDULES = ("early", "late", "random", "tma_late", "mma_late", "timed")


class Op:
    """One asynchronous effect."""

    __slots__ = ("done", "due", "line", "pipe", "run", "started")

    def __init__(self, run: Callable[[], None], pipe: Pipe, line: int):
        self.run, self.pipe, self.line = run, pipe, line
        self.done = False
        self.started = self.due = 0


class Pipe:
    """Operations that complete in the order of issue."""

    __slots__ = ("kind", "name", "ops")

    def __init__(self, kind: str, name: str = ""):
        self.kind, self.name = kind, name
        self.ops: deque[Op] = deque()


class Engine:
    """Decides when pending operations happen.

    early: at issue. late: only when a wait forces them or no warp can move. random: each at issue, or at a random later
    moment. tma_late, mma_late: one kind late, the rest early.
    """

    def __init__(self, schedule: str, rng: np.random.Generator):
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule: expected one of {SCHEDULES}, got {schedule!r}")
        self.schedule, self.rng = schedule, rng
        self.pending: list[Pipe] = []
        self.completed = 0
        self.now = 0
        """Ticks of the timed schedule."""
        self.observer: Callable[[Op, bool], None] | None = None

    def issue(
        self, run: Callable[[], None], line: int, pipe: Pipe | None = None, kind: str = "tma", ticks: int = 0
    ) -> Op:
        """Queue an operation behind the others of its pipe (of no one, if None); `ticks` is for the timed schedule."""
        if pipe is None:
            pipe = Pipe(kind)
        op = Op(run, pipe, line)
        op.started = max(self.now, pipe.ops[-1].due if pipe.ops else 0)
        op.due = op.started + ticks
        if self.observer:
            self.observer(op, False)
        if not pipe.ops and self._at_once(pipe.kind):
            self._complete(op)
            return op
        if not pipe.ops:
            self.pending.append(pipe)
        pipe.ops.append(op)
        return op

    def _at_once(self, kind: str) -> bool:
        if self.schedule == "early":
            return True
        if self.schedule == "random":
            return self.rng.random() < 0.35
        if self.schedule == "tma_late":
            return kind != "tma"
        if self.schedule == "mma_late":
            return kind != "mma"
        return False  # late, timed

    def _complete(self, op: Op) -> None:
        op.done = True
        self.completed += 1
        op.run()
        if self.observer:
            self.observer(op, True)

    def _run_head(self, pipe: Pipe) -> None:
        op = pipe.ops.popleft()
        if not pipe.ops:
            self.pending.remove(pipe)
        self._complete(op)

    def force(self, op: Op) -> None:
        """Run an operation now, after those before it in its pipe."""
        while not op.done:
            self._run_head(op.pipe)

    def step(self) -> bool:
        """Run one pending operation; False if there is none."""
        if not self.pending:
            return False
        i = int(self.rng.integers(len(self.pending))) if self.schedule == "random" else 0
        self._run_head(self.pending[i])
        return True

    def advance(self, ticks: int) -> bool:
        """Timed schedule: let time pass and finish what is due; with 0, jump to the next completion."""
        heads = [pipe.ops[0] for pipe in self.pending]
        if not ticks:
            if not heads:
                return False
            self.now = max(self.now, min(op.due for op in heads))
        self.now += ticks
        moved = False
        while True:
            due = [pipe for pipe in self.pending if pipe.ops[0].due <= self.now]
            if not due:
                return moved
            self._run_head(min(due, key=lambda pipe: pipe.ops[0].due))
            moved = True

    def drain(self) -> None:
        while self.step():
            pass

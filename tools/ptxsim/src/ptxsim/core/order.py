"""Happens-before: vector clocks of a cluster, and the shadow memory that finds races with them.

Actors are warps and asynchronous streams (the transactions of one mbarrier, a warp's tensor-core pipe, its bulk copies,
its TMEM loads, …). A clock has two rows: row 0 says which accesses of each actor happen before now, row 1 which of them are
also visible to the async proxy. Row 1 lags behind for plain stores until `fence.proxy.async`.

Each granule of shared memory or column of TMEM remembers its last writer and every actor's last read. An access is ordered
if the clock of the accessor covers those; otherwise both sides are reported with their PTX lines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import Fault, Race, Uninitialized
from .values import Array

NEVER = -1
BARRIER_OBJECT = -2
"""Shadow writer of the 8 bytes of a live mbarrier."""


class Clock:
    """One vector clock; `v` has shape (2, actors)."""

    __slots__ = ("v",)

    def __init__(self, capacity: int):
        self.v = np.zeros((2, capacity), np.int32)

    def join(self, other: Clock) -> None:
        np.maximum(self.v, other.v, out=self.v)


class Order:
    """The actors and clocks of one cluster."""

    def __init__(self, describe_line: Callable[[int], str]):
        self.capacity = 32
        self.names: list[str] = []
        self.logs: list[Any] = []
        self.clocks: list[Clock] = []
        self.describe_line = describe_line

    def actor(self, name: str, log: Any) -> int:
        """Register an actor. `log`: PTX line of each of its clock values, a list (from 1) or a dict."""
        self.names.append(name)
        self.logs.append(log)
        if len(self.names) > self.capacity:
            grown = self.capacity * 2
            for clock in self.clocks:
                clock.v = np.pad(clock.v, ((0, 0), (0, grown - self.capacity)))
            self.capacity = grown
        return len(self.names) - 1

    def clock(self) -> Clock:
        clock = Clock(self.capacity)
        self.clocks.append(clock)
        return clock

    def drop(self, *clocks: Clock) -> None:
        self.clocks = [c for c in self.clocks if c not in clocks]

    def site(self, actor: int, clock: int) -> str:
        log = self.logs[actor]
        if isinstance(log, dict):
            entry = log.get(clock, "?")
            lines = sorted(entry) if isinstance(entry, set) else [entry]
        else:
            lines = [log[clock - 1]] if 0 < clock <= len(log) else ["?"]
        return f"{self.names[actor]}, " + " or ".join(
            self.describe_line(x) if isinstance(x, int) else str(x) for x in lines
        )


class Shadow:
    """Who touched each granule last."""

    def __init__(self, order: Order, size: int, what: str, locate: Callable[[int], str], uninitialized: bool):
        self.order, self.what, self.locate, self.uninitialized = order, what, locate, uninitialized
        self.writer = np.full(size, NEVER, np.int16)
        self.write_clock = np.zeros(size, np.int32)
        self.atomic: Array | None = None
        self.readers: dict[int, Array] = {}
        self.newest_read: dict[int, int] = {}

    def read(
        self, clock: Clock, row: int, index: Any, actor: int, epoch: int, line: int, accessor: str
    ) -> None:
        """Check and record a read of granules `index` (slice or array). `row`: 0 plain, 1 through the async proxy."""
        writer = self.writer[index]
        if writer.min() < 0:
            self._unwritten(index, writer, accessor, line)
        late = self.write_clock[index] > clock.v[row][writer]
        if late.any():
            self._report(index, late & (writer >= 0), "write", "read", clock, accessor, line)
        mine = self.readers.get(actor)
        if mine is None:
            mine = self.readers[actor] = np.zeros(self.writer.size, np.int32)
        mine[index] = epoch
        self.newest_read[actor] = epoch

    def write(
        self, clock: Clock, row: int, index: Any, actor: int, epoch: int, line: int, accessor: str
    ) -> None:
        writer = self.writer[index]
        if writer.min() == BARRIER_OBJECT:
            self._unwritten(index, writer, accessor, line, storing=True)
        late = self.write_clock[index] > clock.v[row][writer]
        if late.any():
            late &= writer >= 0
            if late.any():
                self._report(index, late, "write", "write", clock, accessor, line)
        self.check_readers(clock, index, accessor, line)
        self.writer[index] = actor
        self.write_clock[index] = epoch
        if self.atomic is not None:
            self.atomic[index] = False

    def check_readers(self, clock: Clock, index: Any, accessor: str, line: int) -> None:
        known = clock.v[0]
        for other, newest in self.newest_read.items():
            if newest <= known[other]:
                continue
            late = self.readers[other][index] > known[other]
            if late.any():
                self._report(index, late, "read", "write", clock, accessor, line, other)

    def atomically(self, clock: Clock, index: Any, actor: int, epoch: int, line: int, accessor: str) -> None:
        """An atomic update: races with plain accesses only."""
        if self.atomic is None:
            self.atomic = np.zeros(self.writer.size, bool)
        writer = self.writer[index]
        if writer.min() < 0:
            self._unwritten(index, writer, accessor, line)
        late = (self.write_clock[index] > clock.v[0][writer]) & ~self.atomic[index]
        if late.any():
            self._report(index, late, "write", "atomic update", clock, accessor, line)
        self.check_readers(clock, index, accessor, line)
        self.writer[index] = actor
        self.write_clock[index] = epoch
        self.atomic[index] = True

    def mark(self, index: Any, writer: int) -> None:
        """Without a check: barrier objects, and memory that is no longer one."""
        self.writer[index] = writer
        self.write_clock[index] = 0

    def reset(self, index: Any) -> None:
        """As if never touched: TMEM columns given back."""
        self.mark(index, NEVER)
        for array in self.readers.values():
            array[index] = 0

    def _granules(self, index: Any) -> Array:
        return np.arange(self.writer.size)[index].reshape(-1)

    def _unwritten(self, index: Any, writer: Array, accessor: str, line: int, storing: bool = False) -> None:
        granules, writer = self._granules(index), writer.reshape(-1)
        site = f"{accessor}, {self.order.describe_line(line)}"
        if (writer == BARRIER_OBJECT).any():
            where = self.locate(int(granules[np.argmax(writer == BARRIER_OBJECT)]))
            raise Fault(f"plain access to an mbarrier object in {self.what} at {where}: {site}")
        if self.uninitialized and not storing:
            where = self.locate(int(granules[np.argmax(writer == NEVER)]))
            raise Uninitialized(f"read of {self.what} that nobody wrote, at {where}: {site}")

    def _report(
        self,
        index: Any,
        late: Array,
        before: str,
        now: str,
        clock: Clock,
        accessor: str,
        line: int,
        reader: int | None = None,
    ) -> None:
        if not late.any():
            return
        granule = int(self._granules(index)[np.argmax(late.reshape(-1))])
        if reader is None:
            other, epoch = int(self.writer[granule]), int(self.write_clock[granule])
        else:
            other, epoch = reader, int(self.readers[reader][granule])
        where = f"{self.what} at {self.locate(granule)}"
        first = f"{before} by {self.order.site(other, epoch)}"
        second = f"{now} by {accessor}, {self.order.describe_line(line)}"
        if reader is None and epoch <= clock.v[0][other]:
            raise Race(
                f"missing proxy fence on {where}: {first}; then {second} through the async proxy. "
                "They are ordered, but no fence.proxy.async lies between them"
            )
        raise Race(f"race on {where}: {first}; {second}; nothing orders them")

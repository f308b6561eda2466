"""Races in global memory between clusters (`ptxsim.gpu(global_races=True)`).

A coarse happens-before, made not to raise false alarms: a cluster is one thread, whatever its warps do; every atomic and every
load or store stronger than weak on a location both releases to it and acquires from it; accesses count when they are issued.
Two clusters that touch the same byte with nothing of that kind between them race if one access is a plain, bulk or TMA
store. Of the reads of a byte only the last is remembered. Reductions count as atomics that order nothing.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import Race
from .hostmem import GlobalMemory
from .values import Array, count_true

if TYPE_CHECKING:
    from .state import Warp

_WRITES = ("store", "TMA store", "bulk store")
_READS = ("load", "TMA load", "bulk load", "cp.async")


class _Bytes:
    """Who last read and wrote each byte of a buffer: cluster, its clock then, PTX line."""

    def __init__(self, low: int, high: int):
        self.low = low
        self.reader, self.writer = np.full((2, high - low), -1, np.int32)
        self.read_clock, self.write_clock, self.read_line, self.write_line = np.zeros(
            (4, high - low), np.int32
        )


class WatchedMemory(GlobalMemory):
    """The buffers of one launch, with a record of every access."""

    def __init__(self, buffers: dict[str, tuple[int, int]] | None, clusters: int):
        super().__init__(buffers)
        self.clocks = np.zeros((clusters, clusters), np.int32)
        """Row c: up to which clock of each cluster's accesses happen before what cluster c does now."""
        np.fill_diagonal(self.clocks, 1)
        self.locations: dict[int, Array] = {}
        self.tracked: list[_Bytes] = []
        for low, high, _ in self.spans:
            if self.tracked and low < self.tracked[-1].low + len(self.tracked[-1].writer):
                before = self.tracked.pop()
                low, high = before.low, max(high, before.low + len(before.writer))
            self.tracked.append(_Bytes(low, high))
        self.lows = [t.low for t in self.tracked]

    def check(self, low: int, high: int, what: str, W: Warp, line: int) -> None:
        super().check(low, high, what, W, line)
        if what == "atomic" or W.strong:
            self._synchronise(W, low)
        else:
            self._access(slice(low, high), low, what, W, line)

    def check_lanes(self, addresses: Array, size: int, what: str, W: Warp, line: int) -> None:
        super().check_lanes(addresses, size, what, W, line)
        if W.strong:
            for address in np.unique(addresses):
                self._synchronise(W, int(address))
            return
        index = addresses.astype(np.int64)[:, None] + np.arange(size)
        self._access(index.reshape(-1), int(index[0, 0]), what, W, line)

    def check_box(self, part: Any, element: int, what: str, W: Warp, line: int) -> None:
        super().check_box(part, element, what, W, line)
        index = np.zeros(1, np.int64)
        for n, stride in zip(part.shape, part.strides, strict=True):
            index = (index[:, None] + np.arange(n, dtype=np.int64) * stride).reshape(-1)
        index = (part.address + index[:, None] + np.arange(element)).reshape(-1)
        self._access(index, part.address, what, W, line)

    def _synchronise(self, W: Warp, address: int) -> None:
        """Release to the location and acquire from it."""
        me = W.cluster.number
        mine = self.clocks[me]
        known = self.locations.setdefault(address, np.zeros_like(mine))
        np.maximum(mine, known, out=mine)
        known[:] = mine
        mine[me] += 1

    def _access(self, where: Any, first: int, what: str, W: Warp, line: int) -> None:
        write = what in _WRITES
        if not write and what not in _READS:
            return
        i = bisect.bisect_right(self.lows, first) - 1
        if i < 0:
            return
        t, me = self.tracked[i], W.cluster.number
        at = slice(where.start - t.low, where.stop - t.low) if isinstance(where, slice) else where - t.low
        known = self.clocks[me]
        self._compare(t, at, t.writer, t.write_clock, t.write_line, "write", known, what, W, line)
        if write:
            self._compare(t, at, t.reader, t.read_clock, t.read_line, "read", known, what, W, line)
            t.writer[at], t.write_clock[at], t.write_line[at] = me, known[me], line
        else:
            t.reader[at], t.read_clock[at], t.read_line[at] = me, known[me], line

    def _compare(
        self, t: _Bytes, at: Any, who: Array, clock: Array, lines: Array, before: str, known: Array, what: str, W: Warp, line: int
    ) -> None:  # fmt: skip
        others = who[at]
        late = (others >= 0) & (others != W.cluster.number) & (clock[at] > known[others])
        if not count_true(late):
            return
        byte = int(np.arange(len(who))[at].reshape(-1)[np.argmax(late)])
        cluster, describe = W.machine.cluster_index(int(who[byte])), W.machine.describe_line
        raise Race(
            f"race on global memory, {self.place(t.low + byte)}: {before} by cluster {cluster}, {describe(int(lines[byte]))}; "
            f"{what} by {W.name}, {describe(line)}; no atomic or acquire and release orders them"
        )

    def place(self, address: int) -> str:
        """Which tensor, and where in it."""
        low, _, name = next(s for s in self.spans if s[0] <= address < s[1])
        return f"byte {address - low} of {name}"

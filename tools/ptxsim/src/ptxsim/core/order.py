"""Happens-before: the vector clocks of a cluster.

Actors are warps and asynchronous streams (the transactions of one mbarrier, a warp's tensor-core pipe, its bulk copies,
its TMEM loads, …). A clock has three rows:

    0  which accesses of each actor happen before now
    1  which of them are also visible to the async proxy; lags behind for plain stores until `fence.proxy.async`
    2  which tcgen05 operations were published by `tcgen05.fence::before_thread_sync` or `tcgen05.commit`; unlike the others
       this row travels through relaxed arrivals and waits too, and means something only after `fence::after_thread_sync`
       (PTX ISA 9.7.16.6.3)

`core.shadow` checks accesses against these clocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


class Clock:
    """One vector clock; `v` has shape (3, actors)."""

    __slots__ = ("plain", "v")

    def __init__(self, v: np.ndarray):
        self.v = v
        self.plain: Clock | None = None
        """The clock without regard to tcgen05 fences, where this is the one with (for reports)."""

    def join(self, other: Clock) -> None:
        """`other` may be a copy from before new actors came."""
        mine = self.v if other.v.shape == self.v.shape else self.v[:, : other.v.shape[1]]
        np.maximum(mine, other.v, out=mine)

    def copy(self) -> Clock:
        return Clock(self.v.copy())


class Order:
    """The actors and clocks of one cluster."""

    def __init__(self, describe_line: Callable[[int], str]):
        self.capacity = 64
        self.names: list[str] = []
        self.logs: list[Any] = []
        self.clocks: list[Clock] = []
        self.describe_line = describe_line
        self._scratch: Clock | None = None

    def actor(self, name: str, log: Any) -> int:
        """Register an actor. `log`: PTX line of each of its clock values, a list (from 1) or a dict."""
        self.names.append(name)
        self.logs.append(log)
        if len(self.names) > self.capacity:
            grown = self.capacity * 2
            for clock in self.clocks:
                old, clock.v = clock.v, np.zeros((3, grown), np.int32)
                clock.v[:, : self.capacity] = old
            self.capacity = grown
        return len(self.names) - 1

    def clock(self) -> Clock:
        clock = Clock(np.zeros((3, self.capacity), np.int32))
        self.clocks.append(clock)
        return clock

    def scratch(self) -> Clock:
        """A clock for the access being checked; the next call gives the same one."""
        if self._scratch is None:
            self._scratch = self.clock()
        return self._scratch

    def drop(self, *clocks: Clock) -> None:
        self.clocks = [c for c in self.clocks if c not in clocks]

    def site(self, actor: int, clock: int) -> str:
        log = self.logs[actor]
        if isinstance(log, dict):
            entry = log.get(clock, "?")
            lines = sorted(entry, key=str) if isinstance(entry, set) else [entry]
        else:
            lines = [log[clock - 1]] if 0 < clock <= len(log) else ["?"]
        sites = sorted({self.describe_line(x) if isinstance(x, int) else str(x) for x in lines})
        return f"{self.names[actor]}, " + " or ".join(sites)

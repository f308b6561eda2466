"""Happens-before: the vector clocks of a cluster.

Actors are warps and asynchronous streams (the transactions of one mbarrier, a warp's tensor-core pipe, its bulk copies,
its TMEM loads, …). A clock has two rows: row 0 says which accesses of each actor happen before now, row 1 which of them are
also visible to the async proxy. Row 1 lags behind for plain stores until `fence.proxy.async`.

`core.shadow` checks accesses against these clocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


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
            lines = sorted(entry, key=str) if isinstance(entry, set) else [entry]
        else:
            lines = [log[clock - 1]] if 0 < clock <= len(log) else ["?"]
        sites = sorted({self.describe_line(x) if isinstance(x, int) else str(x) for x in lines})
        return f"{self.names[actor]}, " + " or ".join(sites)

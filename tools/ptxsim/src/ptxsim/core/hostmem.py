"""Global memory is the memory of this process, limited to the buffers a kernel was given."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import Fault
from .values import Array

if TYPE_CHECKING:
    from .state import Warp

_FIRST = 4096
_SPAN = (1 << 47) - 2 * _FIRST


def _view(dtype: str) -> Array:
    class Whole:
        __array_interface__ = {  # noqa: RUF012
            "data": (_FIRST, False),
            "shape": (_SPAN // np.dtype(dtype).itemsize,),
            "typestr": np.dtype(dtype).str,
            "version": 3,
        }

    return np.asarray(Whole())


MEMORY = {1: _view("u1"), 2: _view("<u2"), 4: _view("<u4"), 8: _view("<u8")}
"""The address space as arrays of 1-, 2-, 4- and 8-byte words; index with `element(address, bytes)`."""


def element(address: Any, size: int) -> Any:
    return (address - _FIRST) // size


def read_bytes(address: int, size: int) -> bytes:
    return MEMORY[1][address - _FIRST : address - _FIRST + size].tobytes()


def byte_range(address: int, size: int) -> Array:
    return MEMORY[1][address - _FIRST : address - _FIRST + size]


def strided(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> Array:
    return np.ndarray(shape, dtype=dtype, buffer=MEMORY[1], offset=address - _FIRST, strides=strides)


def _who(W: Warp, line: int) -> str:
    return f"{W.name}, {W.machine.describe_line(line)}"


class Mappings:
    """What the process may read and write at all, from /proc/self/maps."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []

    def reload(self) -> None:
        self.starts, self.ends = [], []
        with open("/proc/self/maps") as f:
            for line in f:
                span, access = line.split()[:2]
                low, high = (int(x, 16) for x in span.split("-"))
                if not access.startswith("rw"):
                    continue
                if self.ends and self.ends[-1] == low:
                    self.ends[-1] = high
                else:
                    self.starts.append(low)
                    self.ends.append(high)

    def _find(self, low: int, high: int) -> bool:
        i = bisect.bisect_right(self.starts, low) - 1
        return i >= 0 and high <= self.ends[i]

    def contains(self, low: int, high: int) -> bool:
        if self._find(low, high):
            return True
        self.reload()
        return self._find(low, high)


MAPPINGS = Mappings()


class GlobalMemory:
    """The buffers one launch may touch. `None` limits: any mapped memory (some argument's extent is unknown)."""

    def __init__(self, buffers: dict[str, tuple[int, int]] | None):
        self.buffers = buffers
        spans = sorted((low, high, name) for name, (low, high) in (buffers or {}).items())
        self.starts = [s[0] for s in spans]
        self.spans = spans

    def check(self, low: int, high: int, what: str, W: Warp, line: int) -> None:
        """An access of [low, high): a fault if it is outside."""
        self._inside(low, high, what, W, line)

    def check_box(self, part: Any, element: int, what: str, W: Warp, line: int) -> None:
        """The part of a TMA box (`tma.Part`)."""
        self._inside(part.address, part.end, what, W, line)

    def _inside(self, low: int, high: int, what: str, W: Warp, line: int) -> None:
        if self.buffers is None:
            if low < _FIRST or not MAPPINGS.contains(low, high):
                raise Fault(f"global {what} at unmapped address [{low:#x}, {high:#x}): {_who(W, line)}")
            return
        i = bisect.bisect_right(self.starts, low) - 1
        while i >= 0:
            if high <= self.spans[i][1]:
                return
            if i > 0 and self.spans[i - 1][1] > low:
                i -= 1
                continue
            break
        raise Fault(
            f"global {what} [{low:#x}, {high:#x}) is outside the tensors passed: {self._nearest(low, high)}; "
            f"{_who(W, line)}"
        )

    def _nearest(self, low: int, high: int) -> str:
        best = min(self.spans, key=lambda s: max(s[0] - high, low - s[1], 0), default=(0, 0, "none"))
        start, end, name = best
        if low >= end:
            return f"{low - end} bytes past the end of {name} ({end - start} bytes)"
        if high <= start:
            return f"{start - low} bytes before {name}"
        return f"bytes {low - start}…{high - start} of {name} ({end - start} bytes)"

    def check_lanes(self, addresses: Array, size: int, what: str, W: Warp, line: int) -> None:
        """All lanes: their span first, each address if that fails."""
        low, high = int(np.minimum.reduce(addresses)), int(np.maximum.reduce(addresses)) + size
        try:
            self._inside(low, high, what, W, line)
        except Fault:
            for a in addresses:
                self._inside(int(a), int(a) + size, what, W, line)

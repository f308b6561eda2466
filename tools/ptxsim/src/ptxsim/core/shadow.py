"""Shadow memory: who touched each granule last, and whether the present access is ordered after that.

A granule is a column of TMEM in one lane quarter, or 16 bytes of shared memory; 16-byte chunks that a smaller access ever
touched are tracked at the kernel's smallest access size. Each granule remembers its last writer and every actor's last
read. An access is ordered if the accessor's clock covers those; otherwise both sides are reported with their PTX lines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import Fault, Race, Uninitialized
from .order import Clock, Order
from .values import Array, count_true

NEVER = -1
BARRIER_OBJECT = -2
"""Shadow writer of the 8 bytes of a live mbarrier."""

_minimum = np.minimum.reduce


class Shadow:
    """Who touched each granule last."""

    def __init__(self, order: Order, size: int, what: str, locate: Callable[[int], str], uninitialized: bool):
        self.order, self.what, self.locate, self.uninitialized = order, what, locate, uninitialized
        self.writer = np.full(size, NEVER, np.int16)
        self.write_clock = np.zeros(size, np.int32)
        self.atomic: Array | None = None
        self.readers: dict[int, Array] = {}
        self.newest_read: dict[int, int] = {}
        self.accesses = 0
        self._remembered: tuple[int, int, int, Any] | None = None

    def remember(self, actor: int, epoch: int, key: Any) -> None:
        """The last accesses were these; see `repeated`."""
        self._remembered = (self.accesses, actor, epoch, key)

    def repeated(self, actor: int, epoch: int, key: Any) -> bool:
        """The same accesses were made by the same actor at the same clock value, and none since: nothing to check."""
        return self._remembered == (self.accesses, actor, epoch, key)

    def read(
        self, clock: Clock, row: int, index: Any, actor: int, epoch: int, line: int, accessor: str
    ) -> None:
        """Check and record a read of granules `index` (slice or array). `row`: 0 plain, 1 through the async proxy."""
        self.accesses += 1
        writer = self.writer[index]
        if _minimum(writer) < 0:
            self._unwritten(index, writer, accessor, line)
        late = self.write_clock[index] > clock.v[row][writer]
        if count_true(late):
            self._report(index, late & (writer >= 0), "write", "read", clock, accessor, line)
        mine = self.readers.get(actor)
        if mine is None:
            mine = self.readers[actor] = np.zeros(self.writer.size, np.int32)
        mine[index] = epoch
        self.newest_read[actor] = epoch

    def write(
        self, clock: Clock, row: int, index: Any, actor: int, epoch: int, line: int, accessor: str
    ) -> None:
        self.accesses += 1
        writer = self.writer[index]
        if _minimum(writer) == BARRIER_OBJECT:
            self._unwritten(index, writer, accessor, line, storing=True)
        late = self.write_clock[index] > clock.v[row][writer]
        if count_true(late):
            late &= writer >= 0
            if count_true(late):
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
            if count_true(late):
                self._report(index, late, "read", "write", clock, accessor, line, other)

    def atomically(self, clock: Clock, index: Any, actor: int, epoch: int, line: int, accessor: str) -> None:
        """An atomic update: races with plain accesses only."""
        if self.atomic is None:
            self.atomic = np.zeros(self.writer.size, bool)
        writer = self.writer[index]
        if _minimum(writer) < 0:
            self._unwritten(index, writer, accessor, line)
        late = (self.write_clock[index] > clock.v[0][writer]) & ~self.atomic[index]
        if count_true(late):
            self._report(index, late, "write", "atomic update", clock, accessor, line)
        self.check_readers(clock, index, accessor, line)
        self.writer[index] = actor
        self.write_clock[index] = epoch
        self.atomic[index] = True

    def mark(self, index: Any, writer: int) -> None:
        """Without a check: barrier objects, and memory that is no longer one."""
        self.accesses += 1
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
        if not count_true(late):
            return
        granule = int(self._granules(index)[np.argmax(late.reshape(-1))])
        if reader is None:
            other, epoch = int(self.writer[granule]), int(self.write_clock[granule])
        else:
            other, epoch = reader, int(self.readers[reader][granule])
        where = f"{self.what} at {self.locate(granule)}"
        first = f"{before} by {self.order.site(other, epoch)}"
        second = f"{now} by {accessor}, {self.order.describe_line(line)}"
        if clock.plain is not None and epoch <= clock.plain.v[0][other]:
            raise Race(
                f"missing tcgen05.fence on {where}: {first}; then {second}. They are ordered, but not by "
                "tcgen05.fence::before_thread_sync (or a commit) and tcgen05.fence::after_thread_sync"
            )
        if reader is None and epoch <= clock.v[0][other]:
            raise Race(
                f"missing proxy fence on {where}: {first}; then {second} through the async proxy. "
                "They are ordered, but no fence.proxy.async lies between them"
            )
        raise Race(f"race on {where}: {first}; {second}; nothing orders them")


class SharedShadow:
    """Shadow of a CTA's shared memory; accesses are byte ranges or offsets with a size."""

    def __init__(self, order: Order, size: int, granule: int, what: str, uninitialized: bool):
        self.granule, self.per_chunk = granule, 16 // granule
        self.coarse = Shadow(order, size // 16, what, lambda g: hex(16 * g), uninitialized)
        self.fine: Shadow | None = None
        self.refined = np.zeros(size // 16, bool)
        self._arguments = (order, size // granule, what, lambda g: hex(g * granule), uninitialized)

    def read(
        self, clock: Clock, row: int, where: Any, size: int, actor: int, epoch: int, line: int, accessor: str
    ) -> None:
        """`where`: a slice of bytes, or an array of offsets of accesses of `size` aligned bytes."""
        for shadow, index in self._parts(where, size):
            shadow.read(clock, row, index, actor, epoch, line, accessor)

    def write(
        self, clock: Clock, row: int, where: Any, size: int, actor: int, epoch: int, line: int, accessor: str
    ) -> None:
        for shadow, index in self._parts(where, size):
            shadow.write(clock, row, index, actor, epoch, line, accessor)

    def atomically(
        self, clock: Clock, where: slice, actor: int, epoch: int, line: int, accessor: str
    ) -> None:
        for shadow, index in self._parts(where, 0):
            shadow.atomically(clock, index, actor, epoch, line, accessor)

    def mark(self, where: slice, writer: int) -> None:
        for shadow, index in self._parts(where, 0):
            shadow.mark(index, writer)

    def _parts(self, where: Any, size: int) -> list[tuple[Shadow, Any]]:
        if isinstance(where, slice):
            low, high = where.start, where.stop
            if low % 16 or high % 16:
                if (
                    self.fine is None
                    or high - low > 16
                    or not (self.refined[low // 16] and self.refined[(high - 1) // 16])
                ):
                    self._refine(np.arange(low // 16, -(-high // 16)))
                assert self.fine is not None
                return [(self.fine, slice(low // self.granule, -(-high // self.granule)))]
            chunks: Any = slice(low // 16, high // 16)
            if self.fine is None or not count_true(self.refined[chunks]):
                return [(self.coarse, chunks)]
            chunks = np.arange(low // 16, high // 16)
        elif size < 16:
            self._refine(where // 16)
            assert self.fine is not None
            index = where // self.granule
            if size > self.granule:
                index = (index[:, None] + np.arange(size // self.granule)).reshape(-1)
            return [(self.fine, index)]
        else:
            chunks = where >> 4
            if size > 16:
                chunks = (chunks[:, None] + np.arange(size // 16)).reshape(-1)
            if self.fine is None:
                return [(self.coarse, chunks)]
        return self._mixed(chunks)

    def _mixed(self, chunks: Array) -> list[tuple[Shadow, Any]]:
        refined = self.refined[chunks]
        n = count_true(refined)
        if n == 0:
            return [(self.coarse, chunks)]
        assert self.fine is not None
        index = (chunks[refined][:, None] * self.per_chunk + np.arange(self.per_chunk)).reshape(-1)
        if n == len(chunks):
            return [(self.fine, index)]
        return [(self.coarse, chunks[~refined]), (self.fine, index)]

    def _refine(self, chunks: Array) -> None:
        """Track these chunks at the small granule from now on."""
        if self.fine is None:
            self.fine = Shadow(*self._arguments)
        new = chunks[~self.refined[chunks]]
        if not len(new):
            return
        fine, coarse = self.fine, self.coarse
        index = new[:, None] * self.per_chunk + np.arange(self.per_chunk)
        fine.writer[index] = coarse.writer[new][:, None]
        fine.write_clock[index] = coarse.write_clock[new][:, None]
        for actor, clocks in coarse.readers.items():
            mine = fine.readers.setdefault(actor, np.zeros(fine.writer.size, np.int32))
            mine[index] = clocks[new][:, None]
            fine.newest_read[actor] = max(coarse.newest_read[actor], fine.newest_read.get(actor, 0))
        self.refined[new] = True

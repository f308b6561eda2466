"""Tensor memory: allocation, loads and stores between it and registers, and who may touch it when."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ..errors import Fault
from .memory import store_shared, who
from .order import Clock
from .state import CTA, TMEM_COLUMNS, TMEM_POISON, Stream, Wait
from .values import LANE_INDEX, U64, Array, Mask, Value, first, spread

if TYPE_CHECKING:
    from .state import Warp

_ORDERED = np.int32(2**31 - 1)
REGISTER_POISON = 0xFFFFFFFF


class stream_clock:
    """`with stream_clock(W, stream) as clock`: the warp's clock, with all that the stream itself did counted as ordered."""

    __slots__ = ("actor", "clock", "saved")

    def __init__(self, W: Warp, stream: Stream):
        self.clock, self.actor = W.current(), stream.actor

    def __enter__(self) -> Clock:
        v = self.clock.v
        self.saved = v[0, self.actor], v[1, self.actor]
        v[0, self.actor] = v[1, self.actor] = _ORDERED
        return self.clock

    def __exit__(self, *exc: object) -> None:
        self.clock.v[0, self.actor], self.clock.v[1, self.actor] = self.saved


def tensor_clock(W: Warp, clock: Clock) -> Clock:
    """What orders an access to tensor memory, given the `stream_clock` of its stream.

    Release and acquire order tcgen05 operations like all others (PTX ISA 9.7.16.6.3); so do relaxed operations with
    tcgen05.fence on both sides. `tmem_fences` asks for the fences in either case.
    """
    fenced = W.tensor
    if W.machine.tmem_fences:
        ordered = W.cluster.order.scratch()
        ordered.v[0] = np.where(clock.v[0] == _ORDERED, _ORDERED, 0 if fenced is None else fenced.v[0])
        ordered.plain = clock
        return ordered
    if fenced is None:
        return clock
    ordered = W.cluster.order.scratch()
    np.maximum(clock.v[0], fenced.v[0], out=ordered.v[0])
    return ordered


@lru_cache(maxsize=4096)
def column_index(first_quarter: int, last_quarter: int, column: int, n: int) -> Array:
    quarters = np.arange(first_quarter, last_quarter + 1)[:, None]
    return (quarters * TMEM_COLUMNS + column + np.arange(n)[None, :]).reshape(-1)


def check_columns(cta: CTA, column: int, n: int, what: str, W: Warp, line: int) -> None:
    for start, size in cta.allocations.items():
        if start <= column and column + n <= start + size:
            return
    if column + n > TMEM_COLUMNS:
        raise Fault(f"{what}: TMEM columns {column}…{column + n - 1} do not exist: {who(W, line)}")
    if not cta.columns_used[column : column + n].all():
        raise Fault(
            f"{what}: TMEM columns {column}…{column + n - 1} of {cta.name} are not allocated: {who(W, line)}"
        )


def tmem_alloc(
    W: Warp, m: Mask, a: Value, columns: Value, group: int, next_block: int, line: int
) -> int | Wait:
    cta = W.cta
    address, n = first(a, m), first(columns, m)
    if m is not None and not (m == W.live).all():
        raise Fault(f"tcgen05.alloc needs the whole warp: {who(W, line)}")
    if not 32 <= n <= 512 or n & (n - 1):
        raise Fault(f"tcgen05.alloc of {n} columns: a power of two in 32…512 is needed: {who(W, line)}")
    if cta.relinquished:
        raise Fault(f"tcgen05.alloc after relinquish_alloc_permit: {who(W, line)}")

    def place() -> int | None:
        for start in range(0, TMEM_COLUMNS - n + 1, n):
            if not cta.columns_used[start : start + n].any():
                return start
        return None

    def take() -> None:
        start = place()
        assert start is not None
        cta.columns_used[start : start + n] = True
        cta.allocations[start] = n
        cta.tmem[:, start : start + n] = TMEM_POISON
        store_shared(W, address, 4, [start], None, line)
        W.machine.progress += 1

    # With cta_group::2 the warps of both CTAs perform the allocation together: neither goes on before the other has come.
    peers = [cta] if group == 1 else cta.pair
    if len(peers) != group:
        raise Fault(f"tcgen05.alloc.cta_group::2 needs a cluster with an even number of CTAs: {who(W, line)}")
    cta.allocating = (place, take)

    def ready() -> bool:
        return cta.allocating is None or all(c.allocating and c.allocating[0]() is not None for c in peers)

    def finish() -> None:
        if cta.allocating is not None:
            for c in peers:
                assert c.allocating is not None
                c.allocating[1]()
                c.allocating = None

    if ready():
        finish()
        return next_block
    return Wait(
        ready, next_block, lambda: f"{W.machine.describe_line(line)}: tcgen05.alloc of {n} columns", finish
    )


def tmem_dealloc(W: Warp, m: Mask, a: Value, columns: Value, group: int, line: int) -> None:
    cta = W.cta
    start, n = first(a, m) & 0xFFFF, first(columns, m)
    if cta.allocations.get(start) != n:
        raise Fault(
            f"tcgen05.dealloc of {n} columns at {start}: allocated are {cta.allocations}: {who(W, line)}"
        )
    if cta.tmem_shadow:
        index = column_index(0, 3, start, n)
        # A load whose registers have been used has read its columns: enough for giving them back.
        done = W.current().copy()
        if W.tensor is not None:
            np.maximum(done.v[0], W.tensor.v[0], out=done.v[0])
        for warp in cta.warps:
            loads = warp.streams.get("tcgen05.ld")
            if loads and not warp.loading and 0 < warp.loads_used <= done.v[0, warp.actor]:
                loads.complete(done, loads.epoch)
        cta.tmem_shadow.write(done, 0, index, W.actor, W.touch(line), line, f"tcgen05.dealloc by {W.name}")
        cta.tmem_shadow.reset(index)
    del cta.allocations[start]
    cta.columns_used[start : start + n] = False
    W.machine.progress += 1


def tmem_relinquish(W: Warp, group: int, line: int) -> None:
    W.cta.relinquished = True


@lru_cache(maxsize=256)
def _fragment(shape: str, n: int) -> tuple[Array, Array]:
    """Row (in the warp's 32 lanes) and column of each (register, thread)."""
    t = LANE_INDEX
    if shape == "32x32b":
        return np.tile(t, (n, 1)), np.tile(np.arange(n)[:, None], (1, 32))
    if shape == "16x64b":
        r = np.arange(n)[:, None]
        return t // 4 + 8 * (t % 2) + 0 * r, 2 * r + t // 2 % 2
    if shape == "16x256b":
        r = np.arange(4 * n)[:, None]
        return t // 4 + 8 * (r % 4 // 2), 8 * (r // 4) + 2 * (t % 4) + r % 2
    if shape == "16x128b":
        r = np.arange(2 * n)[:, None]
        return t // 4 + 8 * (r % 2) + 0 * r, 4 * (r // 2) + t % 4
    raise Fault(f"tcgen05.ld/st shape .{shape} is not modelled")


def _window(W: Warp, a: Value, shape: str, n: int, what: str, line: int) -> tuple[int, Array, Array]:
    """First column, and rows and columns of a warp's access; a warp reaches the 32 lanes of its rank in the warpgroup."""
    address = first(a, None)
    lane, column = address >> 16 & 0xFFFF, address & 0xFFFF
    low = 32 * (W.number % 4)
    rows, columns = _fragment(shape, n)
    if not low <= lane < low + 32 or lane + int(rows.max()) >= low + 32:
        raise Fault(f"{what}: lanes {lane}… but {W.name} reaches lanes {low}…{low + 31} only: {who(W, line)}")
    check_columns(W.cta, column, int(columns.max()) + 1, what, W, line)
    return column, lane + rows, column + columns


def _note_access(W: Warp, what: str, column: int, columns: Array, line: int) -> tuple[Stream, int]:
    """Tell the race detector of a warp's load or store; its stream, and its epoch there."""
    stream = W.stream(what, "tmem")
    epoch = stream.note(line)
    shadow = W.cta.tmem_shadow
    if shadow:
        quarter = W.number % 4
        index = column_index(quarter, quarter, column, int(columns.max()) - column + 1)
        access = shadow.read if what == "tcgen05.ld" else shadow.write
        with stream_clock(W, stream) as clock:
            access(tensor_clock(W, clock), 0, index, stream.actor, epoch, line, f"{what} by {W.name}")
    return stream, epoch


def tmem_load(
    W: Warp, R: list, slots: list[int], a: Value, shape: str, n: int, packed: bool, line: int
) -> None:
    """The registers belong to the load until tcgen05.wait::ld, or until one is read: see `check_pending`."""
    column, rows, columns = _window(W, a, shape, 2 * n if packed else n, "tcgen05.ld", line)
    tmem = W.cta.tmem
    stream, epoch = _note_access(W, "tcgen05.ld", column, columns, line)

    def land() -> None:
        if shape == "32x32b":
            low = int(rows[0, 0])
            block = tmem[low : low + 32, column : column + len(rows)]
            values = np.ascontiguousarray(block.T).astype(np.uint64)
        else:
            values = tmem[rows, columns].astype(np.uint64)
        if packed:
            values = (values[0::2] & U64(0xFFFF)) | (values[1::2] & U64(0xFFFF)) << U64(16)
        for slot, value in zip(slots, values, strict=True):
            if slot >= 0:
                R[slot] = value

    op = W.machine.engine.issue(land, line, stream.pipe, ticks=8 + n)
    stream.ops.append((epoch, op))
    if not op.done:
        for slot in slots:
            R[slot] = REGISTER_POISON
    W.loading.update(dict.fromkeys(slots, op))


def tmem_store(W: Warp, a: Value, shape: str, n: int, values: list[Value], unpacked: bool, line: int) -> None:
    column, rows, columns = _window(W, a, shape, 2 * n if unpacked else n, "tcgen05.st", line)
    tmem = W.cta.tmem
    stream, epoch = _note_access(W, "tcgen05.st", column, columns, line)
    data = np.stack([spread(v) for v in values]).astype(np.uint32)
    if unpacked:
        data = np.stack([data & np.uint32(0xFFFF), data >> np.uint32(16)], 1).reshape(-1, 32)

    def land() -> None:
        tmem[rows, columns] = data

    stream.ops.append((epoch, W.machine.engine.issue(land, line, stream.pipe)))


def tmem_wait(W: Warp, what: str, line: int) -> None:
    stream = W.stream(f"tcgen05.{what}", "tmem")
    while stream.ops:
        W.machine.engine.force(stream.ops.popleft()[1])
    actor, v = stream.actor, W.clock.v
    v[:2, actor] = stream.epoch
    if W.tensor is None and W.machine.tmem_fences:
        W.tensor = W.cluster.order.clock()
    if W.tensor is not None:
        W.tensor.v[0, actor] = stream.epoch
        np.maximum(v[0], W.tensor.v[0], out=v[0])
    stream.epoch += 1
    if what == "ld":
        W.loading.clear()


def tmem_fence(W: Warp, what: str) -> None:
    """Order tcgen05 operations around thread synchronisation, relaxed or not (PTX ISA 9.7.16.6.3)."""
    v = W.current().v
    if what == "before_thread_sync":
        publish_tensor(W, v)
    elif W.machine.tmem_fences or (v[2] > v[0]).any():
        if W.tensor is None:
            W.tensor = W.cluster.order.clock()
        np.maximum(W.tensor.v[0], v[2], out=W.tensor.v[0])


def publish_tensor(W: Warp, v: Array) -> None:
    """In rows `v` of a clock, what row 0 or this warp's fences have ordered counts as published."""
    np.maximum(v[2], v[0], out=v[2])
    if W.tensor is not None:
        np.maximum(v[2], W.tensor.v[0], out=v[2])


def check_pending(W: Warp, read: list[int], written: list[int], line: int) -> None:
    """An instruction is about to use registers that an asynchronous operation may still own.

    Reading the result of a tcgen05.ld is a true register dependency, which the hardware respects without any wait (PTX ISA
    9.7.16.6.4.5): the load takes effect now. That orders nothing else: its read of tensor memory counts as done only at
    tcgen05.wait::ld. Overwriting such a register, or touching one of a wgmma in flight, is an error.
    """
    for slot in read:
        op = W.loading.get(slot)
        if op is not None:
            W.machine.engine.force(op)
            W.loading = {k: v for k, v in W.loading.items() if not v.done}
            if not W.loading:
                W.loads_used = W.touch(line)
    for slot in written:
        if slot in W.loading:
            raise Fault(
                f"register overwritten while tcgen05.ld may still write it (no tcgen05.wait::ld): {who(W, line)}"
            )
    for slot in read + written:
        why = W.pending_registers.get(slot)
        if why is not None:
            raise Fault(f"register used while its value is in flight ({why}): {who(W, line)}")

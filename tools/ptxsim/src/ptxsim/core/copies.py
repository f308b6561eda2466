"""What all bulk copies share: who issues, where they land, when shared memory is read and global memory written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from ..errors import Fault
from .barriers import MBarrier, find_mbarrier
from .memory import combine, shared_location, who
from .state import CTA, OFFSET_MASK, RANK_SHIFT, BulkGroup
from .values import Array, Mask, Value, lane, lanes, mask_bits

if TYPE_CHECKING:
    from .state import Warp

UINT = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}
_FLOAT = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64}


def issuers(W: Warp, m: Mask, line: int, what: str, *operands: Value, once: bool = False) -> list[int]:
    """Lanes that issue the copy. Several lanes with the same operands are a missing election: reported, or, with checks
    off, done once a lane as an H200 does.

    `once`: a plain tensor store with the same operands in every lane counts as issued by one. The DSL emits those
    without an election; repeating them would change nothing but the traffic.
    """
    active = list(lanes(m))
    if len(active) > 1:
        if once and not any(type(v) is Array for v in operands):
            return active[:1]
        seen = {tuple(lane(v, i) for v in operands) for i in active}
        if once and len(seen) == 1:
            return active[:1]
        if len(seen) != len(active) and W.machine.checks:
            raise Fault(
                f"un-elected {what}: {len(active)} lanes ({mask_bits(m):#x}) issue it, {len(seen)} distinct; "
                f"elect one lane: {who(W, line)}"
            )
    return active


def targets_of(
    W: Warp, address: int, barrier: int, mask: int | None, pair: bool
) -> list[tuple[CTA, int, int]]:
    """(destination CTA, offset, mbarrier address) of a copy into shared memory."""
    if mask is None:
        cta, o = shared_location(W, address)
        return [(cta, o, barrier)]
    o, b = address & OFFSET_MASK, barrier & OFFSET_MASK
    out = []
    for cta in W.cluster.ctas:
        if mask >> cta.rank & 1:
            # the mbarrier has the same offset in each destination; for a CTA pair its even/odd half stays as given
            rank = (cta.rank & ~1) | (barrier >> RANK_SHIFT & 1) if pair else cta.rank
            out.append((cta, o, b | rank << RANK_SHIFT))
    if mask >> len(W.cluster.ctas) or not mask:
        raise Fault(
            f"multicast mask {mask:#x} names CTAs outside the cluster of {len(W.cluster.ctas)} ({W.name})"
        )
    return out


class Landing:
    """A copy into shared memory that completes on mbarriers: checked and poisoned at issue, counted at completion."""

    def __init__(
        self, W: Warp, targets: list[tuple[CTA, int, int]], index: Any, size: int, line: int, what: str
    ):
        """`index(cta, offset)`: bytes written, as a slice or an array of 16-byte chunk offsets."""
        self.warp, self.size, self.line, self.what = W, size, line, what
        self.barriers: list[tuple[MBarrier, int]] = []
        clock = W.current()
        for cta, offset, barrier_address in targets:
            barrier = find_mbarrier(W, barrier_address, line, asynchronous=True)
            self.barriers.append((barrier, barrier.phase))
            epoch = barrier.note(self)
            if cta.shadow:
                accessor = f"{what} by {W.name}"
                cta.shadow.write(clock, 1, index(cta, offset), 16, barrier.actor, epoch, line, accessor)

    def __str__(self) -> str:
        """For reports; formatted only when there is one."""
        return f"{self.what} by {who(self.warp, self.line)}"

    def arrived(self) -> None:
        for barrier, phase in self.barriers:
            barrier.complete(self.warp.machine, self.size, phase, self)


def load_ticks(size: int) -> int:
    """For timelines: about the latency and rate of a copy into shared memory, in clocks."""
    return 600 + size // 64


def reduce_arrays(op: str, ty: str, old: Array, new: Array) -> Array:
    """Element-wise reduction on bit patterns of type `ty`."""
    if ty in _FLOAT and op == "add":
        x, y = (np.ascontiguousarray(v).view(_FLOAT[ty]).astype(np.float64) for v in (old, new))
        r = (x + y).astype(_FLOAT[ty])  # two bf16 or f16 summed in f32: rounding twice is harmless
        canonical = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF}.get(ty)
        bits = r.view(old.dtype)
        return bits if canonical is None else np.where(r != r, old.dtype.type(canonical), bits)
    if ty in _FLOAT:
        flat = [
            combine(op, ty, int(x), int(y)) for x, y in zip(old.reshape(-1), new.reshape(-1), strict=True)
        ]
        return np.array(flat, dtype=old.dtype).reshape(old.shape)
    if op == "add":
        return old + new
    if op in ("and", "or", "xor"):
        return {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[op](old, new)
    if op in ("min", "max"):
        dtype = old.dtype if ty[0] != "s" else np.dtype(old.dtype.str.replace("u", "i"))
        f = np.minimum if op == "min" else np.maximum
        return f(np.ascontiguousarray(old).view(dtype), np.ascontiguousarray(new).view(dtype)).view(old.dtype)
    if op == "inc":
        return np.where(old >= new, 0, old + 1).astype(old.dtype)
    return np.where((old == 0) | (old > new), new, old - 1).astype(old.dtype)


def start_store(W: Warp, i: int, cta: CTA, index: Any, what: str, line: int, read: Any, write: Any) -> None:
    """Two operations: the read of shared memory, then the write of global memory."""
    stream = W.stream("bulk stores", "tma")
    epoch = stream.note(line)
    if cta.shadow:
        cta.shadow.read(W.current(), 1, index, 16, stream.actor, epoch, line, f"{what} by {W.name}")
    data: list[Array] = []
    machine = W.machine

    def finish() -> None:
        write(data[0])
        machine.progress += 1

    reads = machine.engine.issue(lambda: data.append(read()), line, None, "tma", 100)

    def late_write() -> None:
        machine.engine.force(reads)
        finish()

    writes = machine.engine.issue(late_write, line, None, "tma", 700)
    W.open_bulk.append((i, reads, writes))


def bulk_commit(W: Warp, m: Mask, line: int) -> None:
    stream = W.stream("bulk stores", "tma")
    active = set(lanes(m))
    for i in active:
        mine = [(r, w) for j, r, w in W.open_bulk if j == i]
        if mine or any(g.lane == i for g in W.bulk_groups):
            W.bulk_groups.append(BulkGroup(i, stream.epoch, line, [r for r, _ in mine], [w for _, w in mine]))
    W.open_bulk = [x for x in W.open_bulk if x[0] not in active]
    stream.epoch += 1


def bulk_wait(W: Warp, m: Mask, n: int, read: bool, next_block: int, line: int) -> int:
    """Wait until at most `n` of each active lane's latest groups are pending (or unread, with `read`)."""
    engine, stream = W.machine.engine, W.stream("bulk stores", "tma")
    active = set(lanes(m))
    for i in active:
        mine = [g for g in W.bulk_groups if g.lane == i]
        for group in mine[: len(mine) - n] if n else mine:
            for op in group.reads:
                engine.force(op)
            group.read_waited = True
            stream.complete(W.clock, group.epoch)
            if not read:
                for op in group.writes:
                    engine.force(op)
                W.bulk_groups.remove(group)
    W.machine.progress += 1
    return next_block

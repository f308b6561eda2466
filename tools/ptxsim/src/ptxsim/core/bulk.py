"""Copies without tensor maps: 1-D bulk copies, cp.async, st.async, and the answer of try_cancel."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import Fault
from ..parser import WIDTH
from . import hostmem
from .barriers import find_mbarrier
from .copies import UINT, Landing, issuers, load_ticks, reduce_arrays, start_store, targets_of
from .memory import combine, shared_location, who
from .state import CTA, OFFSET_MASK, SHARED_POISON
from .values import Array, Mask, Value, count_lanes, lane, lanes, spread

if TYPE_CHECKING:
    from .state import Stream, Warp


def _check_bulk(W: Warp, shared_offset: int, other: int, size: int, line: int) -> None:
    if size % 16 or shared_offset % 16 or other % 16:
        raise Fault(f"bulk copy: size {size} and both addresses must be multiples of 16: {who(W, line)}")


def bulk_load(
    W: Warp, dst: Value, src: Value, size: Value, barrier: Value, mask: Value | None, m: Mask, line: int
) -> None:
    for i in issuers(W, m, line, "bulk load", dst, src):
        start, n = lane(src, i), lane(size, i)
        targets = targets_of(
            W, lane(dst, i), lane(barrier, i), None if mask is None else lane(mask, i), False
        )
        _check_bulk(W, targets[0][1], start, n, line)
        W.machine.memory.check(start, start + n, "bulk load", W, line)

        def source(start: int = start, n: int = n) -> Array:
            return hostmem.byte_range(start, n)

        W.machine.count_bytes("bulk_load", start, n * len(targets))
        _copy_in(W, targets, source, n, line, "bulk load")


def _copy_in(W: Warp, targets: list[tuple[CTA, int, int]], source: Any, n: int, line: int, what: str) -> None:
    for cta, o, _ in targets:
        if o + n > cta.size:
            raise Fault(f"{what}: {n} bytes at {o:#x} end beyond shared memory of {cta.name}: {who(W, line)}")
    landing = Landing(W, targets, lambda cta, o: slice(o, o + n), n, line, what)

    def land() -> None:
        data = source().copy()
        for cta, o, _ in targets:
            cta.bytes[o : o + n] = data
        landing.arrived()

    op = W.machine.engine.issue(land, line, None, "tma", load_ticks(n))
    if not op.done:
        for cta, o, _ in targets:
            cta.bytes[o : o + n] = SHARED_POISON


def bulk_shared(W: Warp, dst: Value, src: Value, size: Value, barrier: Value, m: Mask, line: int) -> None:
    """Shared memory of this CTA → shared memory of another CTA of the cluster."""
    for i in issuers(W, m, line, "bulk copy between CTAs", dst, src):
        cta, o = shared_location(W, lane(src, i))
        n = lane(size, i)
        targets = targets_of(W, lane(dst, i), lane(barrier, i), None, False)
        _check_bulk(W, o, targets[0][1], n, line)
        landing_barrier = find_mbarrier(W, lane(barrier, i), line, asynchronous=True)
        if cta.shadow:
            epoch = landing_barrier.note(f"bulk copy by {who(W, line)}")
            cta.shadow.read(
                W.current(),
                1,
                slice(o, o + n),
                16,
                landing_barrier.actor,
                epoch,
                line,
                f"bulk copy by {W.name}",
            )
        _copy_in(W, targets, lambda cta=cta, o=o, n=n: cta.bytes[o : o + n], n, line, "bulk copy")


def bulk_store(
    W: Warp, dst: Value, src: Value, size: Value, op: str | None, ty: str | None, m: Mask, line: int
) -> None:
    what = "bulk store" if op is None else f"bulk reduce .{op}"
    for i in issuers(W, m, line, what, dst, src):
        to, n = lane(dst, i), lane(size, i)
        cta, o = shared_location(W, lane(src, i))
        _check_bulk(W, o, to, n, line)
        if o + n > cta.size:
            raise Fault(f"{what}: {n} bytes at {o:#x} end beyond shared memory: {who(W, line)}")
        W.machine.memory.check(to, to + n, what, W, line)
        W.machine.count_bytes("bulk_store", to, n)

        def write(data: Array, to: int = to, n: int = n) -> None:
            target = hostmem.byte_range(to, n)
            if op is None or ty is None:
                target[:] = data
                return
            unit = UINT[{"8": 1, "6": 2, "2": 4, "4": 8}[ty[-1]]]
            target.view(unit)[:] = reduce_arrays(op, ty, target.view(unit), data.view(unit))

        def read(cta: CTA = cta, o: int = o, n: int = n) -> Array:
            return cta.bytes[o : o + n].copy()

        start_store(W, i, cta, slice(o, o + n), what, line, read, write)


def copy_async(
    W: Warp, dst: Value, src: Value, n: int, source_size: Value | None, m: Mask, line: int
) -> None:
    """Each lane copies `source_size` (default n) bytes and zero-fills to n."""
    active = np.array(list(lanes(m)))
    to, start = spread(dst)[active], spread(src)[active]
    sizes = np.full(len(active), n) if source_size is None else spread(source_size)[active].astype(np.int64)
    if (sizes > n).any():
        raise Fault(f"cp.async: source size exceeds {n}: {who(W, line)}")
    cta, _ = shared_location(W, int(to[0]))
    if cta is not W.cta:
        raise Fault(f"cp.async into another CTA: {who(W, line)}")
    offsets = (to & np.uint64(OFFSET_MASK)).astype(np.int64)
    if (offsets % n).any() or (start[sizes > 0] % np.uint64(n)).any():
        raise Fault(f"cp.async: addresses must be multiples of {n}: {who(W, line)}")
    if int(offsets.max()) + n > cta.size:
        raise Fault(f"cp.async: {int(offsets.max()):#x} is beyond shared memory: {who(W, line)}")
    for a, size in zip(start, sizes, strict=True):
        if size:
            W.machine.memory.check(int(a), int(a) + int(size), "cp.async", W, line)
    stream = W.stream("cp.async", "copy")
    epoch = stream.note(line)
    if cta.shadow:
        cta.shadow.write(W.current(), 0, offsets, n, stream.actor, epoch, line, f"cp.async by {W.name}")

    def land() -> None:
        for a, o, size in zip(start, offsets, sizes, strict=True):
            cta.bytes[o : o + size] = hostmem.byte_range(int(a), int(size))
            cta.bytes[o + size : o + n] = 0

    op = W.machine.engine.issue(land, line, stream.pipe)
    stream.ops.append((epoch, op))
    if not op.done:
        for o in offsets:
            cta.bytes[o : o + n] = SHARED_POISON


def copy_commit(W: Warp, m: Mask, line: int) -> None:
    W.stream("cp.async", "copy").epoch += 1


def finish_stream(W: Warp, stream: Stream, epoch: int) -> None:
    """Force the operations of groups up to `epoch` and know them complete."""
    while stream.ops and stream.ops[0][0] <= epoch:
        W.machine.engine.force(stream.ops.popleft()[1])
    stream.complete(W.clock, epoch)


def copy_wait(W: Warp, n: int, next_block: int, line: int) -> int:
    stream = W.stream("cp.async", "copy")
    finish_stream(W, stream, stream.epoch - 1 - n)
    return next_block


def copy_mbarrier_arrive(W: Warp, a: Value, noinc: bool, m: Mask, line: int) -> None:
    """An arrival that is triggered when this warp's earlier cp.async operations are complete."""
    stream = W.stream("cp.async", "copy")
    epoch = stream.epoch
    stream.epoch += 1
    n = count_lanes(m)
    barrier = find_mbarrier(W, lane(a, next(iter(lanes(m)))), line)
    if not noinc:
        barrier.pending += n

    def arrive() -> None:
        stream.complete(barrier.gather, epoch)
        barrier.arrive(W.machine, n, who(W, line))

    stream.ops.append((epoch, W.machine.engine.issue(arrive, line, stream.pipe)))


def store_async(W: Warp, a: Value, nb: int, values: list[Value], barrier: Value, m: Mask, line: int) -> None:
    for i in lanes(m):
        address = lane(a, i)
        data = b"".join((lane(v, i) & ((1 << 8 * nb) - 1)).to_bytes(nb, "little") for v in values)
        target = targets_of(W, address, lane(barrier, i), None, False)
        source = np.frombuffer(data, np.uint8)
        _copy_in(W, target, lambda source=source: source, len(data), line, "st.async")


def reduce_async(
    W: Warp, op: str, ty: str, a: Value, value: Value, barrier: Value, m: Mask, line: int
) -> None:
    """red.async: each lane's update happens by itself, in any order."""
    nb = WIDTH[ty] // 8
    for i in lanes(m):
        cta, o = shared_location(W, lane(a, i))
        if o % nb or o + nb > cta.size:
            raise Fault(f"misplaced red.async of {nb} bytes at {o:#x}: {who(W, line)}")
        target = find_mbarrier(W, lane(barrier, i), line, asynchronous=True)
        if target.cta is not cta:
            raise Fault(f"red.async: the mbarrier is not in the CTA of the destination: {who(W, line)}")
        phase, site = target.phase, f"red.async by {who(W, line)}"
        epoch = target.note(site)
        if cta.shadow:
            cta.shadow.atomically(
                W.current(), slice(o, o + nb), target.actor, epoch, line, f"red.async by {W.name}"
            )
        operand = lane(value, i) & ((1 << 8 * nb) - 1)

        def land(
            cta: CTA = cta, at: int = o // nb, operand: int = operand, target=target, phase=phase, site=site
        ) -> None:
            view = cta.views[nb]
            view[at] = combine(op, ty, int(view[at]), operand)
            target.complete(W.machine, nb, phase, site)

        W.machine.engine.issue(land, line, None, "tma", load_ticks(nb))


def try_cancel(W: Warp, a: Value, barrier: Value, multicast: bool, m: Mask, line: int) -> None:
    """Take over a cluster that has not started; the 16-byte answer lands like a bulk copy."""
    machine = W.machine
    i = issuers(W, m, line, "try_cancel", a, barrier)[0]
    index = machine.take_cluster()
    if index is None:
        answer = bytes(16)
    else:
        cx, cy, cz = machine.cluster_shape
        answer = struct.pack("<4I", 1, index[0] * cx, index[1] * cy, index[2] * cz)
    mask = (1 << len(W.cluster.ctas)) - 1 if multicast else None
    targets = targets_of(W, lane(a, i), lane(barrier, i), mask, False)
    data = np.frombuffer(answer, np.uint8)
    _copy_in(W, targets, lambda: data, 16, line, "try_cancel")

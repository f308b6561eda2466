"""Bulk copies: TMA tensor loads, stores and reductions, 1-D bulk copies, cp.async, st.async, try_cancel."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from ..errors import Fault
from . import hostmem
from .barriers import MBarrier, find_mbarrier
from .engine import Op
from .integers import signed
from .memory import combine, shared_location, who
from .state import CTA, OFFSET_MASK, RANK_SHIFT, SHARED_POISON, BulkGroup, Wait, Yield
from .tensormap import SWIZZLE_SPAN, TensorMap, tensor_map_at
from .values import Array, Mask, Value, count_lanes, lane, lanes, mask_bits, spread

if TYPE_CHECKING:
    from .state import Stream, Warp

_UINT = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}
_FLOAT = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64}


def swizzle(offset: Any, mode: int) -> Any:
    """XOR 16-byte chunk address bits with the row bits above them; `offset` is the absolute shared offset."""
    if mode == 0:
        return offset
    return offset ^ (offset >> 3 & {1: 0x10, 2: 0x30, 3: 0x70}[mode])


# ------------------------------------------------------------------ who issues
def _issuers(W: Warp, m: Mask, line: int, what: str, *operands: Value, once: bool = False) -> list[int]:
    """Lanes that issue the copy. Several lanes with the same operands are a missing election.

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
        if len(seen) != len(active):
            raise Fault(
                f"un-elected {what}: {len(active)} lanes ({mask_bits(m):#x}) issue it, {len(seen)} distinct; "
                f"elect one lane: {who(W, line)}"
            )
    return active


def _targets(W: Warp, address: int, barrier: int, mask: int | None, pair: bool) -> list[tuple[CTA, int, int]]:
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


class _Landing:
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


# ------------------------------------------------------------------ TMA tensors
def _clip(
    t: TensorMap, coordinates: list[int]
) -> tuple[int, tuple[int, ...], tuple[int, ...], tuple[slice, ...]] | None:
    """In-bounds part of a box: address, shape, strides (outer…inner), and where it lies in the box; None if empty."""
    strides = [t.element, *t.strides]
    inside, shape, offset = [], [], 0
    for c, size, box, stride in zip(coordinates, t.sizes, t.box, strides, strict=True):
        low, high = max(c, 0), min(c + box, size)
        if high <= low:
            return None
        inside.append(slice(low - c, high - c))
        shape.append(high - low)
        offset += low * stride
    # Addresses are 64 bits wide: strides may lead round.
    return (t.address + offset) % (1 << 64), tuple(shape[::-1]), tuple(strides[::-1]), tuple(inside[::-1])


def _check_span(W: Warp, t: TensorMap, clipped: tuple, what: str, line: int) -> None:
    address, shape, strides, _ = clipped
    end = address + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + t.element
    W.machine.memory.check(address, end, what, W, line)


def _coordinates(
    W: Warp, t: TensorMap, coordinates: list[Value], i: int, line: int, what: str, gather: bool
) -> list[int]:
    values = [signed(lane(c, i), 32) for c in coordinates]
    inner = values[0]
    if t.nibbles:
        inner //= 2
        values[0] = inner
    if inner * t.element % 16:
        raise Fault(
            f"{what}: innermost coordinate {values[0]} is not a multiple of 16 bytes (illegal instruction on hardware): "
            f"{who(W, line)}"
        )
    if len(values) != (5 if gather else t.rank):
        raise Fault(f"{what}: {len(values)} coordinates for a tensor map of rank {t.rank}: {who(W, line)}")
    return values


def _chunks(t: TensorMap, offset: int, rows: int) -> Array:
    """Swizzled byte offsets of the 16-byte chunks of `rows` rows, in box order."""
    return _box_chunks(t.pitch, t.inner_bytes, t.swizzle, offset, rows)


@lru_cache(maxsize=1024)
def _box_chunks(pitch: int, inner_bytes: int, mode: int, offset: int, rows: int) -> Array:
    row = np.arange(rows, dtype=np.int64)[:, None] * pitch
    column = np.arange(-(-inner_bytes // 16), dtype=np.int64) * 16
    return swizzle((offset + row + column).reshape(-1), mode)


def _is_whole(t: TensorMap, offset: int, rows: int) -> bool:
    """The chunks fill one contiguous range (swizzling only permutes inside it)."""
    return t.pitch == t.inner_bytes and (t.swizzle == 0 or (offset % (8 * t.pitch) == 0 and rows % 8 == 0))


def _region(t: TensorMap, rows: int) -> Any:
    def index(cta: CTA, offset: int) -> Any:
        if offset % 128:
            raise Fault(f"TMA: shared address {offset:#x} is not 128-byte aligned")
        if offset + rows * t.pitch > cta.size:
            raise Fault(
                f"TMA: box of {rows * t.pitch} bytes at {offset:#x} ends beyond shared memory of {cta.name}"
            )
        if _is_whole(t, offset, rows) or t.inner_bytes % 16:
            return slice(offset, offset + rows * t.inner_bytes)
        return _chunks(t, offset, rows)

    return index


def _read_box(t: TensorMap, clipped: tuple | None) -> Array:
    """Bytes of the box, [rows, inner_bytes], out-of-bounds elements filled."""
    if clipped is not None and clipped[1] == tuple(t.box[::-1]) and not t.tf32:
        address, shape, strides, _ = clipped
        box = hostmem.strided(address, shape, strides, _UINT[t.element])
        return np.ascontiguousarray(box).view(np.uint8).reshape(-1, t.inner_bytes)
    box = np.full(t.box[::-1], t.fill(), dtype=_UINT[t.element])
    if clipped is not None:
        address, shape, strides, inside = clipped
        data = hostmem.strided(address, shape, strides, _UINT[t.element])
        box[inside] = _to_tf32(data) if t.tf32 else data
    return np.ascontiguousarray(box).view(np.uint8).reshape(-1, t.inner_bytes)


def _to_tf32(bits: Array) -> Array:
    """tf32 maps round on load: nearest, ties away; NaN becomes 0x7fffe000."""
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    special = (bits & np.uint32(0x7F800000)) == np.uint32(0x7F800000)
    nan = special & ((bits & np.uint32(0x7FFFFF)) != 0)
    return np.where(nan, np.uint32(0x7FFFE000), np.where(special, bits, rounded))


def tma_load(
    W: Warp,
    dst: Value,
    tensor_map: Value,
    coordinates: list[Value],
    rank: int,
    gather: bool,
    barrier: Value,
    mask: Value | None,
    pair: bool,
    m: Mask,
    line: int,
) -> None:
    for i in _issuers(W, m, line, "TMA load", dst, tensor_map, *coordinates):
        t = tensor_map_at(W, lane(tensor_map, i), line)
        at = _coordinates(W, t, coordinates, i, line, "TMA load", gather)
        targets = _targets(W, lane(dst, i), lane(barrier, i), None if mask is None else lane(mask, i), pair)
        _start_load(W, t, at, gather, targets, line)


def _load_ticks(size: int) -> int:
    """For timelines: about the latency and rate of a copy into shared memory, in clocks."""
    return 600 + size // 64


def _start_load(
    W: Warp, t: TensorMap, at: list[int], gather: bool, targets: list[tuple[CTA, int, int]], line: int
) -> None:
    boxes = [[at[0], row] for row in at[1:]] if gather else [at]
    if gather and (t.rank != 2 or t.box[1] != 1):
        raise Fault(f"gather4 needs a rank-2 map with a box of one row: {who(W, line)}")
    rows = t.rows * len(boxes)
    parts = [_clip(t, box) for box in boxes]
    for part in parts:
        if part is not None:
            _check_span(W, t, part, "TMA load", line)
    landing = _Landing(W, targets, _region(t, rows), t.inner_bytes * rows, line, "TMA load")
    machine = W.machine
    machine.count("tma_load", 1)
    machine.count_bytes("tma_load", t.address, t.inner_bytes * rows * len(targets))

    def land() -> None:
        data = np.concatenate([_read_box(t, part) for part in parts]) if gather else _read_box(t, parts[0])
        for cta, offset, _ in targets:
            _store_rows(t, cta, offset, data)
        landing.arrived()

    op = machine.engine.issue(land, line, None, "tma", _load_ticks(t.inner_bytes * rows))
    if not op.done:
        for cta, offset, _ in targets:
            _store_rows(t, cta, offset, np.full((rows, t.inner_bytes), SHARED_POISON, np.uint8))


def _store_rows(t: TensorMap, cta: CTA, offset: int, data: Array) -> None:
    if t.inner_bytes % 16:
        cta.bytes[offset : offset + data.size] = data.reshape(-1)
    else:
        cta.chunks[_chunks(t, offset, len(data)) >> 4] = data.reshape(-1, 16)


def tma_store(
    W: Warp,
    tensor_map: Value,
    coordinates: list[Value],
    rank: int,
    scatter: bool,
    src: Value,
    op: str | None,
    m: Mask,
    line: int,
) -> None:
    """Store (or reduce, with `op`) a box; the shared memory is read and the global memory written at separate times."""
    what = "TMA store" if op is None else f"TMA reduce .{op}"
    for i in _issuers(W, m, line, what, tensor_map, src, *coordinates, once=op is None):
        t = tensor_map_at(W, lane(tensor_map, i), line)
        at = _coordinates(W, t, coordinates, i, line, what, scatter)
        if op is not None and t.ftz:
            raise Fault(f"{what} on an f32 tensor map with flush-to-zero is not modelled: {who(W, line)}")
        if t.rank == 1 and op is None and t.sizes[0] * t.element % 16 and at[0] + t.box[0] > t.sizes[0]:
            raise Fault(
                f"{what}: a tensor of {t.sizes[0] * t.element} bytes is no multiple of 16, and the hardware writes the rest "
                f"of its last 16 bytes too: {who(W, line)}"
            )
        if min(at) < 0:
            raise Fault(f"{what}: negative coordinate {at} (illegal instruction on hardware): {who(W, line)}")
        boxes = [[at[0], row] for row in at[1:]] if scatter else [at]
        rows = t.rows * len(boxes)
        for box in boxes:
            clipped = _clip(t, box)
            if clipped is not None:
                _check_span(W, t, clipped, what, line)
        cta, offset = shared_location(W, lane(src, i))
        index = _region(t, rows)(cta, offset)
        W.machine.count("tma_store", 1)
        W.machine.count_bytes("tma_store", t.address, t.inner_bytes * rows)
        _start_store(
            W, i, cta, index, what, line, _tensor_reader(t, cta, offset, rows), _tensor_writer(t, boxes, op)
        )


def _tensor_reader(t: TensorMap, cta: CTA, offset: int, rows: int) -> Any:
    def read() -> Array:
        if t.inner_bytes % 16:
            return cta.bytes[offset : offset + rows * t.inner_bytes].copy()
        return cta.chunks[_chunks(t, offset, rows) >> 4].reshape(-1)

    return read


def _tensor_writer(t: TensorMap, boxes: list[list[int]], op: str | None) -> Any:
    def write(data: Array) -> None:
        for box, part in zip(boxes, np.split(data, len(boxes)), strict=True):
            clipped = _clip(t, box)
            if clipped is None:
                continue
            address, shape, strides, inside = clipped
            target = hostmem.strided(address, shape, strides, _UINT[t.element])
            values = part.view(_UINT[t.element]).reshape(t.box[::-1])[inside]
            target[...] = values if op is None else reduce_arrays(op, t.type, target, values)

    return write


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


def _start_store(W: Warp, i: int, cta: CTA, index: Any, what: str, line: int, read: Any, write: Any) -> None:
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


# ------------------------------------------------------------------ 1-D bulk copies
def _check_bulk(W: Warp, shared_offset: int, other: int, size: int, line: int) -> None:
    if size % 16 or shared_offset % 16 or other % 16:
        raise Fault(f"bulk copy: size {size} and both addresses must be multiples of 16: {who(W, line)}")


def bulk_load(
    W: Warp, dst: Value, src: Value, size: Value, barrier: Value, mask: Value | None, m: Mask, line: int
) -> None:
    for i in _issuers(W, m, line, "bulk load", dst, src):
        start, n = lane(src, i), lane(size, i)
        targets = _targets(W, lane(dst, i), lane(barrier, i), None if mask is None else lane(mask, i), False)
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
    landing = _Landing(W, targets, lambda cta, o: slice(o, o + n), n, line, what)

    def land() -> None:
        data = source().copy()
        for cta, o, _ in targets:
            cta.bytes[o : o + n] = data
        landing.arrived()

    op = W.machine.engine.issue(land, line, None, "tma", _load_ticks(n))
    if not op.done:
        for cta, o, _ in targets:
            cta.bytes[o : o + n] = SHARED_POISON


def bulk_shared(W: Warp, dst: Value, src: Value, size: Value, barrier: Value, m: Mask, line: int) -> None:
    """Shared memory of this CTA → shared memory of another CTA of the cluster."""
    for i in _issuers(W, m, line, "bulk copy between CTAs", dst, src):
        cta, o = shared_location(W, lane(src, i))
        n = lane(size, i)
        targets = _targets(W, lane(dst, i), lane(barrier, i), None, False)
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
    for i in _issuers(W, m, line, what, dst, src):
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
            unit = _UINT[{"8": 1, "6": 2, "2": 4, "4": 8}[ty[-1]]]
            target.view(unit)[:] = reduce_arrays(op, ty, target.view(unit), data.view(unit))

        def read(cta: CTA = cta, o: int = o, n: int = n) -> Array:
            return cta.bytes[o : o + n].copy()

        _start_store(W, i, cta, slice(o, o + n), what, line, read, write)


# ------------------------------------------------------------------ cp.async, st.async
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
        target = _targets(W, address, lane(barrier, i), None, False)
        source = np.frombuffer(data, np.uint8)
        _copy_in(W, target, lambda source=source: source, len(data), line, "st.async")


# ------------------------------------------------------------------ cluster launch control
def try_cancel(W: Warp, a: Value, barrier: Value, multicast: bool, m: Mask, line: int) -> None:
    """Take over a cluster that has not started; the 16-byte answer lands like a bulk copy."""
    machine = W.machine
    i = _issuers(W, m, line, "try_cancel", a, barrier)[0]
    index = machine.take_cluster()
    if index is None:
        answer = bytes(16)
    else:
        cx, cy, cz = machine.cluster_shape
        answer = struct.pack("<4I", 1, index[0] * cx, index[1] * cy, index[2] * cz)
    mask = (1 << len(W.cluster.ctas)) - 1 if multicast else None
    targets = _targets(W, lane(a, i), lane(barrier, i), mask, False)
    data = np.frombuffer(answer, np.uint8)
    _copy_in(W, targets, lambda: data, 16, line, "try_cancel")


__all__ = ["SWIZZLE_SPAN", "Op", "Wait", "Yield"]

"""TMA: tensor loads, stores and reductions through tensor maps."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import Fault
from . import hostmem
from .copies import UINT, Landing, issuers, load_ticks, reduce_arrays, start_store, targets_of
from .floats import flush
from .integers import signed
from .memory import shared_location, who
from .state import CTA, SHARED_POISON
from .tensormap import TensorMap, tensor_map_at
from .values import Array, Mask, Value, lane

if TYPE_CHECKING:
    from .state import Warp


def swizzle(offset: Any, mode: int) -> Any:
    """XOR 16-byte chunk address bits with the row bits above them; `offset` is the absolute shared offset."""
    if mode == 0:
        return offset
    return offset ^ (offset >> 3 & {1: 0x10, 2: 0x30, 3: 0x70}[mode])


class Part(NamedTuple):
    """The in-bounds part of a box; tuples run from the outermost dimension to the innermost."""

    address: int
    end: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    inside: tuple[slice, ...]  # where it lies in the box


@lru_cache(maxsize=4096)
def _clip(t: TensorMap, coordinates: tuple[int, ...], inner: int | None = None) -> Part | None:
    """None if nothing is in bounds. `inner`: the innermost extent, if not the tensor's."""
    strides, sizes = [t.element, *t.strides], [inner or t.sizes[0], *t.sizes[1:]]
    inside, shape, offset = [], [], 0
    for c, size, box, stride in zip(coordinates, sizes, t.box, strides, strict=True):
        low, high = max(c, 0), min(c + box, size)
        if high <= low:
            return None
        inside.append(slice(low - c, high - c))
        shape.append(high - low)
        offset += low * stride
    address = (t.address + offset) % (1 << 64)  # addresses are 64 bits wide: strides may lead round
    end = address + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + t.element
    return Part(address, end, tuple(shape[::-1]), tuple(strides[::-1]), tuple(inside[::-1]))


def _coordinates(
    W: Warp, t: TensorMap, coordinates: list[Value], i: int, line: int, what: str, gather: bool
) -> tuple[int, ...]:
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
    return tuple(values)


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


def _read_box(t: TensorMap, clipped: Part | None) -> Array:
    """Bytes of the box, [rows, inner_bytes], out-of-bounds elements filled."""
    if clipped is not None and clipped.shape == tuple(t.box[::-1]) and not t.tf32:
        box = hostmem.strided(clipped.address, clipped.shape, clipped.strides, UINT[t.element])
        return np.ascontiguousarray(box).view(np.uint8).reshape(-1, t.inner_bytes)
    box = np.full(t.box[::-1], t.fill(), dtype=UINT[t.element])
    if clipped is not None:
        data = hostmem.strided(clipped.address, clipped.shape, clipped.strides, UINT[t.element])
        box[clipped.inside] = _to_tf32(data) if t.tf32 else data
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
    for i in issuers(W, m, line, "TMA load", dst, tensor_map, *coordinates):
        t = tensor_map_at(W, lane(tensor_map, i), line)
        at = _coordinates(W, t, coordinates, i, line, "TMA load", gather)
        targets = targets_of(W, lane(dst, i), lane(barrier, i), None if mask is None else lane(mask, i), pair)
        _start_load(W, t, at, gather, targets, line)


def _start_load(
    W: Warp, t: TensorMap, at: tuple[int, ...], gather: bool, targets: list[tuple[CTA, int, int]], line: int
) -> None:
    boxes = [(at[0], row) for row in at[1:]] if gather else [at]
    if gather and (t.rank != 2 or t.box[1] != 1):
        raise Fault(f"gather4 needs a rank-2 map with a box of one row: {who(W, line)}")
    rows = t.rows * len(boxes)
    parts = [_clip(t, box) for box in boxes]
    for part in parts:
        if part is not None:
            W.machine.memory.check_box(part, t.element, "TMA load", W, line)
    landing = Landing(W, targets, _region(t, rows), t.inner_bytes * rows, line, "TMA load")
    machine = W.machine
    machine.count("tma_load", 1)
    machine.count_bytes("tma_load", t.address, t.inner_bytes * rows * len(targets))

    def land() -> None:
        data = np.concatenate([_read_box(t, part) for part in parts]) if gather else _read_box(t, parts[0])
        for cta, offset, _ in targets:
            _store_rows(t, cta, offset, data)
        landing.arrived()

    op = machine.engine.issue(land, line, None, "tma", load_ticks(t.inner_bytes * rows))
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
    for i in issuers(W, m, line, what, tensor_map, src, *coordinates, once=op is None):
        t = tensor_map_at(W, lane(tensor_map, i), line)
        at = _coordinates(W, t, coordinates, i, line, what, scatter)
        inner = None
        if t.sizes[0] * t.element % 16 and at[0] + t.box[0] > t.sizes[0]:
            if W.machine.checks:
                raise Fault(
                    f"{what}: an innermost extent of {t.sizes[0] * t.element} bytes is no multiple of 16, and the hardware "
                    f"writes the rest of the last 16 bytes too: {who(W, line)}"
                )
            inner = -(-t.sizes[0] * t.element // 16) * 16 // t.element
        if min(at) < 0:
            raise Fault(f"{what}: negative coordinate {at} (illegal instruction on hardware): {who(W, line)}")
        boxes: list[tuple[int, ...]] = [(at[0], row) for row in at[1:]] if scatter else [at]
        rows = t.rows * len(boxes)
        for box in boxes:
            clipped = _clip(t, box)
            if clipped is not None:
                W.machine.memory.check_box(clipped, t.element, what, W, line)
        cta, offset = shared_location(W, lane(src, i))
        index = _region(t, rows)(cta, offset)
        W.machine.count("tma_store", 1)
        W.machine.count_bytes("tma_store", t.address, t.inner_bytes * rows)
        start_store(
            W,
            i,
            cta,
            index,
            what,
            line,
            _tensor_reader(t, cta, offset, rows),
            _tensor_writer(t, boxes, op, inner),
        )


def _tensor_reader(t: TensorMap, cta: CTA, offset: int, rows: int) -> Any:
    def read() -> Array:
        if t.inner_bytes % 16:
            return cta.bytes[offset : offset + rows * t.inner_bytes].copy()
        return cta.chunks[_chunks(t, offset, rows) >> 4].reshape(-1)

    return read


def _flush(bits: Array) -> Array:
    """f32 words with subnormals replaced by zeros of their sign."""
    return flush(np.ascontiguousarray(bits).view(np.float32), "f32").view(np.uint32)


def _tensor_writer(t: TensorMap, boxes: list[tuple[int, ...]], op: str | None, inner: int | None) -> Any:
    def write(data: Array) -> None:
        for box, part in zip(boxes, np.split(data, len(boxes)), strict=True):
            clipped = _clip(t, box, inner)
            if clipped is None:
                continue
            target = hostmem.strided(clipped.address, clipped.shape, clipped.strides, UINT[t.element])
            values = part.view(UINT[t.element]).reshape(t.box[::-1])[clipped.inside]
            if op is not None and t.ftz:
                values = _flush(reduce_arrays(op, t.type, _flush(target), _flush(values)))
            elif op is not None:
                values = reduce_arrays(op, t.type, target, values)
            target[...] = values

    return write

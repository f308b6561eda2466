"""Loads and stores in every address space, matrix moves, atomics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import Fault, Race
from ..parser import WIDTH
from . import floats, integers
from .hostmem import MEMORY, element
from .state import CTA, OFFSET_MASK, RANK_SHIFT
from .values import LANE_INDEX, M32, U64, Array, Mask, Value, count_true, lanes, spread

if TYPE_CHECKING:
    from .state import Warp

SHARED_WINDOW = 0x7E00_0000_0000_0000
"""Generic addresses of shared memory start here."""
LOCAL_WINDOW = 0x7D00_0000_0000_0000
_SHARED_TAG, _LOCAL_TAG = SHARED_WINDOW >> 56, LOCAL_WINDOW >> 56


def who(W: Warp, line: int) -> str:
    return f"{W.name}, {W.machine.describe_line(line)}"


def shared_location(W: Warp, address: int) -> tuple[CTA, int]:
    """CTA and offset of a shared (::cta or ::cluster) address."""
    rank = address >> RANK_SHIFT
    if rank == W.cta.rank:
        return W.cta, address & OFFSET_MASK
    ctas = W.cluster.ctas
    if rank >= len(ctas):
        raise Fault(f"shared address {address:#x}: no CTA of rank {rank} in the cluster ({W.name})")
    if ctas[rank].finished:
        raise Fault(f"shared address {address:#x} of {ctas[rank].name}, which has exited ({W.name})")
    return ctas[rank], address & OFFSET_MASK


def _check_shared(cta: CTA, offset: int, size: int, W: Warp, line: int, what: str) -> None:
    if offset % size:
        raise Fault(f"misaligned shared {what} of {size} bytes at {offset:#x}: {who(W, line)}")
    if offset + size > cta.size:
        raise Fault(
            f"shared {what} at {offset:#x} is beyond the {cta.size} bytes of {cta.name}: {who(W, line)}"
        )


def _by_cta(W: Warp, a: Array) -> list[tuple[CTA, Any, Array]]:
    """Lane-varying shared addresses grouped by CTA: (CTA, lane positions, offsets)."""
    low, high = int(np.minimum.reduce(a)), int(np.maximum.reduce(a))
    if low >> RANK_SHIFT == high >> RANK_SHIFT:
        return [(shared_location(W, low)[0], slice(None), (a & U64(OFFSET_MASK)).astype(np.int64))]
    ranks = a >> U64(RANK_SHIFT)
    offsets = (a & U64(OFFSET_MASK)).astype(np.int64)
    out: list[tuple[CTA, Any, Array]] = []
    for r in np.unique(ranks):
        at = np.flatnonzero(ranks == r)
        out.append((shared_location(W, int(a[at[0]]))[0], at, offsets[at]))
    return out


def _check_shared_lanes(cta: CTA, offsets: Array, size: int, W: Warp, line: int, what: str) -> None:
    if size > 1 and count_true(offsets & (size - 1)):
        bad = int(offsets[np.argmax(offsets % size != 0)])
        raise Fault(f"misaligned shared {what} of {size} bytes at {bad:#x}: {who(W, line)}")
    top = int(np.maximum.reduce(offsets))
    if top + size > cta.size:
        raise Fault(f"shared {what} at {top:#x} is beyond the {cta.size} bytes of {cta.name}: {who(W, line)}")


def load_shared(W: Warp, a: Value, nb: int, n: int, m: Mask, line: int) -> list[Value]:
    size = nb * n
    if type(a) is not Array:
        cta, o = shared_location(W, a)
        _check_shared(cta, o, size, W, line, "load")
        if cta.shadow:
            cta.shadow.read(W.current(), 0, slice(o, o + size), size, W.actor, W.touch(line), line, W.name)
        view, i = cta.views[nb], o // nb
        return [int(view[i + k]) for k in range(n)]
    active = a if m is None else a[m]
    parts = []
    for cta, at, offsets in _by_cta(W, active):
        _check_shared_lanes(cta, offsets, size, W, line, "load")
        if cta.shadow:
            cta.shadow.read(W.current(), 0, offsets, size, W.actor, W.touch(line), line, W.name)
        if W.machine.trace:
            W.machine.trace.shared_access(W, offsets, size, line)
        base = offsets // nb
        parts.append((at, [cta.views[nb][base + k].astype(np.uint64) for k in range(n)]))
    return _gather(parts, len(active), n, m)


def _gather(parts: list[tuple[Any, list[Array]]], count: int, n: int, m: Mask) -> list[Array]:
    if len(parts) == 1:
        values = parts[0][1]
    else:
        values = [np.zeros(count, np.uint64) for _ in range(n)]
        for at, part in parts:
            for v, p in zip(values, part, strict=True):
                v[at] = p
    return values if m is None else [_expand(v, m) for v in values]


def _expand(v: Array, m: Array) -> Array:
    out = np.zeros(32, np.uint64)
    out[m] = v
    return out


def _same_place(W: Warp, what: str, line: int) -> None:
    raise Race(f"race between lanes: one {what} writes different values to the same place; {who(W, line)}")


def _uniform(v: Array, m: Mask, ones: int, W: Warp, what: str, line: int) -> int:
    """What is stored where every lane writes to one address: they must agree."""
    active = (v if m is None else v[m]) & U64(ones)
    if W.machine.checks and count_true(active != active[0]):
        _same_place(W, what, line)
    return int(active[-1])


def store_shared(W: Warp, a: Value, nb: int, values: list[Value], m: Mask, line: int) -> None:
    n = len(values)
    size, ones = nb * n, (1 << 8 * nb) - 1
    if type(a) is not Array:
        cta, o = shared_location(W, a)
        _check_shared(cta, o, size, W, line, "store")
        if cta.shadow:
            cta.shadow.write(W.current(), 0, slice(o, o + size), size, W.actor, W.touch(line), line, W.name)
        view, i = cta.views[nb], o // nb
        for k, v in enumerate(values):
            view[i + k] = _uniform(v, m, ones, W, "shared store", line) if type(v) is Array else v & ones
        return
    active = a if m is None else a[m]
    if not len(active):
        return
    lanes_of = [spread(v) if m is None else spread(v)[m] for v in values]
    for cta, at, offsets in _by_cta(W, active):
        _check_shared_lanes(cta, offsets, size, W, line, "store")
        if cta.shadow:
            cta.shadow.write(W.current(), 0, offsets, size, W.actor, W.touch(line), line, W.name)
        if W.machine.trace:
            W.machine.trace.shared_access(W, offsets, size, line)
        if size == 16:
            words = np.empty((len(offsets), n), f"<u{nb}")
            for k, v in enumerate(lanes_of):
                words[:, k] = v[at]
            rows, data = offsets >> 4, words.view(np.uint8)
            cta.chunks[rows] = data
            if W.machine.checks and count_true(cta.chunks.take(rows, axis=0) != data):
                _same_place(W, "shared store", line)
            continue
        base, view = offsets // nb, cta.views[nb]
        for k, v in enumerate(lanes_of):
            word = v[at].astype(view.dtype)
            view[base + k] = word
            if W.machine.checks and count_true(view.take(base + k) != word):
                _same_place(W, "shared store", line)


def load_global(W: Warp, a: Value, nb: int, n: int, m: Mask, line: int) -> list[Value]:
    size = nb * n
    memory = W.machine.memory
    if type(a) is not Array:
        if a % size:
            raise Fault(f"misaligned global load of {size} bytes at {a:#x}: {who(W, line)}")
        memory.check(a, a + size, "load", W, line)
        i, words = element(a, nb), MEMORY[nb]
        return [int(words[i + k]) for k in range(n)]
    active = a if m is None else a[m]
    if count_true(active & U64(size - 1)):
        raise Fault(f"misaligned global load of {size} bytes: {who(W, line)}")
    memory.check_lanes(active, size, "load", W, line)
    i, words = element(active, nb).astype(np.int64), MEMORY[nb]
    values = [words[i + k].astype(np.uint64) for k in range(n)]
    return values if m is None else [_expand(v, m) for v in values]


load_const = load_global


def store_global(W: Warp, a: Value, nb: int, values: list[Value], m: Mask, line: int) -> None:
    size, ones = nb * len(values), (1 << 8 * nb) - 1
    memory, words = W.machine.memory, MEMORY[nb]
    if type(a) is not Array:
        if a % size:
            raise Fault(f"misaligned global store of {size} bytes at {a:#x}: {who(W, line)}")
        memory.check(a, a + size, "store", W, line)
        i = element(a, nb)
        for k, v in enumerate(values):
            words[i + k] = _uniform(v, m, ones, W, "global store", line) if type(v) is Array else v & ones
        return
    active = a if m is None else a[m]
    if not len(active):
        return
    if count_true(active & U64(size - 1)):
        raise Fault(f"misaligned global store of {size} bytes: {who(W, line)}")
    memory.check_lanes(active, size, "store", W, line)
    i = element(active, nb).astype(np.int64)
    for k, v in enumerate(values):
        v = spread(v)
        word = (v if m is None else v[m]) & U64(ones)
        words[i + k] = word
        if W.machine.checks and count_true(words[i + k] != word):
            _same_place(W, "global store", line)


def load_param(W: Warp, a: Value, nb: int, n: int, m: Mask, line: int) -> list[Value]:
    if type(a) is Array:
        return load_global(W, a, nb, n, m, line)
    data, o = W.machine.param_bytes, a - W.param_base
    return [int.from_bytes(data[o + k * nb : o + (k + 1) * nb], "little") for k in range(n)]


def load_local(W: Warp, a: Value, nb: int, n: int, m: Mask, line: int) -> list[Value]:
    assert W.local is not None
    offsets = (spread(a) & U64(M32)).astype(np.int64)
    if int(offsets.max()) + nb * n > W.local.shape[1]:
        raise Fault(f"local load beyond {W.local.shape[1]} bytes: {who(W, line)}")
    columns = offsets[:, None] + np.arange(nb * n)
    raw = np.ascontiguousarray(W.local[LANE_INDEX[:, None], columns]).view(f"<u{nb}")
    return [raw[:, k].astype(np.uint64) for k in range(n)]


def store_local(W: Warp, a: Value, nb: int, values: list[Value], m: Mask, line: int) -> None:
    assert W.local is not None
    offsets = (spread(a) & U64(M32)).astype(np.int64)
    n = len(values)
    if int(offsets.max()) + nb * n > W.local.shape[1]:
        raise Fault(f"local store beyond {W.local.shape[1]} bytes: {who(W, line)}")
    raw = np.stack([spread(v).astype(f"<u{nb}") for v in values], 1).view(np.uint8)
    rows = LANE_INDEX if m is None else np.flatnonzero(m)
    W.local[rows[:, None], offsets[rows][:, None] + np.arange(nb * n)] = raw[rows]


def _window(a: Value, m: Mask) -> tuple[int, Value]:
    """Address-space tag of a generic address; lanes must agree."""
    if type(a) is not Array:
        return a >> 56, a
    active = a if m is None else a[m]
    tags = active >> U64(56)
    if not (tags == tags[0]).all():
        raise Fault("a generic access mixes address spaces in one warp, which is not modelled")
    return int(tags[0]), a


def load_generic(W: Warp, a: Value, nb: int, n: int, m: Mask, line: int) -> list[Value]:
    tag, a = _window(a, m)
    if tag == _SHARED_TAG:
        return load_shared(W, _offset(a, SHARED_WINDOW, m), nb, n, m, line)
    if tag == _LOCAL_TAG:
        return load_local(W, a, nb, n, m, line)
    return load_global(W, a, nb, n, m, line)


def store_generic(W: Warp, a: Value, nb: int, values: list[Value], m: Mask, line: int) -> None:
    tag, a = _window(a, m)
    if tag == _SHARED_TAG:
        store_shared(W, _offset(a, SHARED_WINDOW, m), nb, values, m, line)
    elif tag == _LOCAL_TAG:
        store_local(W, a, nb, values, m, line)
    else:
        store_global(W, a, nb, values, m, line)


def _offset(a: Value, window: int, m: Mask) -> Value:
    return a - (U64(window) if type(a) is Array else window)


def is_space(space: str, a: Value) -> Value:
    tag = a >> 56
    if space == "shared":
        return tag == _SHARED_TAG
    if space == "local":
        return tag == _LOCAL_TAG
    return tag < _LOCAL_TAG


def map_address(W: Warp, shared: bool, a: Value, rank: Value) -> Value:
    """mapa: the same offset in another CTA of the cluster. A rank that does not exist is a fault where it is used."""
    moved = (a & OFFSET_MASK) | ((rank & 0xFF) << RANK_SHIFT)
    return moved if shared else moved | SHARED_WINDOW


# ------------------------------------------------------------------ matrices of 8x8 16-bit elements
_ROW, _COLUMN = LANE_INDEX // 4, 2 * (LANE_INDEX % 4)


def _matrix_rows(W: Warp, a: Value, n: int, line: int) -> tuple[CTA, Array]:
    """CTA and byte offsets of the 8·n rows of 16 bytes that lanes 0…8n-1 point at."""
    addresses = spread(a)[: 8 * n]
    if int(addresses[0]) >> 56 == _SHARED_TAG:
        addresses = addresses - U64(SHARED_WINDOW)
    parts = _by_cta(W, addresses)
    if len(parts) != 1:
        raise Fault(f"a matrix move spans CTAs: {who(W, line)}")
    cta, _, offsets = parts[0]
    _check_shared_lanes(cta, offsets, 16, W, line, "matrix row")
    if W.machine.trace:
        for k in range(n):
            W.machine.trace.shared_access(W, offsets[8 * k : 8 * k + 8], 16, line)
    return cta, offsets


def load_matrix(W: Warp, a: Value, n: int, trans: bool, line: int) -> list[Value]:
    cta, offsets = _matrix_rows(W, a, n, line)
    if cta.shadow:
        cta.shadow.read(W.current(), 0, offsets, 16, W.actor, W.touch(line), line, W.name)
    tiles = cta.chunks[offsets // 16].view("<u2").reshape(n, 8, 8)
    if trans:
        tiles = tiles.transpose(0, 2, 1)
    low = tiles[:, _ROW, _COLUMN].astype(np.uint64)
    high = tiles[:, _ROW, _COLUMN + 1].astype(np.uint64)
    return list(low | high << U64(16))


def store_matrix(W: Warp, a: Value, values: list[Value], trans: bool, line: int) -> None:
    n = len(values)
    cta, offsets = _matrix_rows(W, a, n, line)
    if cta.shadow:
        cta.shadow.write(W.current(), 0, offsets, 16, W.actor, W.touch(line), line, W.name)
    tiles = np.zeros((n, 8, 8), np.uint16)
    for k, v in enumerate(values):
        tiles[k] = _fragment_to_tile(v)
    if trans:
        tiles = tiles.transpose(0, 2, 1)
    cta.chunks[offsets // 16] = np.ascontiguousarray(tiles).view(np.uint8).reshape(8 * n, 16)


def _fragment_to_tile(v: Value) -> Array:
    v = spread(v)
    tile = np.zeros((8, 8), np.uint16)
    tile[_ROW, _COLUMN] = (v & U64(0xFFFF)).astype(np.uint16)
    tile[_ROW, _COLUMN + 1] = (v >> U64(16) & U64(0xFFFF)).astype(np.uint16)
    return tile


def transpose_matrix(v: Value) -> Value:
    t = _fragment_to_tile(v).T
    return t[_ROW, _COLUMN].astype(np.uint64) | t[_ROW, _COLUMN + 1].astype(np.uint64) << U64(16)


# ------------------------------------------------------------------ atomics
_FLOATS = ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2")


def combine(op: str, ty: str, x: int, y: int, swap: int | None = None, flush: bool = False) -> int:
    """One read-modify-write step: the new value. `flush`: f32 additions in global memory flush subnormals."""
    width = WIDTH[ty]
    if op == "add":
        if ty in _FLOATS:
            return floats.arithmetic("add", ty, "rn", "z" if flush and ty == "f32" else "", x, y)
        return (x + y) & ((1 << width) - 1)
    if op == "exch":
        return y
    if op == "cas":
        return swap if x == y else x  # type: ignore[return-value]
    if op in ("min", "max"):
        if ty in _FLOATS:
            return floats.minmax(op, ty, "", x, y)
        return integers.minmax(op, x, y, width, ty[0] == "s")
    if op == "inc":
        return 0 if x >= y else x + 1
    if op == "dec":
        return y if x == 0 or x > y else x - 1
    return {"and": x & y, "or": x | y, "xor": x ^ y}[op]


def atomic(
    W: Warp, space: str, op: str, ty: str, a: Value, value: Value, swap: Value | None, m: Mask, line: int
) -> Value:
    """Lane by lane; returns the old values."""
    width = WIDTH[ty]
    nb, ones = width // 8, (1 << width) - 1
    addresses, values = spread(a), spread(value)
    swaps = spread(swap) if swap is not None else None
    old = np.zeros(32, np.uint64)
    for i in lanes(m):
        address = int(addresses[i])
        if space == "generic":
            shared = address >> 56 == _SHARED_TAG
            address = address - SHARED_WINDOW if shared else address
        else:
            shared = space == "shared"
        if shared:
            cta, o = shared_location(W, address)
            _check_shared(cta, o, nb, W, line, "atomic")
            if cta.shadow:
                cta.shadow.atomically(W.current(), slice(o, o + nb), W.actor, W.touch(line), line, W.name)
            view, at = cta.views[nb], o // nb
        else:
            if address % nb:
                raise Fault(f"misaligned atomic at {address:#x}: {who(W, line)}")
            W.machine.memory.check(address, address + nb, "atomic", W, line)
            view, at = MEMORY[nb], element(address, nb)
        x = int(view[at])
        old[i] = x
        view[at] = combine(
            op, ty, x, int(values[i]) & ones, int(swaps[i]) & ones if swaps is not None else None, not shared
        )
    W.machine.progress += 1
    return old

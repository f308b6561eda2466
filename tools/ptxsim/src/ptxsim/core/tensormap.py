"""Tensor maps: the 128 bytes that describe a tensor to the TMA unit.

The layout was found by encoding maps with one parameter varied at a time and reading the bytes:
words 0–1 address; word 2 [6:4] rank-1, [10:7] type, [12:11] interleave, [14:13] swizzle, 15 NaN fill, 16 tf32,
[18:17] L2 promotion; words 3–6 strides/16 with their high bits in word 7; words 8–12 sizes-1; word 13 [31:24] box0-1,
low bits element strides-1; word 14 bytes box1…4 -1; the driver also writes the box's bytes (16) and its alignment (18).
"""

from __future__ import annotations

import math
import struct
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ..errors import Fault
from . import hostmem
from .memory import SHARED_WINDOW, shared_location, who
from .values import M32, Mask, Value, lane, lanes

if TYPE_CHECKING:
    from .state import Warp

# type field → (bits, PTX type for reductions)
_TYPES = {
    0: (8, "u8"), 1: (16, "u16"), 2: (32, "u32"), 3: (32, "s32"), 4: (64, "u64"), 5: (64, "s64"), 6: (16, "f16"),
    7: (32, "f32"), 8: (32, "f32"), 9: (64, "f64"), 10: (16, "bf16"), 11: (4, "b4"),
}  # fmt: skip
_NAN_FILL = {"f16": 0x7FF7, "bf16": 0x7FF7, "f32": 0x7FF7_7FF7, "f64": 0x7FF7_7FF7_7FF7_7FF7}
# CUtensorMapDataType → (type field, tf32 bit)
_API_TYPES = {
    0: (0, 0), 1: (1, 0), 2: (2, 0), 3: (3, 0), 4: (4, 0), 5: (5, 0), 6: (6, 0), 7: (7, 0), 8: (9, 0), 9: (10, 0),
    10: (8, 0), 11: (7, 1), 12: (8, 1), 13: (11, 0),
}  # fmt: skip
SWIZZLE_SPAN = {0: 0, 1: 32, 2: 64, 3: 128}


class TensorMap:
    """A decoded map; sizes in elements, strides and `inner_bytes` in bytes."""

    def __init__(self, raw: bytes):
        w = struct.unpack_from("<16I", raw)
        flags = w[2]
        if (
            flags & 15 not in (0, 2) or not w[0] | w[1]
        ):  # the driver's encoding, and that of the DSL's host code
            raise Fault(
                f"TMA: the 128 bytes at the descriptor's address are not a tensor map (word 2 is {flags:#x})"
            )
        self.address = w[0] | w[1] << 32
        self.rank = (flags >> 4 & 7) + 1
        kind = flags >> 7 & 15
        self.swizzle = flags >> 13 & 3
        self.nan_fill = bool(flags >> 15 & 1)
        self.tf32 = bool(flags >> 16 & 1)
        self.ftz = kind == 8
        """f32 with flush-to-zero: reductions flush; loads keep subnormals all the same (seen on an H200)."""
        if kind not in _TYPES:
            raise Fault(f"TMA: data type {kind} of the tensor map is not modelled")
        bits, self.type = _TYPES[kind]
        if flags >> 11 & 3:
            raise Fault("TMA: interleaved layouts are not modelled")
        if not 1 <= self.rank <= 5:
            raise Fault(f"TMA: rank {self.rank}")
        self.sizes = [x + 1 for x in w[8 : 8 + self.rank]]
        self.strides = [((w[3 + i] | (w[7] >> 4 * i & 15) << 32) << 4) for i in range(self.rank - 1)]
        box = [w[13] >> 24, *(w[14] >> 8 * i & 255 for i in range(4))]
        self.box = [x + 1 for x in box[: self.rank]]
        if any(w[13] >> 3 * i & 7 for i in range(self.rank)):
            raise Fault("TMA: element strides other than 1 are not modelled")
        self.nibbles = bits == 4
        """4-bit elements travel as bytes; coordinates count nibbles."""
        if self.nibbles:
            self.sizes[0] //= 2
            self.box[0] //= 2
        self.element = max(bits // 8, 1)
        self.inner_bytes = self.box[0] * self.element
        span = SWIZZLE_SPAN[self.swizzle]
        if span and self.inner_bytes > span:
            raise Fault(f"TMA: inner box of {self.inner_bytes} bytes exceeds the swizzle span of {span}")
        if self.inner_bytes % 16 and self.rank > 1:
            raise Fault(f"TMA: inner box of {self.inner_bytes} bytes is not a multiple of 16")
        if self.address % 16 or any(s % 16 for s in self.strides):
            raise Fault(
                f"TMA: address {self.address:#x} and strides {self.strides} must be multiples of 16 bytes"
            )
        self.pitch = span or self.inner_bytes
        """Bytes from row to row in shared memory: a box narrower than its swizzle span keeps the span."""
        self.rows = int(np.prod(self.box[1:], dtype=np.int64))
        self.bytes = self.rows * self.inner_bytes
        """What the copy counts on its mbarrier."""
        self.footprint = self.rows * self.pitch

    def fill(self) -> int:
        return _NAN_FILL.get(self.type, 0) if self.nan_fill else 0


_decode = lru_cache(maxsize=4096)(TensorMap)


def tensor_map_at(W: Warp, address: int, line: int) -> TensorMap:
    if address % 64:
        raise Fault(f"TMA: tensor map at {address:#x} is not 64-byte aligned ({who(W, line)})")
    if address >> 56 == SHARED_WINDOW >> 56:
        raise Fault(f"TMA: a tensor map must be in global, constant or parameter memory ({who(W, line)})")
    W.machine.memory.check(address, address + 128, "tensor map read", W, line)
    return _decode(hostmem.read_bytes(address, 64))


def encode_tiled(
    kind: int,
    address: int,
    sizes: list[int],
    strides: list[int],
    box: list[int],
    element_strides: list[int],
    interleave: int,
    swizzle: int,
    l2_promotion: int,
    nan_fill: int,
) -> bytes:
    """cuTensorMapEncodeTiled: 128 bytes."""
    field, tf32 = _API_TYPES[kind]
    w = [0] * 32
    w[0], w[1] = address & M32, address >> 32 & M32
    w[2] = (
        len(sizes) - 1 << 4 | field << 7 | interleave << 11 | swizzle << 13 | nan_fill << 15 | tf32 << 16
        | l2_promotion << 17
    )  # fmt: skip
    for i, x in enumerate(strides):
        w[3 + i] = x >> 4 & M32
        w[7] |= (x >> 36 & 15) << 4 * i
    for i, x in enumerate(sizes):
        w[8 + i] = (x - 1) & M32
    w[13] = box[0] - 1 << 24
    for i, x in enumerate(element_strides):
        w[13] |= x - 1 << 3 * i
    for i, x in enumerate(box[1:]):
        w[14] |= x - 1 << 8 * i
    w[16] = math.prod(box) * _TYPES[field][0] // 8
    w[18] = {0: 16, 1: 256, 2: 512, 3: 1024}[swizzle]
    return struct.pack("<32I", *w)


def _words(W: Warp, space: str, address: int, line: int) -> np.ndarray:
    if space == "shared" or address >> 56 == SHARED_WINDOW >> 56:
        cta, o = shared_location(W, address - SHARED_WINDOW if address >> 56 else address)
        if cta.shadow:
            cta.shadow.write(W.current(), 0, slice(o, o + 128), 128, W.actor, W.touch(line), line, W.name)
        return cta.views[4][o // 4 : o // 4 + 32]
    W.machine.memory.check(address, address + 128, "tensormap.replace", W, line)
    start = hostmem.element(address, 4)
    return hostmem.MEMORY[4][start : start + 32]


_ELEMENT_TYPES = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6, 7: 7, 8: 8, 9: 9, 10: 10, 11: 7, 12: 8}
"""tensormap.replace .elemtype immediates → type field."""


def tensormap_replace(
    W: Warp, field: str, space: str, address: Value, ordinal: Value, value: Value, m: Mask, line: int
) -> None:
    for i in lanes(m):
        w = _words(W, space, lane(address, i), line)
        k, v = lane(ordinal, i), lane(value, i)
        if field == "global_address":
            w[0], w[1] = v & M32, v >> 32 & M32
        elif field == "global_dim":
            w[8 + k] = (v - 1) & M32
        elif field == "global_stride":
            w[3 + k] = v >> 4 & M32
            w[7] = (int(w[7]) & ~(15 << 4 * k) & M32) | (v >> 36 & 15) << 4 * k
        elif field == "box_dim":
            if k == 0:
                w[13] = (int(w[13]) & 0xFFFFFF) | (v - 1 & 255) << 24
            else:
                w[14] = (int(w[14]) & ~(255 << 8 * (k - 1)) & M32) | (v - 1 & 255) << 8 * (k - 1)
        elif field == "element_stride":
            w[13] = (int(w[13]) & ~(7 << 3 * k) & M32) | (v - 1 & 7) << 3 * k
        else:
            shift, bits = {"rank": (4, 7), "interleave_layout": (11, 3), "swizzle_mode": (13, 3), "fill_mode": (15, 1), "elemtype": (7, 15)}[field]  # fmt: skip
            v = _ELEMENT_TYPES[v] if field == "elemtype" else v
            w[2] = (int(w[2]) & ~(bits << shift) & M32) | (v & bits) << shift


def tensormap_copy(W: Warp, dst: Value, src: Value, size: Value, m: Mask) -> None:
    """tensormap.cp_fenceproxy: shared → global."""
    i = next(iter(lanes(m)))
    to, start, n = lane(dst, i), lane(src, i), lane(size, i)
    cta, o = shared_location(W, start - SHARED_WINDOW if start >> 56 else start)
    W.machine.memory.check(to, to + n, "tensor map write", W, 0)
    hostmem.byte_range(to, n)[:] = cta.bytes[o : o + n]

"""Shared-memory matrix descriptors of wgmma and tcgen05, and the element formats behind them."""

from __future__ import annotations

from functools import lru_cache

import ml_dtypes
import numpy as np

from ..errors import Fault
from .order import Clock
from .state import CTA
from .tma import swizzle
from .values import Array

_PITCH = {1: 32, 2: 64, 3: 128}
_SWIZZLE_100 = {0: 0, 2: 3, 4: 2, 6: 1}
_SWIZZLE_90 = {0: 0, 1: 3, 2: 2, 3: 1}


@lru_cache(maxsize=8192)
def chunk_offsets(
    descriptor: int, blackwell: bool, mn_major: bool, rows: int, row_bytes: int, element: int
) -> Array:
    """Byte offsets of the 16-byte chunks of an operand, swizzled: [rows, row_bytes/16] or MN-major [k, rows·element/16].

    Fields in units of 16 bytes: start [13:0], leading offset [29:16], stride offset [45:32]; on sm_100 version [47:46] = 1 and
    layout [63:61], on sm_90 layout [63:62].
    """
    start = (descriptor & 0x3FFF) << 4
    leading = (descriptor >> 16 & 0x3FFF) << 4
    stride = (descriptor >> 32 & 0x3FFF) << 4
    if descriptor >> 49 & 7:
        raise Fault(f"matrix descriptor {descriptor:#x}: a base offset is not modelled")
    if blackwell:
        if descriptor >> 46 & 3 != 1:
            raise Fault(f"matrix descriptor {descriptor:#x}: version {descriptor >> 46 & 3}, sm_100 wants 1")
        if descriptor >> 52 & 1:
            raise Fault(f"matrix descriptor {descriptor:#x}: absolute leading offset is not modelled")
        mode = _SWIZZLE_100.get(descriptor >> 61 & 7)
        if mode is None:
            raise Fault(
                f"matrix descriptor {descriptor:#x}: layout type {descriptor >> 61 & 7} is not modelled"
            )
    else:
        mode = _SWIZZLE_90[descriptor >> 62 & 3]
    if mn_major:
        k = np.arange(row_bytes // element)[:, None]
        chunk = np.arange(rows * element // 16)[None, :]
        if mode == 0:
            offset = chunk * stride + k % 8 * 16 + k // 8 * leading
        else:
            per = _PITCH[mode] // 16
            offset = chunk % per * 16 + chunk // per * leading + k % 8 * _PITCH[mode] + k // 8 * stride
    else:
        row = np.arange(rows)[:, None]
        chunk = np.arange(row_bytes // 16)[None, :]
        if mode == 0:
            offset = row // 8 * stride + row % 8 * 16 + chunk * leading
        else:
            per = _PITCH[mode] // 16
            offset = row // 8 * stride + row % 8 * _PITCH[mode] + chunk % per * 16 + chunk // per * leading
    return swizzle(start + offset.astype(np.int64), mode)


@lru_cache(maxsize=8192)
def _chunks(key: tuple) -> tuple[Array, Array, int]:
    """Chunk numbers, flat byte offsets and the end of an operand."""
    offsets = chunk_offsets(*key)
    return offsets >> 4, offsets.reshape(-1), int(offsets.max()) + 16


def read_operand(
    cta: CTA,
    descriptor: int,
    blackwell: bool,
    mn_major: bool,
    rows: int,
    row_bytes: int,
    element: int,
) -> Array:
    """Bytes of an operand, [rows, row_bytes], K-major."""
    chunks, _, _ = _chunks((descriptor, blackwell, mn_major, rows, row_bytes, element))
    data = cta.chunks.take(chunks, axis=0)
    if not mn_major:
        return data.reshape(rows, row_bytes)
    by_k = data.reshape(row_bytes // element, rows, element)
    return np.ascontiguousarray(by_k.transpose(1, 0, 2)).reshape(rows, row_bytes)


def check_operand(
    cta: CTA,
    descriptor: int,
    blackwell: bool,
    mn_major: bool,
    rows: int,
    row_bytes: int,
    element: int,
    clock: Clock,
    actor: int,
    epoch: int,
    line: int,
    accessor: str,
) -> None:
    """Bounds and ordering of a read through the async proxy."""
    _, offsets, end = _chunks((descriptor, blackwell, mn_major, rows, row_bytes, element))
    if end > cta.size:
        raise Fault(
            f"{accessor}, {cta.machine.describe_line(line)}: matrix descriptor {descriptor:#x} reaches {end:#x}, beyond shared memory"
        )
    if cta.shadow:
        cta.shadow.read(clock, 1, offsets, 16, actor, epoch, line, accessor)


def _table(dtype: type) -> Array:
    return np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)


E4M3, E5M2 = _table(ml_dtypes.float8_e4m3fn), _table(ml_dtypes.float8_e5m2)
_nibbles = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
E8M0 = np.exp2(np.arange(256, dtype=np.float64) - 127)
E8M0[255] = np.nan
UE4M3 = np.where(np.arange(256) < 128, E4M3, np.abs(np.roll(E4M3, 128)))
_codes6 = np.arange(64, dtype=np.uint8)
E2M3 = _codes6.view(ml_dtypes.float6_e2m3fn).astype(np.float64)
E3M2 = _codes6.view(ml_dtypes.float6_e3m2fn).astype(np.float64)
_bytes_of_nibbles = np.stack([_nibbles[np.arange(256) & 15], _nibbles[np.arange(256) >> 4]], -1)


def decode_bytes(data: Array, kind: str) -> Array:
    """Operand bytes [rows, bytes] → float64 values [rows, elements]; `kind` is an element format."""
    if kind == "e4m3":
        return E4M3.take(data)
    if kind == "e5m2":
        return E5M2.take(data)
    if kind == "e2m1":
        return _bytes_of_nibbles[data].reshape(data.shape[0], -1)
    if kind == "e2m1 padded":
        return _bytes_of_nibbles[data.reshape(len(data), -1, 16)[:, :, :8]].reshape(len(data), -1)
    if kind in ("e2m3", "e3m2"):
        triples = data.reshape(len(data), -1, 16)[:, :, :12].reshape(len(data), -1, 3).astype(np.uint32)
        words = triples[:, :, 0] | triples[:, :, 1] << np.uint32(8) | triples[:, :, 2] << np.uint32(16)
        codes = words[:, :, None] >> np.arange(0, 24, 6, dtype=np.uint32) & np.uint32(63)
        return (E2M3 if kind == "e2m3" else E3M2)[codes].reshape(len(data), -1)
    data = np.ascontiguousarray(data)
    if kind == "f16":
        return data.view(np.float16).astype(np.float64)
    if kind == "bf16":
        return data.view(ml_dtypes.bfloat16).astype(np.float64)
    if kind == "tf32":
        return (data.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    if kind == "u8":
        return data.astype(np.float64)
    if kind == "s8":
        return data.view(np.int8).astype(np.float64)
    raise Fault(f"element format {kind} is not modelled")

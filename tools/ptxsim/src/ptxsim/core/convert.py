"""cvt: between integers, floats and the narrow tensor-core formats; every case rounds once."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from ..errors import Unsupported
from .floats import FORMATS, clamp, flush, from_float, round_bits, round_odd, round_to, to_float, wide
from .integers import signed
from .values import M32, U64, Array, Value, count_true, spread

NARROW = {
    # mantissa bits, smallest normal exponent, largest value, NaN code, numpy type
    "e4m3": (3, -6, 448.0, 0x7F, ml_dtypes.float8_e4m3fn),
    "e5m2": (2, -14, 57344.0, 0x7F, ml_dtypes.float8_e5m2),
    "e2m3": (3, 0, 7.5, None, ml_dtypes.float6_e2m3fn),
    "e3m2": (2, -2, 28.0, None, ml_dtypes.float6_e3m2fn),
    "e2m1": (1, 0, 6.0, None, ml_dtypes.float4_e2m1fn),
}
_INTEGER_ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _out(r: Array, uniform: bool) -> Value:
    if uniform:
        return int(r[0])
    return r.astype(np.uint64) if r.shape == (32,) else np.broadcast_to(r, 32).astype(np.uint64)


def narrow_codes(x: Array, ty: str, relu: bool) -> Array:
    """Numbers → codes of a 4-, 6- or 8-bit format: nearest even, saturating; NaN → the format's NaN or its maximum."""
    mantissa, min_exponent, largest, nan, dtype = NARROW[ty]
    x = wide(x)
    bad = np.isnan(x)
    if relu:
        x = np.where((x > 0) | bad, x, 0.0)
    r = round_bits(np.where(bad, 0.0, np.clip(x, -largest, largest)), mantissa, min_exponent, "rn", np.inf)
    codes = np.clip(r, -largest, largest).astype(dtype).view(np.uint8).astype(np.uint64)
    if not bad.any():
        return codes
    positive_max = np.array([largest]).astype(dtype).view(np.uint8).astype(np.uint64)
    return np.where(bad, U64(nan) if nan is not None else positive_max, codes)


def to_e8m0(x: Array, round_up: bool) -> Array:
    """|x| → biased exponent; up to the next power of two or down; NaN → 255, Inf and overflow → 254."""
    x = np.abs(wide(x))
    m, e = np.frexp(x)
    exponent = np.where(m == 0.5, e - 1, e if round_up else e - 1)
    r = np.clip(exponent + 127, 0, 254)
    r = np.where(x == 0, 0, np.where(np.isinf(x), 254, r))
    return np.where(np.isnan(x), 255, r).astype(np.uint64)


def pack_narrow(dst: str, src: str, relu: bool, high: Value, low: Value | None = None) -> Value:
    """Cvt to `<format>x2` from two f32 (first operand high) or one packed f16x2 / bf16x2."""
    if low is None:
        high, low, src = high >> 16, high & 0xFFFF, src[:-2]
    uniform = type(high) is not Array and type(low) is not Array
    bits = 4 if dst == "e2m1x2" else 8
    codes = [_out(narrow_codes(to_float(v, src), dst[:-2], relu), uniform) for v in (high, low)]
    return codes[0] << bits | codes[1]


def unpack_narrow(dst: str, src: str, relu: bool, packed: Value) -> Value:
    """cvt.f16x2 (or bf16x2) from two narrow codes."""
    ty, bits = src[:-2], 4 if src == "e2m1x2" else 8
    halves = []
    for shift in (bits, 0):
        code = (spread(packed) >> U64(shift)) & U64((1 << bits) - 1)
        f = code.astype(np.uint8).view(NARROW[ty][4]).astype(np.float64)
        halves.append(from_float(round_to(clamp(f, "r" if relu else ""), dst[:-2], "rn"), dst[:-2], False))
    r = halves[0] << U64(16) | halves[1]
    return r if type(packed) is Array else int(r[0])


def pack_e8m0(src: str, round_up: bool, high: Value, low: Value | None = None) -> Value:
    if low is None:
        high, low, src = high >> 16, high & 0xFFFF, src[:-2]
    uniform = type(high) is not Array and type(low) is not Array
    codes = [_out(to_e8m0(to_float(v, src), round_up), uniform) for v in (high, low)]
    return codes[0] << 8 | codes[1]


def unpack_e8m0(packed: Value) -> Value:
    """cvt.bf16x2.ue8m0x2: 255 is NaN, 0 the subnormal 2^-127."""

    def half(b: Array) -> Array:
        return np.where(b == 255, U64(0x7FFF), np.where(b == 0, U64(0x40), b << U64(7)))

    p = spread(packed)
    r = half(p >> U64(8) & U64(255)) << U64(16) | half(p & U64(255))
    return r if type(packed) is Array else int(r[0])


def nearest_bf16(x: Value) -> Value:
    """f32 bits → bf16 bits, to nearest even: the conversion every bf16 epilogue is made of."""
    if type(x) is not Array:
        return 0x7FFF if x & 0x7FFFFFFF > 0x7F800000 else (x + 0x7FFF + (x >> 16 & 1)) >> 16
    f = x.astype(np.uint32).view(np.float32)
    r = f.astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint64)
    nan = f != f
    return np.where(nan, U64(0x7FFF), r) if count_true(nan) else r


def pack_bf16(*operands: Value) -> list[Array]:
    """Several cvt.rn.bf16x2.f32 at once: high, low, high, low, … → packed pairs."""
    n = len(operands) // 2
    pair = np.empty((n, 32, 2), np.uint32)
    for i in range(n):
        pair[i, :, 1], pair[i, :, 0] = operands[2 * i], operands[2 * i + 1]
    f = pair.view(np.float32)
    r = f.astype(ml_dtypes.bfloat16).view(np.uint16)
    nan = f != f
    if count_true(nan):
        r[nan] = 0x7FFF
    return list(r.view(np.uint32).reshape(n, 32).astype(np.uint64))


def pack_pair(dst: str, mode: str, opt: str, high: Value, low: Value) -> Value:
    """cvt.{f16x2,bf16x2}.f32: first operand to the high half."""
    ty = dst[:-2]
    if ty == "bf16" and mode == "rn" and not opt:
        if type(high) is Array and type(low) is Array:
            return pack_bf16(high, low)[0]
        return nearest_bf16(high) << 16 | nearest_bf16(low)
    h, lo = float_to_float(ty, "f32", mode, opt, high), float_to_float(ty, "f32", mode, opt, low)
    return h << 16 | lo


def float_to_float(dst: str, src: str, mode: str | None, opt: str, a: Value) -> Value:
    """Between f16, bf16, f32, f64 (and f32 → tf32); `opt` letters: z ftz, s sat, r relu."""
    if dst == "bf16" and src == "f32" and mode == "rn" and not opt:
        return nearest_bf16(a)
    uniform = type(a) is not Array
    x = to_float(a, src)
    if dst == "f32" and src == "bf16" and mode is None and not opt:
        return a << 16
    if dst == "f32" and mode is None and not opt:  # widening is exact
        return from_float(x.astype(np.float32), "f32", uniform)
    if "z" in opt and src == "f32":
        x = flush(x, src)
    if mode in _INTEGER_ROUND:
        x = np.copysign(_INTEGER_ROUND[mode](wide(x)), wide(x)).astype(x.dtype)
        mode = "rn"
    if dst == "tf32":
        return _to_tf32(x, mode or "rn", opt, uniform)
    r = round_to(wide(x), dst, mode or "rn")
    r = clamp(r, opt)
    if src == "f64" and dst == "f32" and count_true(x != x) and not opt:  # a NaN keeps the top of its payload
        kept = (x.view(np.uint64) | U64(1 << 51)) >> U64(29)
        bits = (kept & U64(0x7FFFFF)) | (x.view(np.uint64) >> U64(63)) << U64(31) | U64(0x7F800000)
        bits = np.where(x != x, bits, r.view(np.uint32))
        return int(bits[0]) if uniform else bits.astype(np.uint64)
    if "z" in opt and dst == "f32":
        r = flush(r, dst)
    return from_float(r, dst, uniform)


def _to_tf32(x: Array, mode: str, opt: str, uniform: bool) -> Value:
    """tf32 keeps 10 mantissa bits of an f32; NaN is the truncated canonical one, with .rna the truncated operand."""
    nan = np.isnan(x)
    truncated = x.view(np.uint32) & np.uint32(0xFFFFE000)
    r = round_bits(wide(clamp(x, opt)), 10, -126, mode, 2.0**128).astype(np.float32)
    if "f" in opt:
        r = np.clip(r, -np.float32(2.0**128 * (1 - 2.0**-11)), np.float32(2.0**128 * (1 - 2.0**-11)))
    bits = np.where(nan, truncated if mode == "rna" else np.uint32(0x7FFFE000), r.view(np.uint32))
    return _out(bits, uniform)


def int_to_float(dst: str, src: str, mode: str, a: Value) -> Value:
    uniform = type(a) is not Array
    width = int(src[1:])
    v = a if type(a) is Array else np.array([a & ((1 << width) - 1)], dtype=np.uint64)
    v = v & U64((1 << width) - 1)
    if src[0] == "s":
        v = np.asarray(signed(v, width))
    near = v.astype(np.float64)
    if width == 64:  # binary64 holds 53 bits: find the error of the conversion exactly
        err = [int(i) - int(f) for i, f in zip(v, near, strict=True)]
        if dst == "f64" and mode != "rn":
            raise Unsupported(f"cvt.{mode}.f64.{src}")
        if dst != "f64":
            near = round_odd(near, np.array(err, dtype=np.float64))
    return from_float(round_to(near, dst, mode), dst, uniform)


def float_to_int(dst: str, src: str, mode: str, ftz: bool, register: int, a: Value) -> Value:
    """Saturating. NaN → 0; for 64-bit results 0x8000000000000000 (as an H200 gives)."""
    uniform = type(a) is not Array
    x = to_float(a, src)
    if ftz:
        x = flush(x, src)
    x = _INTEGER_ROUND[mode](wide(x))
    width = int(dst[1:])
    low, high = (-(1 << (width - 1)), (1 << (width - 1)) - 1) if dst[0] == "s" else (0, (1 << width) - 1)
    nan = 1 << 63 if width == 64 else 0

    def one(v: float) -> int:
        if v != v:
            return nan
        v = high if v >= high else low if v <= low else int(v)
        return v & ((1 << register) - 1)

    r = [one(float(v)) for v in x]
    return r[0] if uniform else np.array(r, dtype=np.uint64)


def int_to_int_saturating(dst: str, src: str, register: int, a: Value) -> Value:
    """cvt.sat: clamp; 8- and 16-bit signed results are sign-extended in their register."""
    wd, ws = int(dst[1:]), int(src[1:])
    low, high = (-(1 << (wd - 1)), (1 << (wd - 1)) - 1) if dst[0] == "s" else (0, (1 << wd) - 1)
    ones = (1 << register) - 1

    def one(v: int) -> int:
        v &= (1 << ws) - 1
        v = signed(v, ws) if src[0] == "s" else v
        return min(max(v, low), high) & ones

    return one(a) if type(a) is not Array else np.array([one(int(v)) for v in a], dtype=np.uint64)


__all__ = ["FORMATS", "M32"]

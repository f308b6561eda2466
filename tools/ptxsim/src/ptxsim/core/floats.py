"""Floating-point arithmetic, bit-exact, with every rounding mode.

Sums and products are formed in binary64 with their exact error (TwoSum), rounded to odd, and then rounded once to the
result type: no double rounding. What an H200 wrote is the reference for NaN patterns, signed zeros and saturation.
"""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np

from ..errors import Unsupported
from .values import U64, Array, Value, count_true, spread

np.seterr(all="ignore")

FORMATS = {
    # bits, mantissa bits, smallest normal exponent, canonical NaN
    "f64": (64, 52, -1022, 0x7FFFFFFFFFFFFFFF),
    "f32": (32, 23, -126, 0x7FFFFFFF),
    "f16": (16, 10, -14, 0x7FFF),
    "bf16": (16, 7, -126, 0x7FFF),
}
_NUMPY = {
    "f64": (np.uint64, np.float64),
    "f32": (np.uint32, np.float32),
    "f16": (np.uint16, np.float16),
    "bf16": (np.uint16, ml_dtypes.bfloat16),
}


def to_float(x: Value, ty: str) -> Array:
    """Bit patterns → numbers, shape (32,) or (1,) for a uniform value."""
    ints, floats = _NUMPY[ty]
    if type(x) is Array:
        return x.astype(ints).view(floats)
    return np.array([x & ((1 << FORMATS[ty][0]) - 1)], dtype=ints).view(floats)


def from_float(f: Array, ty: str, uniform: bool) -> Value:
    """Numbers of the type itself → bit patterns, NaN made canonical."""
    ints, floats = _NUMPY[ty]
    f = np.asarray(f, dtype=floats)
    bits = f.view(ints)
    if ty == "f64":  # NaN payloads pass through binary64 operations
        return int(bits[0]) if uniform else bits.astype(np.uint64)
    nan = f != f
    if count_true(nan):
        bits = np.where(nan, ints(FORMATS[ty][3]), bits)
    return int(bits[0]) if uniform else bits.astype(np.uint64)


def wide(x: Array) -> Array:
    return x if x.dtype == np.float64 else x.astype(np.float64)


def flush(x: Array, ty: str) -> Array:
    """Subnormals to zero, sign kept."""
    tiny = np.abs(wide(x)) < 2.0 ** FORMATS[ty][2]
    return np.where(tiny, np.copysign(np.zeros(1, x.dtype), x), x)


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """S + e = a + b exactly, s the rounded sum."""
    s = a + b
    t = s - a
    e = (a - (s - t)) + (b - t)
    return s, np.where(np.isfinite(s), e, 0.0)


def round_odd(s: Array, e: Array) -> Array:
    """S + e rounded to odd in binary64."""
    bits = s.view(np.int64)
    inexact = (e != 0) & (bits & 1 == 0)
    if not count_true(inexact):
        return s
    outward = (e > 0) == (s > 0)
    return np.where(inexact, (bits + np.where(outward, 1, -1)).view(np.float64), s)


def round_to(x: Array, ty: str, mode: str) -> Array:
    """Round binary64 (exact, or rounded to odd) once to `ty`; the result is of the numpy type of `ty`."""
    floats = _NUMPY[ty][1]
    if mode == "rn" and ty != "bf16":
        return x.astype(floats)
    return round_bits(x, *FORMATS[ty][1:3], mode, 2.0 ** (16 if ty == "f16" else 128)).astype(floats)


def round_bits(x: Array, mantissa: int, min_exponent: int, mode: str, limit: float) -> Array:
    """Round binary64 to `mantissa` bits with gradual underflow at `min_exponent`; results are exact binary64.

    `limit` is the first power of two that does not fit; finite values that reach it become Inf, or the largest
    number where the mode rounds toward it.
    """
    _, e = np.frexp(x)
    quantum = np.maximum(e - 1, min_exponent) - mantissa
    scaled = np.ldexp(x, -quantum)
    scaled = {"rn": np.rint, "rz": np.trunc, "rm": np.floor, "rp": np.ceil, "rna": _round_away}[mode](scaled)
    r = np.where(np.isfinite(x), np.copysign(np.ldexp(scaled, quantum), x), x)
    over = np.isfinite(x) & (np.abs(r) >= limit)
    if count_true(over):
        largest = limit * (1 - 2.0 ** -(mantissa + 1))
        to_largest = {"rn": False, "rna": False, "rz": True, "rm": x > 0, "rp": x < 0}[mode]
        r = np.where(over, np.copysign(np.where(to_largest, largest, np.inf), x), r)
    return r


def _round_away(x: Array) -> Array:
    return np.copysign(np.floor(np.abs(x) + 0.5), x)


def _exact_zero(sign_sum: Array, mode: str, a: Array, b: Array) -> Array:
    """Sign of an exact zero sum: x - x is -0 when rounding down."""
    if mode != "rm":
        return sign_sum
    cancel = (sign_sum == 0) & ~((a == 0) & (b == 0) & ~np.signbit(a) & ~np.signbit(b))
    return np.where(cancel, -0.0, sign_sum)


def _add(a: Array, b: Array, ty: str, mode: str) -> Array:
    if mode == "rn" and ty in ("f32", "f64"):
        return a + b
    a, b = wide(a), wide(b)
    s, e = two_sum(a, b)
    return round_to(_exact_zero(round_odd(s, e), mode, a, b), ty, mode)


def _multiply(a: Array, b: Array, ty: str, mode: str) -> Array:
    if mode == "rn" and ty in ("f32", "f64"):
        return a * b
    return round_to(wide(a) * wide(b), ty, mode)


def _fma(a: Array, b: Array, c: Array, ty: str, mode: str) -> Array:
    if ty == "f64":
        return np.array([_fma64(*map(float, v)) for v in np.broadcast(a, b, c)])
    p, c = wide(a) * wide(b), wide(c)
    if mode == "rn" and ty == "f32":
        s = p + c
        halfway = (s.view(np.int64) & 0x1FFFFFFF) == 0x10000000
        if not count_true(halfway | (np.abs(s) < 2.0**-125)):
            return s.astype(np.float32)  # rounding twice is harmless away from ties and subnormals
    s, e = two_sum(p, c)
    return round_to(_exact_zero(round_odd(s, e), mode, p, c), ty, mode)


def _fma64(a: float, b: float, c: float) -> float:
    if not all(map(np.isfinite, (a, b, c))):
        return c if np.isfinite(a) and np.isfinite(b) else a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    try:
        return float(exact) if exact else a * b + c
    except OverflowError:
        return float("inf") if exact > 0 else float("-inf")


def _fix_quotient(r: Array, residual: Array, mode: str) -> Array:
    """Nearest-rounded binary32 `r` → rounded by `mode`; residual has the sign of (exact - r)."""
    if mode == "rn":
        return r
    up, down = np.float32(np.inf), np.float32(-np.inf)
    low, high = np.nextafter(r, down), np.nextafter(r, up)
    below = np.where(residual < 0, low, r)
    above = np.where(residual > 0, high, r)
    floor, ceil = below, above
    chosen = {"rm": floor, "rp": ceil, "rz": np.where(r > 0, floor, ceil)}[mode]
    return np.where(np.isfinite(residual), chosen, r)


def _divide(a: Array, b: Array, ty: str, mode: str) -> Array:
    if ty == "f64":
        if mode != "rn":
            raise Unsupported(f"div.{mode}.f64")
        return a / b
    q = round_to(wide(a) / wide(b), "f32", "rn")
    if mode == "rn":
        return q
    exact = wide(a) / wide(b)
    tiny_or_huge = np.isinf(q) | (np.abs(wide(q)) < 2.0**-126)
    residual = (wide(a) - wide(q) * wide(b)) * np.sign(wide(b))
    directed = _fix_quotient(q, residual, mode)
    return np.where(tiny_or_huge & np.isfinite(exact) & (b != 0), _divide_slow(a, b, mode), directed)


def _divide_slow(a: Array, b: Array, mode: str) -> Array:
    """Directed division near overflow and underflow, by exact fractions."""
    a, b = np.broadcast_arrays(a, b)
    out = np.zeros(a.shape, np.float32)
    for i in range(a.size):
        x, y = float(a.flat[i]), float(b.flat[i])
        if not (np.isfinite(x) and np.isfinite(y)) or y == 0 or x == 0:
            out.flat[i] = np.float32(np.divide(x, y))
            continue
        exact = Fraction(x) / Fraction(y)
        near = float(exact)
        e = exact - Fraction(near) if np.isfinite(near) else Fraction(0)
        odd = round_odd(np.array([near]), np.array([float(np.sign(float(e)) if e else 0)]))
        out.flat[i] = round_to(odd, "f32", mode)[0]
    return out


def _sqrt(a: Array, ty: str, mode: str) -> Array:
    if ty == "f64":
        if mode != "rn":
            raise Unsupported(f"sqrt.{mode}.f64")
        return np.sqrt(a)
    r = np.sqrt(wide(a)).astype(np.float32)
    return _fix_quotient(r, wide(a) - wide(r) * wide(r), mode) if mode != "rn" else r


_APPROXIMATE = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "rcp": lambda x: 1 / x,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sqrt": np.sqrt,
}


def approximate(op: str, ty: str, ftz: bool, a: Value) -> Value:
    """`.approx` functions, computed in binary64 and rounded once: the hardware differs by a few ulp."""
    if ty.endswith("x2"):
        return _halves(lambda x: approximate(op, ty[:-2], ftz, x), 16, a)
    uniform = type(a) is not Array
    x = to_float(a, ty)
    x = flush(x, ty) if ftz else x
    r = round_to(_APPROXIMATE[op](wide(x)), ty, "rn")
    return from_float(flush(r, ty) if ftz else r, ty, uniform)


def _halves(f, bits: int, *args: Value) -> Value:
    mask = (1 << bits) - 1
    low, high = f(*[a & mask for a in args]), f(*[a >> bits for a in args])
    if type(low) is Array or type(high) is Array:
        return spread(low) | (spread(high) << U64(bits))
    return low | (high << bits)


def arithmetic(op: str, ty: str, mode: str, opt: str, *args: Value) -> Value:
    """add, sub, mul, fma, div, sqrt, rcp. `opt` holds letters: z ftz, s sat, r relu, q div.approx."""
    if ty == "f32x2":
        return _halves(lambda *v: arithmetic(op, "f32", mode, opt, *v), 32, *args)
    if ty.endswith("16x2"):
        return _halves(lambda *v: arithmetic(op, ty[:-2], mode, opt, *v), 16, *args)
    uniform = True
    for a in args:
        if type(a) is Array:
            uniform = False
    x = [to_float(a, ty) for a in args]
    if "z" in opt:
        x = [flush(v, ty) for v in x]
    if op == "add":
        r = _add(x[0], x[1], ty, mode)
    elif op == "sub":
        r = _add(x[0], -x[1], ty, mode)
    elif op == "mul":
        r = _multiply(x[0], x[1], ty, mode)
    elif op == "fma":
        r = _fma(x[0], x[1], x[2], ty, mode)
    elif op == "div":
        r = _divide(x[0], x[1], ty, mode)
        if "q" in opt:
            r = np.where((np.abs(x[1]) > 2.0**126) & np.isfinite(x[1]), x[0] * 0, r).astype(r.dtype)
    elif op == "rcp":
        r = _divide(np.ones(1, x[0].dtype), x[0], ty, mode)
    elif op == "sqrt":
        r = _sqrt(x[0], ty, mode)
    else:
        raise AssertionError(op)
    if ty == "f64" and op in ("add", "sub", "mul", "fma"):
        r = _propagate(r, x)
    if "z" in opt:
        r = flush(r, ty)
        if op in ("mul", "fma"):
            r = _flush_tiny(r, x, mode)
    return from_float(clamp(r, opt) if opt else r, ty, uniform)


_QUIET = np.uint64(1 << 51)


def _propagate(r: Array, x: list[Array]) -> Array:
    """Binary64 results keep an operand's NaN, made quiet: the second operand's, else the third's, else the first's."""
    nan = r != r
    if not count_true(nan):
        return r
    bits = r.view(np.uint64)
    for v in (x[0], *x[2:], x[1]):
        bits = np.where(v != v, v.view(np.uint64) | _QUIET, bits)
    return bits.view(np.float64)


def _flush_tiny(r: Array, x: list[Array], mode: str) -> Array:
    """With .ftz a result is zero if, rounded to 24 bits with any exponent, it is below the smallest normal.

    So a product that only gradual underflow would lift to the smallest normal is flushed too (seen on an H200).
    """
    s, e = wide(x[0]) * wide(x[1]), np.zeros(1)
    if len(x) == 3:
        s, e = two_sum(s, wide(x[2]))
    tiny = np.abs(round_bits(round_odd(s, e), 23, -1000, mode, 2.0**200)) < 2.0**-126
    return np.where(tiny, np.copysign(np.zeros(1, r.dtype), r), r)


def clamp(r: Array, opt: str) -> Array:
    """`.sat` to [+0, 1] with NaN → +0; `.relu` to [+0, ∞) with NaN kept."""
    if "s" in opt:
        w = wide(r)
        r = np.where(w > 0, np.minimum(w, 1), 0.0).astype(r.dtype)
    if "r" in opt:
        w = wide(r)
        r = np.where((w > 0) | np.isnan(w), r, np.zeros(1, r.dtype))
    return r


def sign_bits(op: str, ty: str, ftz: bool, a: Value) -> Value:
    """Neg and abs act on the sign bit; NaN becomes canonical for f32 with .ftz only as the rest does."""
    if ty.endswith("x2"):
        half = 32 if ty == "f32x2" else 16
        sign = (1 << (half - 1)) | (1 << (2 * half - 1))
        full = (1 << 2 * half) - 1
    else:
        sign = 1 << (FORMATS[ty][0] - 1)
        full = (sign << 1) - 1
    r = a ^ sign if op == "neg" else a & (full ^ sign)
    if ty == "f64":  # an addition on hardware, so a NaN is made quiet and keeps its sign
        x = to_float(a, ty)
        bits = np.where(x != x, x.view(np.uint64) | _QUIET, r)
        return int(bits[0]) if type(a) is not Array else bits.astype(np.uint64)
    if ty.endswith("x2"):
        return _halves(lambda v: _canonical(v, ty[:-2], ftz), 32 if ty == "f32x2" else 16, r)
    return _canonical(r, ty, ftz)


def _canonical(r: Value, ty: str, ftz: bool) -> Value:
    x = to_float(r, ty)
    if ftz:
        x = flush(x, ty)
    return from_float(x, ty, type(r) is not Array)


def copysign(ty: str, a: Value, b: Value) -> Value:
    """Sign of a, magnitude of b."""
    sign = 1 << (FORMATS[ty][0] - 1)
    return (a & sign) | (b & (sign - 1))


def minmax(op: str, ty: str, opt: str, *args: Value) -> Value:
    """min/max of two or three; letters in `opt`: n .NaN, x .xorsign.abs, z ftz, a .abs. -0 < +0."""
    if ty.endswith("16x2"):
        return _halves(lambda *v: minmax(op, ty[:-2], opt, *v), 16, *args)
    uniform = not any(type(a) is Array for a in args)
    x = [to_float(a, ty) for a in args]
    if "z" in opt:
        x = [flush(v, ty) for v in x]
    sign = np.zeros(1, bool)
    if "x" in opt:
        for v in x:
            sign = sign ^ np.signbit(v)
    if "x" in opt or "a" in opt:
        x = [np.abs(v) for v in x]
    r = x[0]
    for v in x[1:]:
        r = _minmax2(op, r, v, "n" in opt)
    if "x" in opt:
        r = np.where(np.isnan(wide(r)), r, np.where(sign, -r, r))
    return from_float(r, ty, uniform)


def _minmax2(op: str, a: Array, b: Array, nan: bool) -> Array:
    a, b = np.broadcast_arrays(a, b)
    less = (a < b) | ((a == b) & np.signbit(a) & ~np.signbit(b))
    r = np.where(less == (op == "min"), a, b)
    equal = (a == b) & (np.signbit(a) == np.signbit(b))
    r = np.where(equal, a, r)
    a_nan, b_nan = a != a, b != b
    if nan:
        return np.where(a_nan, a, np.where(b_nan, b, r))
    r = np.where(a_nan, b, np.where(b_nan, a, r))
    if r.dtype == np.float64:
        r = np.where(r != r, (r.view(np.uint64) | _QUIET).view(np.float64), r)
    return r


def compare(op: str, ty: str, ftz: bool, a: Value, b: Value) -> Value:
    """Setp / set comparison: plain forms are false with NaN, `…u` forms true."""
    uniform = type(a) is not Array and type(b) is not Array
    x, y = to_float(a, ty), to_float(b, ty)
    if ftz:
        x, y = flush(x, ty), flush(y, ty)
    unordered = (x != x) | (y != y)
    if op == "num":
        r = ~unordered
    elif op == "nan":
        r = unordered
    else:
        base = op[:2]
        r = {"eq": x == y, "ne": x != y, "lt": x < y, "le": x <= y, "gt": x > y, "ge": x >= y}[base]
        r = r | unordered if len(op) == 3 else r & ~unordered
    return bool(r[0]) if uniform else (r if r.shape == (32,) else np.broadcast_to(r, 32).copy())


def test_property(op: str, ty: str, a: Value) -> Value:
    x = to_float(a, ty)
    w = wide(x)
    tiny = np.abs(w) < 2.0 ** FORMATS[ty][2]
    r = {
        "finite": np.isfinite(w),
        "infinite": np.isinf(w),
        "number": w == w,
        "notanumber": w != w,
        "normal": np.isfinite(w) & (~tiny | (w == 0)),
        "subnormal": tiny & (w != 0),
    }[op]
    return bool(r[0]) if type(a) is not Array else r


def add_mixed(op: str, ty: str, mode: str, opt: str, *args: Value) -> Value:
    """add/sub/fma.f32 with narrow first operands (`.f16` or `.bf16`); products are exact, one rounding."""
    narrow = args[:-1]
    widened = [from_float(to_float(a, ty).astype(np.float32), "f32", type(a) is not Array) for a in narrow]
    return arithmetic(op, "f32", mode, opt, *widened, args[-1])

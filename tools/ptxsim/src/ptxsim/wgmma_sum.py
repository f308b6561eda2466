"""How Hopper's tensor core adds: a bit-exact model of one ``wgmma.mma_async`` with floating-point operands.

The PTX ISA leaves the accumulation of `wgmma` open ("no guaranteed order, at least single precision" in effect).
This is what an H200 (driver 580, sm_90a, 2026-11-30) does, fitted on directed probes and then checked against its
outputs, bit for bit; `tests/emulator/conformance` keeps such outputs and compares them again.

One instruction m64nNkK is **one** aligned addition of its K products and the accumulator:

1. A product is exact. Its exponent is e_a + e_b of the operands as stored: the carry of the two significands'
   product is not normalised, and a subnormal operand counts with the smallest normal exponent.
2. The largest exponent among the products and the accumulator fixes a grid, 2**(largest - F), and every addend is
   truncated toward zero to it. F is 25 for bf16, f16 and tf32, and 13 for e4m3 and e5m2.
3. The sum on the grid is exact.
4. An f32 result is normalised and truncated toward zero to 23 fraction bits (13 for the fp8 types); an f16 result
   is rounded to nearest even. Zero is +0. Beyond the range: infinity.
5. Any NaN, inf - inf or 0 * inf gives the canonical NaN, 0x7fffffff (f16: 0x7fff).

So fp8 products lose everything below 2**-13 of the largest addend: a sum of 2048 equal-signed e4m3 products comes out
about 3 % low, which is why the project's Hopper kernels dequantise to bf16 instead.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

SMALLEST_NORMAL_EXPONENT = {"bf16": -126, "tf32": -126, "f16": -14, "e4m3": -6, "e5m2": -14}
"""Exponent with which a subnormal operand enters rule 1."""
ALIGN_BITS = {"bf16": 25, "tf32": 25, "f16": 25, "e4m3": 13, "e5m2": 13}
"""F of rule 2."""
RESULT_BITS = {"bf16": 23, "tf32": 23, "f16": 23, "e4m3": 13, "e5m2": 13}
"""Fraction bits that an f32 result keeps (rule 4)."""
CANONICAL_NAN = {"f32": np.uint32(0x7FFFFFFF), "f16": np.uint16(0x7FFF)}

_ZERO = -(1 << 20)  # exponent of a zero: below every other, also after adding a finite one
_F32_MIN_EXPONENT = -126


def wgmma_step(
    a_MK: ArrayLike,
    b_NK: ArrayLike,
    c_MN: ArrayLike | None,
    a_type: str,
    b_type: str,
    accumulator: str = "f32",
) -> NDArray:
    """The accumulator after one wgmma: ``c + a @ b.T`` as the hardware adds it.

    Args:
        a_MK: (M, K) values of A, each exactly representable in `a_type` (the tensor core ignores a tf32 word's low
            13 bits: clear them first); K is the instruction's (16 for two-byte types, 32 for one-byte, 8 for tf32). Leading batch axes are allowed, the same in all operands.
        b_NK: (N, K) values of B, likewise in `b_type`.
        c_MN: (M, N) the accumulator before, or None for a zero accumulator (`scale-d` false).
        a_type: "bf16", "f16", "tf32", "e4m3" or "e5m2".
        b_type: the same as `a_type`, except that the two fp8 types mix.
        accumulator: "f32" or "f16".

    Returns:
        (M, N) float32 or float16 with the hardware's bits.

    Raises:
        ValueError: an unknown type.
    """
    if a_type not in ALIGN_BITS or b_type not in ALIGN_BITS or ALIGN_BITS[a_type] != ALIGN_BITS[b_type]:
        raise ValueError(
            f"expected operand types of {sorted(ALIGN_BITS)} that wgmma combines, got {a_type!r}, {b_type!r}"
        )
    if accumulator not in CANONICAL_NAN:
        raise ValueError(f"expected accumulator 'f32' or 'f16', got {accumulator!r}")
    a, b = np.asarray(a_MK, np.float64), np.asarray(b_NK, np.float64)
    shape = (*a.shape[:-1], b.shape[-2])
    c = np.zeros(shape) if c_MN is None else np.asarray(c_MN, np.float64)

    # NaN and infinity follow IEEE; an operand that is not finite makes every output it enters not finite (rule 5),
    # so the finite outputs never see the zeros put in its place.
    ieee = None
    if not (np.isfinite(a).all() and np.isfinite(b).all() and np.isfinite(c).all()):
        with np.errstate(invalid="ignore"):
            ieee = a @ np.swapaxes(b, -1, -2) + c
            ieee[_opposite_infinities(a, b, c)] = np.nan
        a, b, c = (np.where(np.isfinite(x), x, 0.0) for x in (a, b, c))

    total = _aligned_sum(a, b, c, a_type, b_type)
    with np.errstate(over="ignore"):
        if accumulator == "f16":
            out = (total + 0.0).astype(np.float16)
        else:
            grid = np.maximum(_exponent(total), _F32_MIN_EXPONENT) - RESULT_BITS[a_type]
            out = (np.ldexp(np.trunc(np.ldexp(total, -grid)), grid) + 0.0).astype(np.float32)  # + 0.0: no -0
    if ieee is not None:
        bad = ~np.isfinite(ieee)
        out[bad] = ieee[bad]
        bits = out.view(CANONICAL_NAN[accumulator].dtype)
        bits[np.isnan(out)] = CANONICAL_NAN[accumulator]
    return out


def _aligned_sum(a: NDArray, b: NDArray, c: NDArray, a_type: str, b_type: str) -> NDArray:
    """Rules 1 to 3: the sum of the addends truncated to their common grid, float64 (exact)."""
    exp_a = np.maximum(_exponent(a), np.where(a == 0, _ZERO, SMALLEST_NORMAL_EXPONENT[a_type]))
    exp_b = np.maximum(_exponent(b), np.where(b == 0, _ZERO, SMALLEST_NORMAL_EXPONENT[b_type]))
    largest = np.maximum(_exponent(c), np.where(c == 0, _ZERO, _F32_MIN_EXPONENT))
    for k in range(a.shape[-1]):  # K is at most 32, and (M, N) arrays stay in the cache
        np.maximum(largest, exp_a[..., :, None, k] + exp_b[..., None, :, k], out=largest)
    grid = np.maximum(largest, -900) - ALIGN_BITS[a_type]
    scale = np.ldexp(1.0, -grid)
    total = np.trunc(c * scale)
    for k in range(a.shape[-1]):
        total += np.trunc((a[..., :, None, k] * b[..., None, :, k]) * scale)
    return np.ldexp(total, grid)


def _exponent(x: NDArray) -> NDArray:
    """floor(log2|x|), int32; `_ZERO` for 0."""
    return np.where(x == 0, _ZERO, np.frexp(x)[1] - 1).astype(np.int32)


def _opposite_infinities(a: NDArray, b: NDArray, c: NDArray) -> NDArray:
    """Where +inf and -inf meet among the addends (a matrix product of numpy may order them away)."""
    plus, minus = np.isposinf(c), np.isneginf(c)
    for k in range(a.shape[-1]):
        product = a[..., :, None, k] * b[..., None, :, k]
        plus |= np.isposinf(product)
        minus |= np.isneginf(product)
    return plus & minus

"""silu(g)·u and its gradients in fp32, to a relative 2^-21.

sigmoid(g) = 1/(1 + e) with e = exp(-g) = 2^t, t = -g·log2(e). Rounding t to fp32 would cost up to 2^-18 of e, so e is
corrected by what the rounding lost, e·(1 + delta) with delta = -g - t·ln(2) in two steps.

That holds for g >= -87. Below, e leaves fp32's range while silu(g)·u can still be a normal number. A warp that meets such a
gate takes the deep form, exact to the same bound down to g = -131: e = 2^n·2^f is put together from exponent bits, and
numerator and denominator of s / (s + s·e) are scaled by a power of two s, by which the result is multiplied last.
"""

from functools import reduce
from typing import Any

import cutlass.cute.arch as ca
from cutlass import Boolean, Float32, Int32, Uint32
from cutlass import max as int_max

from mx_kernels.device import ptx
from mx_kernels.device.tile import Bf16Rows, Rows

_DEEP_BF16 = 0xC2AE  # -87: negative patterns, as unsigned numbers, grow with the magnitude
_MINUS_LOG2E = -1.4426950408889634
_MINUS_LN2 = -0.693147182464599609375  # in fp32, and what it lacks
_MINUS_LN2_LOW = 1.904654299957e-9
_LOG2E = 1.4426950216293335  # in fp32, and what it lacks
_LOG2E_LOW = 1.9259629911266175e-08
_MAGIC = 1.5 * 2.0**23  # adding it rounds to an integer, which then stands in the low bits of the sum
_ONE = 0x3F80_0000


def any_deep(gates: Rows, steps: int) -> Boolean:
    """Whether a gate of this warp is below -87 (or a NaN with a sign): the same for all lanes."""
    if isinstance(gates, Bf16Rows):
        top = reduce(ptx.max_u16x2, [w for row in gates.rows for w in row])
        top = ptx.max_u32(top >> Uint32(16), top & Uint32(0xFFFF))
        deep = top > Uint32(_DEEP_BF16)
    else:
        top = reduce(ptx.max_u32, [g.bitcast(Uint32) for s in range(steps) for g in gates.values(s)])
        deep = top > Uint32(_DEEP_BF16 << 16)
    return Boolean(ca.vote_any_sync(deep))


def swiglu(g: Float32, u: Float32, deep: bool) -> Float32:
    """silu(g)·u."""
    if deep:
        ratio, _, scale = _deep_sigmoid(g)
        return u * ratio * g * scale
    ratio, _ = _sigmoid(g)
    return g * ratio * u


def silu_and_dg(g: Float32, u: Float32, da: Float32, weight: Float32) -> tuple[Any, Any]:
    """silu(g), of which a = u·silu(g) and weight·da·∂a/∂u = weight·da·silu(g) are made, and weight·da·∂a/∂g.

    Not for a deep gate: silu(g) may be subnormal where a is not.
    """
    sigmoid, complement = _sigmoid(g)
    silu = g * sigmoid
    return silu, weight * da * u * ptx.fma(silu, complement, sigmoid)


def dswiglu(g: Float32, u: Float32, da: Float32, weight: Float32, deep: bool) -> tuple[Any, Any, Any]:
    """weight·da·∂a/∂g, weight·da·∂a/∂u and a, where a = silu(g)·u.

    d silu/dg = sigmoid·(1 + g·(1 - sigmoid)) = sigmoid + silu·(1 - sigmoid).
    """
    wda = weight * da
    if not deep:
        silu, dg = silu_and_dg(g, u, da, weight)
        return dg, wda * silu, u * silu
    ratio, complement, scale = _deep_sigmoid(g)
    dsilu = ptx.fma(g, complement, Float32(1.0))
    return wda * ratio * dsilu * u * scale, wda * ratio * g * scale, u * ratio * g * scale


def _sigmoid(g: Float32) -> tuple[Float32, Float32]:
    """sigmoid(g) and 1 - sigmoid(g), for g >= -87."""
    t = g * Float32(_MINUS_LOG2E)
    delta = ptx.fma(t, Float32(_MINUS_LN2_LOW), ptx.fma(t, Float32(_MINUS_LN2), -g))
    e = ptx.exp2(t)
    e = ptx.fma(e, delta, e)
    sigmoid = ptx.reciprocal(e + Float32(1.0))
    return sigmoid, e * sigmoid


def _deep_sigmoid(g: Float32) -> tuple[Float32, Float32, Float32]:
    """sigmoid(g) / s, 1 - sigmoid(g), and s."""
    minus = -ptx.clamp(g, -131.0, 87.0)  # a NaN comes back in where g itself is a factor
    shifted = ptx.fma(minus, Float32(_LOG2E), Float32(_MAGIC))
    n = shifted - Float32(_MAGIC)
    f = ptx.fma(minus, Float32(_LOG2E_LOW), ptx.fma(minus, Float32(_LOG2E), -n))
    # Powers of two as additions to the exponent field; -126 <= n <= 189 stands in the low 9 bits of `shifted`.
    n_field = (shifted.bitcast(Uint32) << Uint32(23)).bitcast(Int32)
    excess = int_max(n_field - Int32(64 << 23), Int32(0))
    scale = (Int32(_ONE) - excess).bitcast(Float32)
    scaled_e = (ptx.exp2(f).bitcast(Int32) + (n_field - excess)).bitcast(Float32)
    ratio = ptx.reciprocal(scale + scaled_e)
    return ratio, scaled_e * ratio, scale

"""MXFP8 codes → 16-bit operands of wgmma, on Hopper: to F16 where a tile's scales are close together, else to BF16.

F16, two instructions for two codes: a code is exact in F16, and stays exact times 2^d within a range of d. `F16Range` is
that range for an element format, with d counted from the largest scale of the operand's tile, which becomes the largest d;
the sums then lack the factor 2^(top - shift) of each operand (`f16_exponent`), which the epilogue puts back. NaN codes and
E5M2 infinities stay what they are.

BF16, six instructions, for any scales: a code goes to F16, to FP32, times the block's scale, and is rounded once. For E4M3 the
whole way is exact for scale bytes 3 … 246, for E5M2 for bytes 10 … 239. Outside: below, a value is rounded to a multiple of
bf16's smallest subnormal, 2^-133; above, one past bf16's largest becomes Inf, exactly as it does when dequantised to FP32.
Byte 255 and NaN codes give NaN, E5M2 infinities stay Inf.

Both give wgmma the same values wherever both are exact, so the sums are the same bits.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute.arch as ca
from cutlass import Float16, Float32, Int32, Uint32, select_
from mx_core.formats import E8M0_BIAS, E8M0_NAN, FORMATS, FP32_FRACTION_BITS

from mx_kernels.device.ptx import low_halves

NAN = 0x7FC0_0000
HALF = 0x0040_0000  # 2^-127, an fp32 subnormal
F16_BIAS = 15
F16_MAX_EXPONENT = 15
F16_MIN_SUBNORMAL_EXPONENT = -24
F16_ONE_STEP = 0x0400_0400  # both halves of a word: one step of the exponent field


class F16Range(NamedTuple):
    """Which scales an F16 operand of this element format can hold exactly."""

    shift: int  # the tile's largest scale becomes 2^shift
    spread: int  # the smallest may be 2^spread times smaller

    @classmethod
    def of(cls, fp8: str) -> "F16Range":
        """fp8: "e4m3" or "e5m2"."""
        fmt = FORMATS[f"mxfp8_{fp8}"]
        shift = F16_MAX_EXPONENT - fmt.emax
        smallest = 1 - fmt.bias - fmt.mantissa_bits  # exponent of the smallest subnormal
        # The scale itself must be a normal F16.
        lowest = max(F16_MIN_SUBNORMAL_EXPONENT - smallest, 1 - F16_BIAS)
        return cls(shift, shift - lowest)


def e8m0_to_f32(byte: Uint32) -> Float32:
    """2^(byte-127), exactly: byte 0 is the subnormal 2^-127, byte 255 is NaN."""
    pattern = byte << Uint32(FP32_FRACTION_BITS)
    pattern = Uint32(select_(byte == Uint32(0), Uint32(HALF), pattern))
    return Float32(Uint32(select_(byte == Uint32(E8M0_NAN), Uint32(NAN), pattern)).bitcast(Float32))


def e8m0_to_f16x2(byte: Uint32, top: Int32, fp8: str) -> Uint32:
    """2^(byte - top + shift) in both halves of a word. 0 for bytes too far below top, which only padding has."""
    zero = top - (F16Range.of(fp8).shift + F16_BIAS)  # the byte whose exponent field is 0
    return Uint32(cutlass.max(Int32(byte), zero) - zero) * Uint32(F16_ONE_STEP)


def f16_exponent(top: Int32, fp8: str) -> Int32:
    """E in: value = F16 operand · 2^E."""
    return top - (F16Range.of(fp8).shift + E8M0_BIAS)


def scale_factor(byte: Uint32, top: Int32, element: type, fp8: str) -> Any:
    """What `dequantize_fp8x4` multiplies by; element: Float16 or BFloat16. top is for Float16 only."""
    return e8m0_to_f16x2(byte, top, fp8) if element is Float16 else e8m0_to_f32(byte)


def dequantize_fp8x4(codes: Uint32, scales: list, element: type, fp8: str) -> list[Uint32]:
    """Four codes, each times its `scale_factor`, as two words of two `element`; the first code is the lowest byte and half.

    fp8: "e4m3" or "e5m2".
    """
    return (fp8x4_to_f16 if element is Float16 else fp8x4_to_bf16)(codes, scales, fp8)


def fp8x4_to_bf16(codes: Uint32, scales: list[Float32], fp8: str) -> list[Uint32]:
    """See `dequantize_fp8x4`."""
    body = "mov.b32 {lo, hi}, {$r0}; " + "".join(
        f"cvt.rn.f16x2.{fp8}x2 h, {half}; mov.b32 {{p, q}}, h; "
        f"cvt.f32.f16 x, p; cvt.f32.f16 y, q; "
        f"mul.rn.f32 x, x, {{$r{2 * word + 1}}}; mul.rn.f32 y, y, {{$r{2 * word + 2}}}; "
        f"cvt.rn.bf16x2.f32 {{$w{word}}}, y, x; "
        for word, half in enumerate(("lo", "hi"))
    )
    return list(
        ca.inline_ptx(
            f"{{ .reg .b16 lo, hi, p, q; .reg .b32 h; .reg .f32 x, y; {body}}}",
            write_only_types=[Uint32, Uint32],
            read_only_args=[codes, *scales],
        )
    )


def fp8x4_to_f16(codes: Uint32, scales: list[Uint32], fp8: str) -> list[Uint32]:
    """See `dequantize_fp8x4`."""
    first, second = (low if low is high else low_halves(low, high) for low, high in (scales[:2], scales[2:]))
    return list(
        ca.inline_ptx(
            "{ .reg .b16 lo, hi; .reg .b32 h; mov.b32 {lo, hi}, {$r0}; "
            f"cvt.rn.f16x2.{fp8}x2 h, lo; mul.rn.f16x2 {{$w0}}, h, {{$r1}}; "
            f"cvt.rn.f16x2.{fp8}x2 h, hi; mul.rn.f16x2 {{$w1}}, h, {{$r2}}; }}",
            write_only_types=[Uint32, Uint32],
            read_only_args=[codes, first, second],
        )
    )

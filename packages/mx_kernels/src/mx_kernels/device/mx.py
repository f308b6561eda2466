"""Block maximum → E8M0 scale → FP8 codes: the one device-side copy of the numerics contract (mx_core.scaling is its twin).

Everything works on fp32 bit patterns: no logarithm, no division, no approximate or flushing instruction. A block maximum
travels as the pattern of its absolute value, an unsigned integer, which orders like the value and puts Inf and NaN last.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cutlass import Float32, Uint32, select_
from mx_core import FORMATS, ScaleRounding
from mx_core.formats import FP32_FRACTION_BITS
from mx_core.scaling import round_up_constant

from mx_kernels.device import ptx

INF_PATTERN = 0x7F80_0000
NAN_PATTERN = 0x7FFF_FFFF


@dataclass(frozen=True)
class BlockScaling:
    """How a block becomes a scale byte and codes.

    `format` is the name of an FP8 format of mx_core; or of E2M1, E2M3 or E3M2, whose values come out as E4M3 codes.
    """

    format: str
    rounding: ScaleRounding

    def factor(self, amax: Uint32) -> Uint32:
        """fp32 pattern of 2^(127-b), which takes a block's values to codes; NaN for a block with a NaN or an Inf.

        A subnormal amax needs no normalising: its exponent lies below every FP8 format's lowest scale, so b is 0, the
        factor 2^127. The factor is never subnormal either, because b <= 253.
        """
        format = FORMATS[self.format]
        carried = amax + Uint32(round_up_constant(format, self.rounding))
        factor = ptx.min_u32(
            Uint32((254 + format.emax) << FP32_FRACTION_BITS)
            - (carried & Uint32(0xFF << FP32_FRACTION_BITS)),
            Uint32(254 << FP32_FRACTION_BITS),
        )
        return Uint32(select_(amax >= Uint32(INF_PATTERN), Uint32(NAN_PATTERN), factor))

    @staticmethod
    def scale_byte(factor: Uint32) -> Uint32:
        """The scale byte b of a block in the low 8 bits, from its factor: a NaN factor gives 255 by itself."""
        return Uint32(254) - (factor >> Uint32(FP32_FRACTION_BITS))

    def codes8(self, values: Sequence[Any], factors: Sequence[Any]) -> list[Uint32]:
        """Eight values times their factors as codes: two words, the first code in the lowest byte."""
        scaled = [v * f.bitcast(Float32) for v, f in zip(values, factors, strict=True)]
        fp8 = self.format.removeprefix("mxfp8_")
        if FORMATS[self.format].bits < 8:
            scaled, fp8 = [self.rounded(v) for v in scaled], "e4m3"
        return [ptx.pack_fp8x4(scaled[:4], fp8), ptx.pack_fp8x4(scaled[4:], fp8)]

    def rounded(self, x: Float32) -> Any:
        """The format's nearest value: ties to even, saturating, 0 for NaN. As mx_core.codec.encode."""
        format = FORMATS[self.format]
        bits = x.bitcast(Uint32)
        magnitude = ptx.min_u32(Uint32(bits & Uint32(NAN_PATTERN)), Uint32(format.max_value_bits))
        exponent = ptx.max_u32(Uint32(magnitude & Uint32(INF_PATTERN)), Uint32(format.min_normal_bits))
        magic = exponent + Uint32((FP32_FRACTION_BITS - format.mantissa_bits) << FP32_FRACTION_BITS)
        quanta = magnitude.bitcast(Float32) + magic.bitcast(Float32)
        nearest = (quanta - magic.bitcast(Float32)).bitcast(Uint32) | (bits & Uint32(1 << 31))
        is_nan = (bits & Uint32(NAN_PATTERN)) > Uint32(INF_PATTERN)
        return Uint32(select_(is_nan, Uint32(0), nearest)).bitcast(Float32)

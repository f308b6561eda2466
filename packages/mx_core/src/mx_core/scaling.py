"""From a block's largest magnitude to its E8M0 scale byte, and back: integers on bit patterns.

No log2, no division, no float comparison: fp32 subnormals count, and the same few integer operations
give the same byte on every device. The definition is in docs/numerics.md.
"""

import torch
from torch import Tensor

from mx_core.checks import check_choice, check_dtype, expected
from mx_core.formats import E8M0_BIAS, E8M0_NAN, FP32_FRACTION_BITS, ElementFormat, ScaleRounding
from mx_core.static import static_format

_FRACTION_MASK = (1 << FP32_FRACTION_BITS) - 1
_INF_BITS = 0x7F80_0000
_NAN_BITS = 0x7FC0_0000
_TWO_TO_MINUS_127_BITS = 0x0040_0000  # the only scale that is an fp32 subnormal
_MIN_NORMAL_BITS = 1 << FP32_FRACTION_BITS
_SUBNORMAL_SHIFT = 149 << FP32_FRACTION_BITS  # a subnormal fp32 is its bit pattern, an integer, times 2^-149


def round_up_constant(format: ElementFormat, rounding: ScaleRounding) -> int:
    """What a rule adds to amax's 23 fraction bits so that a carry into the exponent means "one more".

    The four rules differ in this number only. RCEIL carries where f > g (max_value = 1.g * 2^emax), CEIL
    where f > 0, EVEN where f >= 1 - 2^-(m+1), FLOOR never.
    """
    if rounding is ScaleRounding.RCEIL:
        return _FRACTION_MASK - (format.max_value_bits & _FRACTION_MASK)
    if rounding is ScaleRounding.CEIL:
        return _FRACTION_MASK
    if rounding is ScaleRounding.EVEN:
        return 1 << (FP32_FRACTION_BITS - format.mantissa_bits - 1)
    return 0


def amax_to_e8m0(
    amax: Tensor, format: ElementFormat, rounding: ScaleRounding = ScaleRounding.RCEIL
) -> Tensor:
    """Scale byte of blocks whose largest magnitude is `amax`.

    Args:
        amax: any shape; float32, bfloat16 or float16. The sign is ignored.
        format: the element format to be scaled into.
        rounding: the scale rule.

    Returns:
        uint8 of amax's shape: the exponent clamped to [-127, 127] plus 127; 0 where amax is 0, and 255
        where it is NaN or Inf, nowhere else.
    """
    check_dtype("amax", amax, torch.float32, torch.bfloat16, torch.float16)
    rounding = check_choice("rounding", rounding, ScaleRounding)
    format = static_format(format)
    bits = amax.to(torch.float32).view(torch.int32) & 0x7FFF_FFFF
    # Normalise subnormals. `normalised` is (E + 127) << 23 | f for every amax > 0; the exponent part is
    # negative for subnormals, which the arithmetic shift below takes care of.
    subnormal_as_float = bits.to(torch.float32).view(torch.int32) - _SUBNORMAL_SHIFT
    normalised = torch.where(bits < _MIN_NORMAL_BITS, subnormal_as_float, bits)
    exponent = (normalised + round_up_constant(format, rounding)) >> FP32_FRACTION_BITS
    byte = (exponent - format.emax).clamp(0, 2 * E8M0_BIAS)
    return torch.where(bits >= _INF_BITS, E8M0_NAN, byte).to(torch.uint8)


def e8m0_to_float(scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """2^(byte - 127), exactly; 255 gives NaN.

    Args:
        scale: uint8, any shape.
        dtype: torch.float32, torch.bfloat16 or torch.float64 (all hold 2^-127 ... 2^127).
    """
    check_dtype("scale", scale, torch.uint8)
    if dtype not in (torch.float32, torch.bfloat16, torch.float64):
        raise TypeError(expected("dtype", "torch.float32, torch.bfloat16 or torch.float64", dtype))
    return _power_of_two(scale.to(torch.int32)).to(dtype)


def e8m0_to_reciprocal(scale: Tensor) -> Tensor:
    """2^(127 - byte) in float32, exactly, the factor that quantising multiplies by; 255 gives NaN."""
    check_dtype("scale", scale, torch.uint8)
    byte = scale.to(torch.int32)
    return _power_of_two(torch.where(byte == E8M0_NAN, byte, 2 * E8M0_BIAS - byte))


def _power_of_two(byte: Tensor) -> Tensor:
    """float32 of the E8M0 byte held in an int32."""
    bits = byte << FP32_FRACTION_BITS
    bits = torch.where(byte == 0, _TWO_TO_MINUS_127_BITS, bits)
    bits = torch.where(byte == E8M0_NAN, _NAN_BITS, bits)
    return bits.view(torch.float32)

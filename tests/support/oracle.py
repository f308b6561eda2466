"""MX in exact rationals: an oracle that shares no code with the library.

Element values are computed from the tables of OCP MX v1.0, section 5.3, written out again here; scale
rules follow their definitions in docs/numerics.md. Slow and plain on purpose.
"""

from bisect import bisect_left
from dataclasses import dataclass
from fractions import Fraction
from functools import cache


@dataclass(frozen=True)
class Element:
    """One row of the specification's tables."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    finite_codes: int  # non-negative codes 0 ... finite_codes - 1 are numbers
    nan_code: int
    emax: int
    max: Fraction


ELEMENTS = {
    "mxfp8_e4m3": Element(4, 3, 7, 0x7F, 0x7F, 8, Fraction(448)),
    "mxfp8_e5m2": Element(5, 2, 15, 0x7C, 0x7F, 15, Fraction(57344)),
    "mxfp6_e3m2": Element(3, 2, 3, 0x20, 0, 4, Fraction(28)),
    "mxfp6_e2m3": Element(2, 3, 1, 0x20, 0, 2, Fraction(15, 2)),
    "mxfp4_e2m1": Element(2, 1, 1, 0x08, 0, 2, Fraction(6)),
    "mxint8": Element(0, 6, 0, 0x80, 0, 0, Fraction(127, 64)),
}
RULES = ("rceil", "floor", "ceil", "even")


def power_of_two(exponent: int) -> Fraction:
    """2^exponent."""
    return Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent)


@cache
def magnitudes(name: str) -> list[Fraction]:
    """The non-negative finite values, in code order."""
    e = ELEMENTS[name]
    if name == "mxint8":
        return [Fraction(code, 64) for code in range(e.finite_codes)]
    values = []
    for code in range(e.finite_codes):
        exponent, mantissa = code >> e.mantissa_bits, code & ((1 << e.mantissa_bits) - 1)
        fraction = Fraction(mantissa, 1 << e.mantissa_bits)
        if exponent == 0:
            values.append(fraction * power_of_two(1 - e.bias))
        else:
            values.append((1 + fraction) * power_of_two(exponent - e.bias))
    return values


def floor_log2(value: Fraction) -> int:
    """The exponent E of value = 1.f * 2^E."""
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if power_of_two(exponent) <= value else exponent - 1


def scale_byte(amax: Fraction, name: str, rule: str) -> int:
    """The E8M0 byte of a block whose largest magnitude is `amax`."""
    if amax == 0:
        return 0
    element = ELEMENTS[name]
    if rule == "rceil":  # by its definition: the smallest power of two that leaves nothing above max
        scale = floor_log2(amax / element.max)
        if amax / power_of_two(scale) > element.max:
            scale += 1
        assert amax <= element.max * power_of_two(scale)
        assert amax > element.max * power_of_two(scale - 1)
    else:
        exponent = floor_log2(amax)
        fraction = amax / power_of_two(exponent) - 1
        scale = exponent - element.emax
        if rule == "ceil":
            scale += fraction > 0
        elif rule == "even":
            scale += fraction >= 1 - Fraction(1, 2 << element.mantissa_bits)
        else:
            assert rule == "floor"
    return min(max(scale, -127), 127) + 127


def encode(value: Fraction, negative: bool, name: str) -> int:
    """The code nearest to `value` >= 0, ties to the even code, saturating; `negative` is its sign."""
    table = magnitudes(name)
    above = bisect_left(table, value)
    if above == len(table):
        code = above - 1
    elif table[above] == value:
        code = above
    else:
        below = above - 1
        low, high = value - table[below], table[above] - value
        code = below if low < high or (low == high and below % 2 == 0) else above
    if name == "mxint8":
        return -code % 256 if negative else code
    element = ELEMENTS[name]
    return code | (negative << (element.exponent_bits + element.mantissa_bits))


def quantize_block(bits: list[int], name: str, rule: str) -> tuple[int, list[int]]:
    """(scale byte, codes) of one block, given as fp32 bit patterns."""
    exponents = [(pattern >> 23) & 0xFF for pattern in bits]
    if 255 in exponents:
        return 255, [ELEMENTS[name].nan_code] * len(bits)
    values = [abs_value(pattern) for pattern in bits]
    byte = scale_byte(max(values), name, rule)
    unscale = power_of_two(127 - byte)
    return byte, [encode(v * unscale, bool(b >> 31), name) for v, b in zip(values, bits, strict=True)]


def abs_value(bits: int) -> Fraction:
    """The magnitude of a finite fp32 bit pattern."""
    exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    if exponent == 0:
        return mantissa * power_of_two(-149)
    return (mantissa + (1 << 23)) * power_of_two(exponent - 150)

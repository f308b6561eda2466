"""The element formats of OCP Microscaling Formats (MX) v1.0, as data.

Standard library only: a kernel generator, a test oracle and a build script can all read the formats
without importing torch. To add a format, describe it here.

Source: "OCP Microscaling Formats (MX) Specification", version 1.0, sections 5.2 and 5.3.
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum

BLOCK_SIZE = 32
"""Elements that share one scale."""

E8M0_BIAS = 127
"""Scale byte b means 2^(b - 127)."""

E8M0_NAN = 255
"""The scale byte that means NaN. It is never read as Inf."""

FP32_FRACTION_BITS = 23
FP32_BIAS = 127


class Specials(StrEnum):
    """Which codes of an element format are not numbers."""

    NONE = "none"  # every code is a number
    NAN = "nan"  # the all-ones magnitude is NaN, there is no Inf ("FN" formats)
    IEEE = "ieee"  # the all-ones exponent holds Inf and NaN


@dataclass(frozen=True)
class ElementFormat:
    """One element format: a sign and a magnitude of `exponent_bits` and `mantissa_bits`.

    MXINT8 fits the same description: no exponent field, so every code is "subnormal", a multiple of
    2^-6, and the sign is two's complement.
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: Specials = Specials.NONE
    twos_complement: bool = False
    values: tuple[float, ...] = field(init=False, repr=False, compare=False)
    """The value of every code, in code order; each is exact in fp32."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(self.decode(code) for code in range(1 << self.bits)))

    def __repr__(self) -> str:
        return self.name.upper()

    @property
    def has_nan(self) -> bool:
        """Whether some code means NaN."""
        return self.specials is not Specials.NONE

    @property
    def sign_bit(self) -> int:
        """Mask of the sign bit in a code."""
        return 1 << (self.bits - 1)

    @property
    def max_code(self) -> int:
        """Code of the largest finite value."""
        top = self.sign_bit - 1
        if self.specials is Specials.NAN:
            return top - 1
        if self.specials is Specials.IEEE:
            return top - (1 << self.mantissa_bits)
        return top

    @property
    def nan_code(self) -> int:
        """Code that stands for NaN; 0 in formats without NaN (there the scale byte 255 says it)."""
        return self.sign_bit - 1 if self.has_nan else 0

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal value; subnormals are multiples of 2^(emin - mantissa_bits)."""
        return 1 - self.bias

    @property
    def emax(self) -> int:
        """Exponent of the largest value: floor(log2(max_value))."""
        return (self.max_code >> self.mantissa_bits) - self.bias

    @property
    def max_value(self) -> float:
        """Largest finite value."""
        return self.values[self.max_code]

    @property
    def min_normal(self) -> float:
        """Smallest positive normal value (for MXINT8, where nothing is normal, 1.0)."""
        return 2.0**self.emin

    @property
    def min_subnormal(self) -> float:
        """Smallest positive value."""
        return 2.0 ** (self.emin - self.mantissa_bits)

    @property
    def max_value_bits(self) -> int:
        """Bit pattern of max_value in fp32: the largest code, moved to fp32's fields and bias."""
        shift = FP32_FRACTION_BITS - self.mantissa_bits
        return (self.max_code << shift) + ((FP32_BIAS - self.bias) << FP32_FRACTION_BITS)

    @property
    def min_normal_bits(self) -> int:
        """Bit pattern of min_normal in fp32."""
        return (self.emin + FP32_BIAS) << FP32_FRACTION_BITS

    def decode(self, code: int) -> float:
        """The value of one code, exactly."""
        if not 0 <= code < 1 << self.bits:
            raise ValueError(f"code: expected 0 <= code < {1 << self.bits} for {self.name}, got {code}")
        if self.twos_complement:
            return (code - 2 * (code & self.sign_bit)) * self.min_subnormal
        sign = -1.0 if code & self.sign_bit else 1.0
        magnitude = code & (self.sign_bit - 1)
        exponent, fraction = divmod(magnitude, 1 << self.mantissa_bits)
        if magnitude > self.max_code:
            is_inf = self.specials is Specials.IEEE and fraction == 0
            return sign * math.inf if is_inf else math.nan
        if exponent:  # normal: put the implicit one in front
            fraction += 1 << self.mantissa_bits
        return sign * math.ldexp(fraction, max(exponent, 1) - self.bias - self.mantissa_bits)


MXFP8_E4M3 = ElementFormat("mxfp8_e4m3", 8, 4, 3, bias=7, specials=Specials.NAN)
MXFP8_E5M2 = ElementFormat("mxfp8_e5m2", 8, 5, 2, bias=15, specials=Specials.IEEE)
MXFP6_E3M2 = ElementFormat("mxfp6_e3m2", 6, 3, 2, bias=3)
MXFP6_E2M3 = ElementFormat("mxfp6_e2m3", 6, 2, 3, bias=1)
MXFP4_E2M1 = ElementFormat("mxfp4_e2m1", 4, 2, 1, bias=1)
MXINT8 = ElementFormat("mxint8", 8, 0, 6, bias=1, twos_complement=True)

FORMATS: dict[str, ElementFormat] = {
    format.name: format for format in (MXFP8_E4M3, MXFP8_E5M2, MXFP6_E3M2, MXFP6_E2M3, MXFP4_E2M1, MXINT8)
}


class ScaleRounding(StrEnum):
    """How a block's largest magnitude becomes its power-of-two scale; see docs/numerics.md.

    With amax = 1.f * 2^E and max = 1.g * 2^emax the largest value of the element format.
    """

    RCEIL = "rceil"  # smallest s with amax / s <= max (arXiv 2506.08027); nothing saturates
    FLOOR = "floor"  # E - emax (OCP MX v1.0, section 6.3); values above max * s saturate
    CEIL = "ceil"  # E - emax, plus 1 if f > 0
    EVEN = "even"  # E - emax, plus 1 if amax rounds up to a power of two in the format's mantissa


class ScaleLayout(StrEnum):
    """How scale bytes lie in memory; see docs/layouts.md."""

    LINEAR = "linear"  # (..., R, C)
    BLOCKED_128X4 = "blocked_128x4"  # (..., ceil(R/128), ceil(C/4), 32, 4, 4), what tcgen05 reads


class RowMap(StrEnum):
    """How the rows of E groups lie in memory; see docs/layouts.md."""

    COMPACT = "compact"  # the groups' rows, one after the other, without padding
    ALIGNED = "aligned"  # every group starts at a multiple of 128 rows

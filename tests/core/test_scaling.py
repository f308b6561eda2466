"""The four scale rules against exact rationals: every bf16 pattern, and fp32 around every boundary."""

import math

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch
from mx_core import FORMATS, MXFP8_E4M3, ElementFormat, ScaleRounding, amax_to_e8m0, e8m0_to_float
from mx_core.scaling import e8m0_to_reciprocal
from support import oracle
from torch import Tensor

FORMAT = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
RULES = pytest.mark.parametrize("rounding", ScaleRounding)


def from_bits(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def expected_bytes(bits: Tensor, format: ElementFormat, rounding: ScaleRounding) -> list[int]:
    return [
        255
        if pattern >= 0x7F80_0000
        else oracle.scale_byte(oracle.abs_value(pattern), format.name, rounding.value)
        for pattern in bits.tolist()
    ]


@FORMAT
@RULES
def test_all_65536_bfloat16_patterns(format: ElementFormat, rounding: ScaleRounding) -> None:
    patterns = torch.arange(1 << 16, dtype=torch.int32)
    amax = patterns.to(torch.uint16).view(torch.bfloat16)
    expected = expected_bytes(patterns[: 1 << 15] << 16, format, rounding)
    assert amax_to_e8m0(amax, format, rounding).tolist() == expected * 2  # the sign is ignored


@FORMAT
@RULES
def test_fp32_around_every_boundary(format: ElementFormat, rounding: ScaleRounding) -> None:
    """Around 2^k, max * 2^k and the EVEN rule's threshold, for every k; and random patterns."""
    exponents = torch.arange(-149, 128, dtype=torch.float64)
    threshold = 2 - 2.0 ** -(format.mantissa_bits + 1)
    centres = torch.cat(
        [factor * exponents.exp2() for factor in (1.0, format.max_value / 2.0**format.emax, threshold)]
    )
    bits = centres.to(torch.float32).view(torch.int32).to(torch.int64)[:, None] + torch.arange(-4, 5)
    bits = torch.cat([bits.flatten(), torch.randint(0, 0x7F80_0000, (4000,))])
    bits = bits[(bits >= 0) & (bits < 0x7F80_0000)].unique()
    assert amax_to_e8m0(from_bits(bits), format, rounding).tolist() == expected_bytes(bits, format, rounding)


@FORMAT
@RULES
def test_special_and_extreme_values(format: ElementFormat, rounding: ScaleRounding) -> None:
    amax = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan])
    assert amax_to_e8m0(amax, format, rounding).tolist() == [0, 0, 255, 255, 255, 255]
    finite = amax_to_e8m0(torch.tensor([torch.finfo(torch.float32).max]), format, rounding)
    assert finite.item() <= 254  # 255 is NaN: a finite block never gets it


def test_division_would_round_here() -> None:
    """Dividing by 448 and rounding up differs from the rule at fp32 0x04600001."""
    amax = from_bits(torch.tensor([0x0460_0001]))
    assert amax_to_e8m0(amax, MXFP8_E4M3).item() == oracle.scale_byte(
        oracle.abs_value(0x0460_0001), "mxfp8_e4m3", "rceil"
    )
    assert amax_to_e8m0(amax, MXFP8_E4M3).item() == 1


def test_rounding_up_is_not_the_e8m0_cast() -> None:
    """C05: 1, 1.25, 1.5, 2.5, 3, 6 up to a power of two; the casts to E8M0 round to nearest."""
    x = torch.tensor([1, 1.25, 1.5, 2.5, 3, 6])
    up = [0x7F, 0x80, 0x80, 0x81, 0x81, 0x82]
    # max of MXINT8 in units of its emax is 127/64, so CEIL is the plain round up.
    assert amax_to_e8m0(x, FORMATS["mxint8"], ScaleRounding.CEIL).tolist() == up
    assert amax_to_e8m0(x * 448, MXFP8_E4M3).tolist() == up
    nearest = [0x7F, 0x7F, 0x80, 0x80, 0x81, 0x82]
    assert x.numpy().astype(ml_dtypes.float8_e8m0fnu).view(np.uint8).tolist() == nearest


@FORMAT
def test_floor_is_gfloats(format: ElementFormat) -> None:
    values = torch.randn(300).exp() * torch.randint(-100, 100, (300,)).double().exp2()
    theirs = [gfloat.compute_scale_amax(format.emax, np.array([v])) for v in values.tolist()]
    ours = e8m0_to_float(amax_to_e8m0(values.float(), format, ScaleRounding.FLOOR), torch.float64)
    assert ours.tolist() == theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_byte_to_float(dtype: torch.dtype) -> None:
    values = e8m0_to_float(torch.arange(256, dtype=torch.uint8), dtype)
    assert values.dtype == dtype
    assert values[:255].double().tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert values[255].isnan()
    theirs = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    np.testing.assert_array_equal(values.double().numpy(), theirs)


def test_every_reciprocal() -> None:
    values = e8m0_to_reciprocal(torch.arange(256, dtype=torch.uint8))
    assert values[:255].double().tolist() == [2.0 ** (127 - byte) for byte in range(255)]
    assert values[255].isnan()


def test_float16_amax_and_shapes() -> None:
    amax = torch.tensor([[448.0, 449.0], [2.0**-24, 65504.0]], dtype=torch.float16)
    assert torch.equal(amax_to_e8m0(amax, MXFP8_E4M3), amax_to_e8m0(amax.float(), MXFP8_E4M3))
    assert amax_to_e8m0(amax.new_zeros(0, 3), MXFP8_E4M3).shape == (0, 3)


def test_errors() -> None:
    with pytest.raises(TypeError, match=r"amax: expected .*, got torch.float64"):
        amax_to_e8m0(torch.zeros(1, dtype=torch.float64), MXFP8_E4M3)
    with pytest.raises(
        ValueError, match=r"rounding: expected one of \['rceil', 'floor', 'ceil', 'even'\], got 'up'"
    ):
        amax_to_e8m0(torch.zeros(1), MXFP8_E4M3, "up")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"scale: expected torch.uint8, got torch.float32"):
        e8m0_to_float(torch.zeros(1))
    with pytest.raises(TypeError, match=r"dtype: expected .*, got torch.float16"):
        e8m0_to_float(torch.zeros(1, dtype=torch.uint8), torch.float16)

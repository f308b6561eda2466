"""Quantisation error: by hand, and by plain loops."""

import math

import pytest
import torch
from mx_core import (
    FORMATS,
    MXFP4_E2M1,
    MXFP8_E4M3,
    ElementFormat,
    ScaleRounding,
    dequantize,
    quantization_error,
    quantize,
)


@pytest.mark.parametrize("rounding", ScaleRounding)
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_against_loops(format: ElementFormat, rounding: ScaleRounding) -> None:
    x = torch.randn(6, 70) * torch.randint(-12, 3, (6, 70)).exp2()
    mx = quantize(x, format, axis=0, rounding=rounding)
    values = dequantize(mx, torch.float64).flatten().tolist()
    scales = [2.0 ** (b - 127) for b in mx.scale.movedim(-1, 0).expand(6, -1).flatten().tolist()]
    pairs = list(zip(x.flatten().tolist(), values, scales, strict=True))
    error = quantization_error(x, mx)
    ratio = sum(v * v for v, _, _ in pairs) / sum((v - q) ** 2 for v, q, _ in pairs)
    assert error.sqnr_db == pytest.approx(10 * math.log10(ratio), rel=1e-9)
    assert error.underflow == sum(q == 0 and v != 0 for v, q, _ in pairs) / 420
    assert error.saturation == sum(abs(v) > format.max_value * s for v, _, s in pairs) / 420
    if rounding in (ScaleRounding.RCEIL, ScaleRounding.CEIL):
        assert error.saturation == 0
    if rounding is ScaleRounding.FLOOR and format is MXFP4_E2M1:
        assert error.saturation > 0


def test_by_hand() -> None:
    x = torch.tensor([4.0, 0.2, 0.0, -1.0])  # one step of E2M1 below 1 is 0.5: 0.2 becomes 0
    error = quantization_error(x, quantize(x, MXFP4_E2M1))
    assert error.underflow == 0.25
    assert error.saturation == 0
    assert error.sqnr_db == pytest.approx(10 * math.log10(17.04 / 0.04), rel=1e-6)
    clipped = torch.tensor([957.0, 1.0])
    assert (
        quantization_error(clipped, quantize(clipped, MXFP8_E4M3, rounding=ScaleRounding.FLOOR)).saturation
        == 0.5
    )


def test_exact_bad_and_empty() -> None:
    exact = torch.tensor([1.0, 2.0, -448.0])
    assert quantization_error(exact, quantize(exact, MXFP8_E4M3)).sqnr_db == math.inf
    bad = torch.tensor([1.0, math.nan])
    assert math.isnan(quantization_error(bad, quantize(bad, MXFP8_E4M3)).sqnr_db)
    empty = quantization_error(torch.zeros(0, 32), quantize(torch.zeros(0, 32), MXFP8_E4M3))
    assert (empty.sqnr_db, empty.underflow, empty.saturation) == (math.inf, 0, 0)
    with pytest.raises(ValueError, match=r"x: expected shape \(2\), got shape \(3,\)"):
        quantization_error(exact, quantize(bad, MXFP8_E4M3))


def test_bytes_of_a_step_of_precision() -> None:
    """E4M3 has 3 mantissa bits, MXINT8 6: about 31 and 42 dB on normal data."""
    x = torch.randn(256, 1024)
    assert 30 < quantization_error(x, quantize(x, MXFP8_E4M3)).sqnr_db < 33
    assert 40 < quantization_error(x, quantize(x, FORMATS["mxint8"])).sqnr_db < 44

"""mx_core on a million elements, one CPU thread; how to run and what is compared: conftest.py."""

import pytest
import torch
from benchmarks.ratios import clock
from mx_core import MXFP4_E2M1, MXFP8_E4M3, ElementFormat, RowMap, ScaleLayout, dequantize, quantize
from mx_core.reference import grouped_fprop, grouped_wgrad

pytestmark = [pytest.mark.bench, pytest.mark.benchmark(timer=clock, min_rounds=15)]
EXP, PRODUCT = "exp of 2^20 floats", "fp32 product of 512^3"


@pytest.mark.parametrize("axis", [-1, -2], ids=["row", "column"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_quantize(against, dtype: torch.dtype, axis: int) -> None:
    x = torch.randn(1024, 1024).to(dtype)
    against(EXP, quantize, x, MXFP8_E4M3, axis=axis, layout=ScaleLayout.BLOCKED_128X4)


@pytest.mark.parametrize("format", [MXFP4_E2M1], ids=lambda f: f.name)
def test_quantize_packed(against, format: ElementFormat) -> None:
    against(EXP, quantize, torch.randn(1024, 1024), format)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_dequantize(against, dtype: torch.dtype) -> None:
    mx = quantize(torch.randn(1024, 1024), MXFP8_E4M3, layout=ScaleLayout.BLOCKED_128X4)
    against(EXP, dequantize, mx, dtype)


@pytest.mark.parametrize("mode", ["fprop", "wgrad"])
def test_grouped_gemm(against, mode: str) -> None:
    """512 rows in four groups, N and K 512, float64 sums."""
    offs = torch.tensor([128, 128, 384, 512], dtype=torch.int32)
    a, b = (
        torch.randn(512, 512),
        torch.randn(512 if mode == "wgrad" else 4, 512, *([] if mode == "wgrad" else [512])),
    )
    axis, function = (-2, grouped_wgrad) if mode == "wgrad" else (-1, grouped_fprop)
    against(
        PRODUCT,
        function,
        quantize(a, MXFP8_E4M3, axis=axis),
        quantize(b, MXFP8_E4M3, axis=axis),
        offs,
        row_map=RowMap.ALIGNED,
    )

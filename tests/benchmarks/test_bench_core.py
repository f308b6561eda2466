"""A million elements on one CPU thread: uv run pytest tests/benchmarks/test_bench_core.py -m bench -n 0 --benchmark-enable."""

import pytest
import torch
from mx_core import MXFP8_E4M3, ScaleLayout, dequantize, quantize

pytestmark = pytest.mark.bench


@pytest.mark.parametrize("axis", [-1, -2], ids=["row", "column"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_quantize(benchmark, dtype: torch.dtype, axis: int) -> None:
    x = torch.randn(1024, 1024).to(dtype)
    benchmark(quantize, x, MXFP8_E4M3, axis=axis, layout=ScaleLayout.BLOCKED_128X4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_dequantize(benchmark, dtype: torch.dtype) -> None:
    mx = quantize(torch.randn(1024, 1024), MXFP8_E4M3, layout=ScaleLayout.BLOCKED_128X4)
    benchmark(dequantize, mx, dtype)

"""Tiles chosen by measuring, on hardware: the timer, capture, and that the result stays right."""

import pytest
import torch
from mx_kernels import arch
from mx_kernels.generic import autotune

from kernels.gemm_cases import Gemm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SIZES = (4096, 2048, 1024)


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    monkeypatch.setenv("MX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(autotune, "_chosen", {})


def test_the_fastest_product_is_found_but_not_while_a_graph_is_captured():
    device = torch.device("cuda", torch.cuda.current_device())
    x = {n: torch.randn(n, n, device=device, dtype=torch.bfloat16) for n in SIZES}

    def run(n: int) -> None:
        torch.mm(x[n], x[n])

    run(SIZES[0])
    torch.cuda.synchronize()
    with autotune.enabled():
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            run(SIZES[0])
            assert autotune.best("mm", device, lambda: SIZES, run, SIZES[0]) == SIZES[0]
        assert autotune.best("mm", device, lambda: SIZES, run, SIZES[0]) == SIZES[-1]
    seconds = [autotune.device_seconds(lambda n=n: run(n), device) for n in SIZES]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize("formats", [("bf16", "bf16"), ("mxfp8_e4m3", "mxfp8_e4m3")], ids=str)
@pytest.mark.parametrize("mode", ["fprop", "dgrad", "wgrad"])
def test_measured_tiles_give_right_results(mode, formats):
    backend = {"sm_90a": "sm90", "sm_100a": "sm100", "sm_103a": "sm100"}[arch.target_of(torch.device("cuda"))]
    case = Gemm(mode, (700, 0, 33, 1024), 512, 768, formats, out_dtype=torch.float32, backend=backend)
    a, b = case.operands()
    with autotune.enabled():
        got = case.run(a, b, device="cuda")
    assert len(autotune._chosen) == 1
    assert torch.equal(got, case.expected(a, b).float())

"""The CPU backend as users call it: route, gather, SwiGLU, and a whole MoE layer; how to run: conftest.py."""

import pytest
import torch
from benchmarks.ratios import clock
from mx_bench.layer import routed_inputs
from mx_bench.shapes import MoEShape
from mx_core import MXFP8_E4M3
from mx_kernels import gather_quantize, moe_mlp, prepare_weights, route, swiglu_quantize

pytestmark = [pytest.mark.bench, pytest.mark.benchmark(timer=clock, min_rounds=15)]
EXP, PRODUCT = "exp of 2^20 floats", "fp32 product of 512^3"
SHAPE = MoEShape("benchmark", 512, 256, 128, 8, 2, "half a second on a CPU")


def ids() -> torch.Tensor:
    return torch.rand(8192, 64).topk(8).indices


def test_route(against) -> None:
    against(EXP, route, ids(), 64)


def test_gather_quantize(against) -> None:
    routing = route(ids()[:512], 64)
    against(EXP, gather_quantize, torch.randn(512, 128).bfloat16(), routing.token_of, None, MXFP8_E4M3)


def test_swiglu_quantize(against) -> None:
    offs = torch.tensor([512, 1024], dtype=torch.int32)
    against(EXP, swiglu_quantize, torch.randn(1024, 512).bfloat16(), offs, MXFP8_E4M3)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
@pytest.mark.parametrize("passes", ["forward", "both"])
def test_layer(against, recipe: str, passes: str) -> None:
    x, topk_ids, weights, w1, w2, dout = routed_inputs(SHAPE, "cpu")
    prepared = prepare_weights(w1.detach(), w2.detach(), recipe=recipe) if recipe != "bf16" else None

    def forward() -> torch.Tensor:
        return moe_mlp(x, topk_ids, weights, w1, w2, recipe=recipe, wq=prepared)

    def both() -> object:
        return torch.autograd.grad(forward(), (x, weights, w1, w2), dout)

    against(PRODUCT, torch.no_grad()(forward) if passes == "forward" else both)

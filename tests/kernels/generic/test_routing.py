"""route, slot_weights, gather and combine against mx_core."""

import pytest
import torch

from .inputs import routed

NAN = float("nan")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_route(gpu, dtype):
    cases = [
        (1, 1, 1),
        (1000, 8, 8),
        (4096, 8, 128),
        (16384, 8, 512),
        (20000, 1, 1024),
        (7, 3, 33),
        (40000, 8, 256),
    ]
    for tokens, k, experts in gpu.pick([(150, 3, 33)], cases):
        gpu.check("route", torch.randint(-2, experts + 2, (tokens, k)).to(dtype), experts)


def test_route_skewed(gpu):  # C13
    for ids in (torch.zeros(600, 2), torch.full((600, 2), 31), torch.full((5, 1), -1), torch.empty(0, 2))[
        :: gpu.pick(3, 1)
    ]:
        gpu.check("route", ids.int(), 32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gather(gpu, dtype):
    for tokens, k, experts, cols in gpu.pick(
        [(60, 2, 3, 160)], [(60, 2, 3, 160), (1000, 8, 16, 1056), (300, 1, 8, 32)]
    ):
        x, slot_of, token_of, _, weights = routed(tokens, k, experts, cols)
        x, rows = x.to(dtype), token_of.shape[0]
        slots = gpu.check("slot_weights", weights, slot_of, rows)[0]
        gpu.check("gather", x, token_of)
        x[3, 5], x[4] = NAN, 0
        for layout in ("blocked_128x4", "linear")[: gpu.pick(1, 2)]:
            gpu.check("gather_quantize", x, token_of, None, "mxfp8_e4m3", -1, "rceil", layout)
            gpu.check("gather_quantize", x, token_of, slots, "mxfp8_e4m3", -2, "rceil", layout)
            gpu.check("gather_quantize_dual", x, token_of, slots, "mxfp8_e4m3", "rceil", layout)
            gpu.check("gather_quantize_dual", x, token_of, None, "mxfp8_e5m2", "floor", layout)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_combine(gpu, dtype):
    for tokens, k, experts, cols in gpu.pick(
        [(20, 3, 4, 160)], [(20, 3, 4, 160), (1000, 8, 16, 1056), (300, 1, 8, 4096)]
    ):
        _, slot_of, token_of, _, weights = routed(tokens, k, experts, cols)
        y = torch.randn(token_of.shape[0], cols).to(dtype)
        y[token_of < 0] = NAN  # never read
        weights[slot_of < 0] = NAN
        gpu.check("combine", y, slot_of, weights)
        gpu.check("combine", y, slot_of, None)
        dout = torch.randn(tokens, cols).to(dtype)
        dy, dweights = gpu.run("combine_backward", dout, y, slot_of, weights)
        want_dy, want = torch.ops.mx.combine_backward(dout, y, slot_of, weights, "cpu")
        assert torch.equal(dy, want_dy)
        size = (dout.double()[:, None] * y.double()[slot_of.clamp(min=0)]).norm(dim=-1).nan_to_num()
        assert ((dweights - want).abs() <= 2e-6 * size).all()
        assert not dweights[slot_of < 0].any()


def test_no_token(gpu):  # C12
    x, slot_of, token_of = (
        torch.empty(0, 64).bfloat16(),
        torch.empty(0, 2).int(),
        torch.full((128,), -1).int(),
    )
    gpu.check("gather", x, token_of)
    gpu.check("gather_quantize_dual", x, token_of, None, "mxfp8_e4m3", "rceil", "blocked_128x4")
    gpu.check("combine", torch.ones(128, 64).bfloat16(), slot_of, None)
    gpu.check("slot_weights", torch.empty(0, 2), slot_of, 128)

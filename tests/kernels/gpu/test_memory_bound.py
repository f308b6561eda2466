"""What only hardware shows of the memory-bound kernels: size, skew, repeatability, streams and graphs."""

import os
import subprocess
import sys

import pytest
import torch
from mx_core import MXFP8_E4M3, dequantize, quantize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
mx = torch.ops.mx
MX = ("mxfp8_e4m3", "rceil", "blocked_128x4")


def same(a, b):
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a, b, strict=True))


def layer(x, ids, weights, experts, h, da):
    """All memory-bound ops of a layer's forward and backward; h, da stand for what its GEMMs would give."""
    slot_of, token_of, offs = mx.route(ids, experts)
    rows = token_of.shape[0]
    slots = mx.slot_weights(weights, slot_of, rows)
    out = mx.combine(mx.gather(x, token_of), slot_of, weights)
    real = token_of >= 0
    return (
        slot_of,
        token_of,
        offs,
        out,
        *mx.gather_quantize_dual(x, token_of, slots, *MX),
        *(torch.where(real[:, None], t.float(), 0) for t in (mx.swiglu_quantize(h, offs, *MX)[0],)),
        torch.where(real, mx.dswiglu_quantize(da, h, slots, offs, *MX)[-1], 0),
        *mx.combine_backward(x, mx.gather(x, token_of), slot_of, weights),
    )


def layer_inputs(tokens=500, k=4, experts=32, width=256, skew=None):
    x = torch.randn(tokens, width, device="cuda").bfloat16()
    ids = torch.randint(0, experts, (tokens, k), device="cuda")
    if skew == "one":
        ids.fill_(7)
    elif skew == "most":
        ids[:] = torch.where(torch.rand(ids.shape, device="cuda") < 0.99, 31, ids)
    rows = mx.route(ids, experts)[1].shape[0]
    h = torch.randn(rows, 2 * width, device="cuda").bfloat16()
    da = torch.randn(rows, width, device="cuda").bfloat16()
    return x, ids, torch.rand(tokens, k, device="cuda"), experts, h, da


def test_past_two_to_the_31_elements():  # C09
    x = torch.zeros(65537, 32768, dtype=torch.bfloat16, device="cuda")
    x[0], x[-1] = 1.0, 448.0
    data, scale = mx.quantize(x, "mxfp8_e4m3", -1, "rceil", "linear", None, "aligned")
    del x
    codes = data.view(torch.uint8)
    for row, byte, code in ((0, 0x77, 0x78), (-1, 0x7F, 0x7E)):
        assert (scale[row] == byte).all()
        assert (codes[row] == code).all()
    assert not scale[1:-1].any()
    assert not any(part.any() for part in codes[1:-1].split(8192))


@pytest.mark.parametrize("skew", [None, "one", "most"])
def test_the_same_bits_in_every_run(skew):  # C13
    inputs = layer_inputs(skew=skew)
    first = layer(*inputs)
    assert all(same(layer(*inputs), first) for _ in range(50))


def test_no_synchronisation():  # C16
    inputs = layer_inputs()
    want = layer(*inputs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = layer(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert same(got, want)


def test_graph_replay_with_other_routing():  # C16
    x, ids, weights, experts, h, da = layer_inputs()
    layer(x, ids, weights, experts, h, da)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(x, ids, weights, experts, h, da)
    for skew in ("most", None):
        fresh = layer_inputs(skew=skew)
        for old, new in zip((x, ids, weights, h, da), (*fresh[:3], *fresh[4:]), strict=True):
            old.copy_(new)
        ids[3:50] = -1  # fewer rows than there were
        graph.replay()
        assert same(captured, layer(x, ids, weights, experts, h, da))


def test_on_another_stream():
    x = torch.randn(4096, 4096, device="cuda").bfloat16()
    want = mx.quantize_dual(x, *MX)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        y = x + 0  # what the kernel reads is made on this stream
        got = mx.quantize_dual(y, *MX)
    stream.synchronize()
    assert same(got, want)


def test_quantising_twice():
    x = torch.randn(512, 512, device="cuda").bfloat16()
    for axis in (-1, -2):
        once = dequantize(quantize(x, MXFP8_E4M3, axis=axis))
        data, _ = mx.quantize(once, "mxfp8_e4m3", axis, "rceil", "linear", None, "aligned")
        twice = quantize(once, MXFP8_E4M3, axis=axis)
        assert torch.equal(data.view(torch.uint8), twice.data.view(torch.uint8))
        assert torch.equal(dequantize(twice), once)


CACHE = """
import torch, mx_kernels, sys
torch.manual_seed(0)
for width in (64, 128, 64):
    for dtype in (torch.bfloat16, torch.float32):
        for rows in (1, 127, 128):
            x = torch.randn(rows, width, device="cuda").to(dtype)
            for t in torch.ops.mx.quantize_dual(x, "mxfp8_e4m3", "rceil", "blocked_128x4"):
                sys.stdout.write(t.view(torch.uint8).cpu().numpy().tobytes().hex())
"""


def test_cold_and_warm_cache(tmp_path):  # C15
    env = os.environ | {"MX_CACHE_DIR": str(tmp_path)}
    runs = [
        subprocess.run([sys.executable, "-c", CACHE], env=env, capture_output=True, check=True).stdout
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mx.quantize(torch.ones(4, 32), *MX[:1], -1, *MX[1:], None, "aligned", "sm90"), "cpu"),
        (lambda: mx.quantize(torch.ones(4, 32, device="cuda").half(), *MX[:1], -1, *MX[1:]), "bfloat16"),
        (lambda: mx.quantize(torch.ones(32, 4, device="cuda").T, *MX[:1], -1, *MX[1:]), "contiguous"),
        (lambda: mx.quantize_dual(torch.ones(4, 32, device="cuda"), *MX, torch.tensor([4]).int()), "offs"),
        (lambda: mx.quantize_dual(torch.ones(4, 32, device="cuda"), *MX, torch.tensor([4]).cuda()), "offs"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        call()

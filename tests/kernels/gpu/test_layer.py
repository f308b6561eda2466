"""A whole MoE layer, forward and backward, on a GPU: values, groups, graphs, recompilation, prepared weights."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from mx_kernels import MXExperts, jit, moe_mlp
from torch._dynamo.testing import CompileCounterWithBackend

from kernels.layer import (
    Layer,
    assert_never_stale,
    exact_layer,
    ids_of_sizes,
    make_layer,
    quantised_layer,
    relative_error,
    weight_changes,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DEVICE = "cuda"
BF16 = torch.bfloat16
NAMES = ("out", "dx", "dweights", "dw1", "dw2")
SIZES = {
    "an empty one": [700, 0, 33, 1024],
    "all but one empty": [0, 0, 400],
    "one row each": [1] * 40,
    "one has most": [1937, *[1] * 31],
    "around a tile": [127, 128, 129],
}


def to_gpu(layer: Layer) -> Layer:
    return Layer(**{name: t.to(DEVICE) for name, t in vars(layer).items()})


def cpu(results: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [t.cpu() for t in results]


def assert_same(got, want) -> None:
    for name, g, w in zip(NAMES, got, want, strict=False):
        assert torch.equal(g, w), name


def poison_free_memory() -> None:
    """The next allocations, small or large, find NaN."""
    held = [torch.full((n,), torch.nan, device=DEVICE) for n in (*[1 << 16] * 64, *[1 << 24] * 4)]
    del held


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# values ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(
    ("recipe", "dtype", "tolerance"),
    [
        ("bf16", BF16, 6e-3),
        ("mxfp8", BF16, 4e-3),
        ("mxfp8", torch.float32, 2e-3),
        ("mxfp8_floor", BF16, 4e-3),
    ],
)
def test_gradients_against_float64(recipe, dtype, tolerance, sizes):
    """Out and every gradient (C10, C13); weights of 0 and 1e-30 (C22); what differs is rounding and rare codes."""
    layer = make_layer(D=288, H=160, E=len(sizes), ids=ids_of_sizes(sizes), dtype=dtype)
    layer.weights[0], layer.weights[1] = 0.0, 1e-30
    want = exact_layer(layer) if recipe == "bf16" else quantised_layer(layer, recipe)
    on_gpu = to_gpu(layer)
    poison_free_memory()
    first = on_gpu.run(moe_mlp, recipe=recipe)
    for name, got, exact in zip(NAMES, cpu(first), want, strict=True):
        assert got.isfinite().all(), name
        assert relative_error(got, exact) <= tolerance, (name, relative_error(got, exact))
    assert relative_error(first[2][0].cpu(), want[2][0]) <= 0.05  # the gradient of a weight of 0
    for e, size in enumerate(sizes):
        assert size or not (first[3][e].any() or first[4][e].any())
    for _ in range(5):
        assert_same(on_gpu.run(moe_mlp, recipe=recipe), first)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_several_experts_a_token(recipe):
    """Eight of 24, choices dropped as expert parallelism drops them."""
    layer = make_layer(T=300, D=256, H=128, E=24, k=8, dtype=BF16)
    layer.ids[::3, 1], layer.ids[5] = -1, 24
    want = exact_layer(layer) if recipe == "bf16" else quantised_layer(layer, recipe)
    got = cpu(to_gpu(layer).run(moe_mlp, recipe=recipe))
    for name, g, w in zip(NAMES, got, want, strict=True):
        assert relative_error(g, w) <= 6e-3, (name, relative_error(g, w))
    assert not got[0][5].any()
    assert not got[2][::3, 1].any()


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_no_token(recipe):
    """C12: zero gradients, not None."""
    out, dx, dweights, dw1, dw2 = to_gpu(make_layer(T=0, k=1, dtype=BF16)).run(moe_mlp, recipe=recipe)
    assert (out.shape, dx.shape, dweights.shape) == ((0, 64), (0, 64), (0, 1))
    assert not dw1.any()
    assert not dw2.any()


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
@pytest.mark.parametrize("M", [127, 128, 129])
def test_gate_is_the_first_half(recipe, M):
    """C14: silu(1) * 2 = 1.46, where swapped halves give 1.76."""
    w1, w2 = torch.zeros(1, 64, 32), torch.eye(32)[None]
    w1[0, :32, 0], w1[0, 32:, 0] = 1.0, 2.0
    x = torch.zeros(M, 32)
    x[:, 0] = 1.0
    ids, weights = torch.zeros(M, 1, dtype=torch.int64), torch.ones(M, 1)
    x, w1, w2 = (t.to(DEVICE, BF16) for t in (x, w1, w2))
    out = moe_mlp(x, ids.to(DEVICE), weights.to(DEVICE), w1, w2, recipe=recipe)
    step = 2.0**-8 if recipe == "bf16" else 2.0**-4  # half a step at 1.46 of BF16, of E4M3
    assert (out.double().cpu() - 1.4621171572600098).abs().max() <= step


# graphs, recompilation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_graph_replays_with_other_routing_and_weights(recipe):
    """C16: captured without waiting; the replay equals eager with fewer rows, other groups and other weights."""
    sizes = {"T": 500, "D": 256, "H": 128, "E": 16, "k": 4, "dtype": BF16}
    layer = to_gpu(make_layer(**sizes))
    layer.run(moe_mlp, recipe=recipe)
    graph = torch.cuda.CUDAGraph()
    with waiting_is_an_error(), torch.cuda.graph(graph):
        captured = layer.run(moe_mlp, recipe=recipe)
    for seed in (1, 2):
        other = make_layer(**sizes, seed=seed)
        other.ids[3:50] = -1
        other.ids[50 : 50 + 300 * (seed - 1)] = 2
        for old, new in zip(vars(layer).values(), vars(other).values(), strict=True):
            old.copy_(new)
        poison_free_memory()
        graph.replay()
        assert_same(captured, layer.run(moe_mlp, recipe=recipe))


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_compiled_once(recipe, monkeypatch):
    """C16: 20 steps of different counts under compile(fullgraph=True): one graph, no kernel compiled after step 2."""
    compilations = []
    compile_ = jit._compile
    monkeypatch.setattr(jit, "_compile", lambda *args: compilations.append(args[0]) or compile_(*args))
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(lambda *args: moe_mlp(*args, recipe=recipe), fullgraph=True, backend=counter)
    layer = to_gpu(make_layer(T=200, D=64, H=96, E=8, k=2, dtype=BF16))
    for step in range(20):
        layer.ids[: 10 * step] = step % 8
        got = layer.run(function)
        if step < 2:
            compilations.clear()
    assert_same(got, layer.run(moe_mlp, recipe=recipe))
    torch._dynamo.reset()
    assert counter.frame_count == 1
    assert not compilations


# prepared weights ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["foreach", "fused", "capturable"])
def test_prepared_weights_are_never_stale(how):
    """C21: after optimiser steps, an edit and a refresh, load_state_dict, and in a replayed graph of the forward."""
    layer = to_gpu(make_layer(T=200, D=64, H=96, E=8, k=2, dtype=BF16))
    experts = MXExperts(8, 64, 96, device=DEVICE, dtype=BF16)
    optimizer = torch.optim.AdamW(experts.parameters(), 0.1, **{how: True})
    wq = experts.prepare(optimizer)
    experts(layer.x, layer.ids, layer.weights).sum().backward()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = experts(layer.x, layer.ids, layer.weights)
    graph.replay()  # capturing wrote nothing yet
    with torch.no_grad():
        assert_never_stale(experts, layer, weight_changes(experts, optimizer, wq, 2), captured, graph.replay)


def test_prepared_weights_in_a_graph_of_the_step():
    """C21: backward and a capturable step are replayed; the next forward uses what the replay wrote."""
    layer = to_gpu(make_layer(T=200, D=64, H=96, E=8, k=2, dtype=BF16))
    experts = MXExperts(8, 64, 96, device=DEVICE, dtype=BF16)
    optimizer = torch.optim.AdamW(experts.parameters(), torch.tensor(0.1, device=DEVICE), capturable=True)
    experts.prepare(optimizer)

    def step():
        experts(layer.x, layer.ids, layer.weights).backward(layer.dout)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    before = experts.w1.detach().clone()
    for _ in range(3):
        graph.replay()
        with torch.no_grad():
            got = experts(layer.x, layer.ids, layer.weights)
            want = moe_mlp(layer.x, layer.ids, layer.weights, experts.w1, experts.w2)
        assert torch.equal(got, want)
        assert not torch.equal(experts.w1, before)
        before = experts.w1.detach().clone()

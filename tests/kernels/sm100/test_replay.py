"""Graph replay, host synchronisation, recompilation and prepared weights of a whole layer on Blackwell code (C16, C21)."""

import ptxsim
import pytest
import torch
from mx_kernels import MXExperts, jit, moe_mlp
from support.replay import Tape, no_host_reads
from torch._dynamo.testing import CompileCounterWithBackend

from kernels.layer import Layer, assert_never_stale, make_layer, weight_changes

BF16 = torch.bfloat16
SMALL = {"T": 20, "D": 32, "H": 32, "E": 3, "k": 2, "dtype": BF16}


def run(layer: Layer, recipe: str = "mxfp8"):
    return layer.run(lambda *args: moe_mlp(*args, recipe=recipe, backend="sm100"))


def overwrite(layer: Layer, other: Layer) -> None:
    for old, new in zip(vars(layer).values(), vars(other).values(), strict=True):
        old.copy_(new)


def assert_same(got, want) -> None:
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g, w)


@pytest.mark.parametrize("recipe", ["mxfp8", pytest.param("bf16", marks=pytest.mark.slow)])
def test_c16_replay_with_other_routing_and_weights(recipe):
    """The replay of a captured layer, forward and backward, equals eager, with fewer rows than were captured.

    While it is captured the host reads no tensor.
    """
    layer = make_layer(**SMALL)
    with ptxsim.gpu("sm_100a", sms=4) as gpu:
        with no_host_reads(), Tape(gpu) as tape:
            captured = run(layer, recipe)
        before = [t.clone() for t in captured]
        other = make_layer(**SMALL, seed=1)
        other.ids[3:9] = -1
        other.ids[9:] = 2
        overwrite(layer, other)
        tape.replay()
        assert_same(captured, run(layer, recipe))
    assert not any(torch.equal(new, old) for new, old in zip(captured, before, strict=True))


@pytest.mark.parametrize("read", ["item", "tolist", "nonzero", "__bool__", "__int__"])
def test_host_reads_are_noticed(read):
    with no_host_reads(), pytest.raises(AssertionError, match="the host reads"):
        getattr(torch.ones(1), read)()


def test_c16_compiled_once(monkeypatch):
    """Different counts at every step: one graph, and no kernel compiled after the first step."""
    compilations = []
    compile_ = jit._compile
    monkeypatch.setattr(jit, "_compile", lambda *args: compilations.append(args[0]) or compile_(*args))
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(lambda *args: moe_mlp(*args, backend="sm100"), fullgraph=True, backend=counter)
    layer = make_layer(**SMALL)
    with ptxsim.gpu("sm_100a", sms=4):
        for step, rows in enumerate((20, 1)):
            layer.ids[:rows] = step
            got = layer.run(function)
            if step == 0:
                compilations.clear()
        assert_same(got, run(layer))
    torch._dynamo.reset()
    assert counter.frame_count == 1
    assert not compilations


def test_c21_prepared_weights_are_never_stale():
    """After an optimiser step, an edit and a refresh, load_state_dict; eager and in a replayed graph."""
    layer = make_layer(**SMALL)
    with ptxsim.gpu("sm_100a", sms=4) as gpu:
        experts = MXExperts(3, 32, 32, backend="sm100", dtype=BF16)
        optimizer = torch.optim.AdamW(experts.parameters(), 0.1, fused=True)
        wq = experts.prepare(optimizer)

        with torch.no_grad(), Tape(gpu) as tape:
            captured = experts(layer.x, layer.ids, layer.weights)
        experts(layer.x, layer.ids, layer.weights).sum().backward()
        assert_never_stale(experts, layer, weight_changes(experts, optimizer, wq, 1), captured, tape.replay)

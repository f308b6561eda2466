"""The bytes that the trainer hands to its all-to-alls are those of docs/scaling.md."""

from collections import Counter

import pytest
import torch
from mx_bench.project.scaling import dispatch_bytes
from mx_bench.shapes import MoEShape

from .ranks import run_ranks

SHAPE = MoEShape("test", tokens=24, width=64, expert_width=32, experts=4, top_k=2, source="test")


def layer(quantized: bool) -> dict[str, Counter[str]]:
    """One forward and backward pass of this rank's 24 tokens."""
    import mx_kernels as mk
    from mx_trainer.config import Config
    from mx_trainer.expert_parallel import ParallelExperts
    from mx_trainer.parallel import init_parallel

    parallel = init_parallel(Config(device="cpu"))
    torch.manual_seed(0)
    whole = mk.MXExperts(SHAPE.experts, SHAPE.width, SHAPE.expert_width)
    experts = ParallelExperts(whole, parallel.world_mesh, quantized=quantized, padded=False, capacity=0.0)
    torch.manual_seed(parallel.rank)
    x = torch.randn(SHAPE.tokens, SHAPE.width, dtype=torch.bfloat16, requires_grad=True)
    weights, ids = torch.rand(SHAPE.tokens, SHAPE.experts).topk(SHAPE.top_k)
    experts(x, ids, weights.requires_grad_()).sum().backward()
    return vars(experts.traffic)


@pytest.mark.parametrize("dispatch", ["bf16", "mxfp8"])
def test_counted_bytes(dispatch):
    want = {kind: 2 * count * SHAPE.tokens for kind, count in dispatch_bytes(SHAPE, dispatch).items()}
    ranks = run_ranks(2, layer, dispatch == "mxfp8")
    handed, sent = (sum((traffic[name] for traffic in ranks), Counter()) for name in ("handed", "sent"))
    assert handed == want
    share = sent["y"] / handed["y"]  # by chance: a rank's rows may be for its own experts
    assert 0.2 < share < 0.8
    assert all(sent[kind] == share * handed[kind] for kind in handed if kind != "counts")
    assert sent["counts"] == handed["counts"] / 2

"""C21 under FSDP2: prepared weights refreshed after each all-gather, against a copy that is not sharded."""

import mx_kernels as mk
import torch
from mx_trainer.config import Config
from mx_trainer.parallel import init_parallel

from .ranks import run_ranks


def train() -> list[bool]:
    """Of three steps, whether both copies gave the same bits."""
    from torch.distributed.fsdp import fully_shard

    parallel = init_parallel(Config(device="cpu"))
    torch.manual_seed(0)
    plain, sharded = mk.MXExperts(4, 32, 32), mk.MXExperts(4, 32, 32)
    sharded.load_state_dict(plain.state_dict())
    wq = sharded.prepare()
    fully_shard(sharded, mesh=parallel.world_mesh)
    wq.detach()
    sharded.register_forward_pre_hook(lambda m, _: wq.refresh(m.w1, m.w2))
    x, ids, weights = torch.randn(20, 32), torch.rand(20, 4).topk(2).indices, torch.rand(20, 2)
    optimizers = [torch.optim.AdamW(m.parameters(), 0.1) for m in (plain, sharded)]
    same = []
    for _ in range(3):
        outs = [m(x, ids, weights) for m in (plain, sharded)]
        same.append(torch.equal(*outs))
        for out, optimizer in zip(outs, optimizers, strict=True):
            out.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return same


def test_fsdp2() -> None:
    assert run_ranks(2, train) == [[True] * 3] * 2

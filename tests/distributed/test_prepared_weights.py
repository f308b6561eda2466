"""C21 under FSDP2: prepared weights refreshed after each all-gather, against a copy that is not sharded."""

import os
import socket

import mx_kernels as mk
import pytest
import torch
import torch.distributed as dist


def train(rank: int, world: int, port: int, failures) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    plain, sharded = mk.MXExperts(4, 32, 32), mk.MXExperts(4, 32, 32)
    sharded.load_state_dict(plain.state_dict())
    wq = sharded.prepare()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (world,)))
    wq.detach()
    sharded.register_forward_pre_hook(lambda m, _: wq.refresh(m.w1, m.w2))
    x, ids, weights = torch.randn(20, 32), torch.rand(20, 4).topk(2).indices, torch.rand(20, 2)
    optimizers = [torch.optim.AdamW(m.parameters(), 0.1) for m in (plain, sharded)]
    for step in range(3):
        outs = [m(x, ids, weights) for m in (plain, sharded)]
        if not torch.equal(*outs):
            failures.put((rank, step))
        for out, optimizer in zip(outs, optimizers, strict=True):
            out.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="torch is built without torch.distributed")
def test_fsdp2() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    failures = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(train, (2, port, failures), nprocs=2)
    assert failures.empty()

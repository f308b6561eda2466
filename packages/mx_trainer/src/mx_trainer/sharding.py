"""Spread a model over the ranks, and treat its gradients as those of one model.

Every rank differentiates its share of the whole batch's loss, so gradients add up over the ranks, to what one process with
the whole batch has. FSDP adds while it scatters; `reduce_gradients` does what is left:

| parameters | with FSDP (`--fsdp`) | without |
|---|---|---|
| dense, router | sharded over the world: added by FSDP | copies on all ranks: added here |
| experts, `--ep 1` | the same | the same |
| experts, `--ep N` | sharded over the ranks with the same experts: added by FSDP | copies on those: added here |
"""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from mx_kernels import MXExperts
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from mx_trainer.config import ParallelConfig
from mx_trainer.expert_parallel import ParallelExperts
from mx_trainer.model import GPT
from mx_trainer.moe import MoE, is_expert
from mx_trainer.parallel import Parallel, is_fsdp_sharded

BUCKET = 1 << 26
"""Gradients that are added up in one collective: elements, 256 MiB of FP32."""
UNIT = 1 << 25
"""Parameters that FSDP gathers in one collective, if a block has no more: elements, 128 MiB of FP32. The host pays for each."""


def distribute(model: GPT, cfg: ParallelConfig, parallel: Parallel) -> None:
    """Replace the experts by this rank's part, and shard what remains; all ranks hold the same model before."""
    if not parallel.distributed:
        return
    world, experts = parallel.world_mesh, parallel.expert_mesh
    assert world is not None
    assert experts is not None
    model.parallel = parallel
    whole_here: set[nn.Parameter] = set()  # FSDP leaves them alone
    layers = [m for m in model.modules() if isinstance(m, MoE)]
    for moe in layers if parallel.ep > 1 else ():
        assert isinstance(moe.experts, MXExperts)
        moe.experts = ParallelExperts(
            moe.experts,
            experts["ep"],
            quantized=cfg.dispatch == "mxfp8",
            padded=cfg.padded_dispatch,
            capacity=cfg.capacity,
        )
        if cfg.fsdp and experts["dp"].size() > 1:
            fully_shard(moe.experts, mesh=experts["dp"], reshard_after_forward=cfg.reshard)
        else:
            whole_here.update(moe.experts.parameters())
    if cfg.fsdp:
        for blocks in _units(model, whole_here):
            fully_shard(blocks, mesh=world, reshard_after_forward=cfg.reshard, ignored_params=whole_here)
        fully_shard(model, mesh=world, ignored_params=whole_here)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _units(model: GPT, ignored: set[nn.Parameter]) -> Iterator[list[nn.Module]]:
    """Runs of blocks that are gathered together: as few as make `UNIT` parameters, one if it is large."""
    blocks: list[nn.Module] = []
    size = 0
    for block in model.blocks:
        blocks.append(block)
        size += sum(p.numel() for p in block.parameters() if p not in ignored)
        if size >= UNIT:
            yield blocks
            blocks, size = [], 0
    if blocks:
        yield blocks


def _gradients(model: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """(name, this rank's part of the gradient, whether FSDP has sharded it) of every parameter that has one."""
    for name, p in model.named_parameters():
        if p.grad is not None:
            local = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            yield name, local, is_fsdp_sharded(p.grad)


def dropped_rows(model: GPT, parallel: Parallel) -> dict[str, int]:
    """{"dropped_rows": rows that found no place since the last call, in all layers and ranks}; {} where none can."""
    limited = [m for m in model.modules() if isinstance(m, ParallelExperts) and m.capacity]
    if not limited:
        return {}
    total = parallel.sum_(torch.stack([experts.dropped for experts in limited]).sum())
    for experts in limited:
        experts.dropped.zero_()
    return {"dropped_rows": int(total)}


@torch.no_grad()
def reduce_gradients(model: nn.Module, parallel: Parallel) -> None:
    """Once per optimiser step, after the last backward pass: see this module's table."""
    if not parallel.distributed:
        return
    assert parallel.expert_mesh is not None
    assert parallel.world_mesh is not None
    everyone, replicas = parallel.world_mesh.get_group(), parallel.expert_mesh["dp"].get_group()
    dense, experts = [], []
    for name, grad, sharded in _gradients(model):
        if not sharded:
            (experts if parallel.ep > 1 and is_expert(name) else dense).append(grad)
    for grads, group in ((dense, everyone), (experts, replicas)):
        for bucket in _buckets(grads) if group.size() > 1 else ():
            flat = torch.cat([grad.flatten() for grad in bucket])
            dist.all_reduce(flat, group=group)
            sums = flat.split([grad.numel() for grad in bucket])
            torch._foreach_copy_(bucket, [s.view_as(grad) for s, grad in zip(sums, bucket, strict=True)])


def _buckets(grads: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of at most `BUCKET` elements, or of a single gradient: a collective costs more than a copy."""
    bucket: list[Tensor] = []
    size = 0
    for grad in grads:
        if bucket and size + grad.numel() > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(grad)
        size += grad.numel()
    if bucket:
        yield bucket


@torch.no_grad()
def clip_gradients(model: nn.Module, parallel: Parallel, largest: float) -> Tensor:
    """Scale all gradients down to a joint norm of at most `largest`, as torch.nn.utils.clip_grad_norm_ does.

    Returns:
        () fp32, the norm before, the same on every rank: of the sharded gradients the parts of all ranks are counted, of the
        copies one.
    """
    everywhere, by_world, by_ep = [], [], []
    for name, grad, sharded in _gradients(model):
        kind = by_world if sharded else by_ep if parallel.ep > 1 and is_expert(name) else everywhere
        kind.append(grad)
    norm = torch.nn.utils.get_total_norm
    if not parallel.distributed:
        total = norm(everywhere)
    else:
        assert parallel.expert_mesh is not None
        square = norm(everywhere).square() if everywhere else torch.zeros((), device=parallel.device)
        groups = ((by_world, dist.group.WORLD), (by_ep, parallel.expert_mesh["ep"].get_group()))
        for grads, group in groups:
            if grads:
                part = norm(grads).square()
                dist.all_reduce(part, group=group)
                square = square + part
        total = square.sqrt()
    scale = (largest / (total + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([*everywhere, *by_world, *by_ep], scale)
    return total

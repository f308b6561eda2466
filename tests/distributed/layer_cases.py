"""One MoE layer whose experts are spread over ranks, against the same layer in one process: bitwise, on gloo or NCCL."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from mx_core import MXFP8_E4M3, dequantize, quantize
from mx_kernels import MXExperts
from mx_trainer.exchange import row_bytes
from mx_trainer.expert_parallel import ParallelExperts
from torch import Tensor

D, H, K = 64, 32, 2


class Case(NamedTuple):
    """Tokens of each rank, and the experts that rank's tokens may choose."""

    name: str
    tokens: tuple[int, ...]
    chosen: tuple[tuple[int, ...], ...]


def cases(world: int, experts: int) -> list[Case]:
    everything = tuple(range(experts))
    local = experts // world
    first, last = everything[: max(local, K)], everything[-max(local, K) :]
    even = (37,) * world
    return [
        Case("any", even, (everything,) * world),
        Case("all tokens on the last rank's experts", even, (last,) * world),
        Case("all tokens on the first rank's experts", even, (first,) * world),
        Case("to the neighbours only", even, tuple(last if r < world // 2 else first for r in range(world))),
        Case("a rank without tokens", (0, *(50 + r for r in range(world - 1))), (everything,) * world),
    ]


class Gradients(NamedTuple):
    out: Tensor
    dx: Tensor
    dweights: Tensor
    dw1: Tensor
    dw2: Tensor


def run(layer: MXExperts, x: Tensor, ids: Tensor, weights: Tensor, dout: Tensor) -> Gradients:
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    out = layer(x, ids, weights)
    out.backward(dout)
    assert x.grad is not None
    assert weights.grad is not None
    grads = []
    for w in (layer.w1, layer.w2):
        assert w.grad is not None
        grads.append(w.grad.to_local() if hasattr(w.grad, "to_local") else w.grad)
        w.grad = None
    return Gradients(out.detach(), x.grad, weights.grad, *grads)


def in_mxfp8(x: Tensor) -> Tensor:
    """X as it arrives after travelling quantised."""
    return dequantize(quantize(x, MXFP8_E4M3), x.dtype)


def check(
    device: str, mesh, case: Case, experts: int, recipe: str, quantized: bool, padded: bool
) -> list[str]:
    """What differs, in words."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(len(case.name) + experts)
    total = sum(case.tokens)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x, dout = (rand(total, D).bfloat16() * rand(total, 1).exp().bfloat16() for _ in range(2))
    weights = rand(total, K).softmax(-1)
    weights[::5, 1] = 0
    ids = torch.cat(
        [
            torch.tensor(chosen)[torch.rand(tokens, len(chosen), generator=generator).argsort(1)[:, :K]]
            for tokens, chosen in zip(case.tokens, case.chosen, strict=True)
        ]
    )
    whole = MXExperts(experts, D, H, recipe=recipe, device="meta").to_empty(device="cpu")
    for w in (whole.w1, whole.w2):
        w.data = rand(*w.shape) * w.shape[-1] ** -0.5
    whole, x, dout, weights, ids = (t.to(device) for t in (whole, x, dout, weights, ids))
    layer = ParallelExperts(whole, mesh, quantized=quantized, padded=padded, capacity=0)
    if recipe != "bf16" and padded:
        layer.prepare()

    start = sum(case.tokens[:rank])
    mine = slice(start, start + case.tokens[rank])
    got = run(layer, x[mine], ids[mine], weights[mine], dout[mine])
    if quantized:
        x, dout = in_mxfp8(x), in_mxfp8(dout)
    want = run(whole, x, ids, weights, dout)
    local = slice(rank * experts // world, (rank + 1) * experts // world)
    parts = Gradients(*(t[mine] for t in want[:3]), *(t[local] for t in want[3:]))
    where = f"{case.name}, {experts} experts, {recipe}, quantized={quantized}, padded={padded}, rank {rank}"
    wrong = [
        f"{where}: {name} differs by {(a.float() - b.float()).abs().max():.2e}"
        for name, a, b in zip(Gradients._fields, got, parts, strict=True)
        if not torch.equal(a, b)
    ]
    if not padded:
        wrong += check_traffic(layer, where, ids[mine], ids, quantized)
    return wrong


def check_traffic(
    layer: ParallelExperts, where: str, ids: Tensor, all_ids: Tensor, quantized: bool
) -> list[str]:
    """Counted bytes against the closed formula: rows out and rows in, times the bytes of a row."""
    rank, world = dist.get_rank(), dist.get_world_size()
    local = layer.experts // world
    out, into = ids.numel(), int((all_ids // local == rank).sum())
    own = int((ids // local == rank).sum())
    rows = {"x": out, "dout": out, "weights": out, "y": into, "dx": into, "dweights": into}
    width = row_bytes(D, 2, quantized)
    handed = {kind: rows[kind] * width[kind] for kind in rows} | {"counts": layer.experts * 8}
    sent = {kind: (rows[kind] - own) * width[kind] for kind in rows} | {"counts": (layer.experts - local) * 8}
    got = {"handed": dict(layer.traffic.handed), "sent": dict(layer.traffic.sent)}
    return [
        f"{where}: {name}: {got[name]}, expected {want}"
        for name, want in {"handed": handed, "sent": sent}.items()
        if got[name] != want
    ]


def check_all(device: str, experts_per_rank: list[int]) -> list[str]:
    """All cases in this process group."""
    from torch.distributed.device_mesh import init_device_mesh

    world = dist.get_world_size()
    mesh = init_device_mesh(device, (world,), mesh_dim_names=("ep",))
    wrong = []
    for local in experts_per_rank:
        if local * world < K:
            continue
        for case in cases(world, local * world):
            for recipe, quantized in (("bf16", False), ("mxfp8", False), ("mxfp8", True)):
                for padded in (False, True) if len(set(case.tokens)) == 1 else (False,):
                    wrong += check(device, mesh, case, local * world, recipe, quantized, padded)
    return wrong

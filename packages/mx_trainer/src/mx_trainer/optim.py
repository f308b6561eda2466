"""AdamW with decay groups, and the learning-rate schedules."""

import math

import torch
from torch import nn

from mx_trainer.config import OptimConfig


def decay_groups(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Trainable parameters with and without weight decay.

    Decayed is what multiplies activations: linears, experts, router, head. Gains and embeddings are not: pulling a gain
    to 0 is no regulariser, and decaying an embedding punishes rare tokens, which get no gradient to answer with.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    decay, no_decay = [], []
    for p in model.parameters():
        if p.requires_grad:
            (no_decay if p.ndim < 2 or id(p) in embeddings else decay).append(p)
    return decay, no_decay


def by_mesh(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters apart by the device mesh they are sharded over: one fused kernel takes those of one mesh."""
    groups: dict[object, list[nn.Parameter]] = {}
    for p in parameters:
        groups.setdefault(getattr(p, "device_mesh", None), []).append(p)
    return list(groups.values())


def make_optimizer(model: nn.Module, cfg: OptimConfig) -> torch.optim.AdamW:
    """AdamW in its fused form (one kernel on CUDA, one vectorised loop on a CPU), moments in FP32."""
    decay, no_decay = decay_groups(model)
    groups = [
        {"params": params, "weight_decay": weight_decay}
        for all_params, weight_decay in ((decay, cfg.weight_decay), (no_decay, 0.0))
        for params in by_mesh(all_params)
    ]
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=1e-8, fused=True)


def lr_at(step: int, cfg: OptimConfig) -> float:
    """Learning rate of step `step`, counted from 0.

    Both schedules rise linearly over `warmup` steps to `lr` and end, at step `steps - 1`, at `min_lr * lr`: `cosine`
    along half a cosine, `wsd` (arXiv 2404.06395) constant and then linearly over the last `decay_fraction` of the
    steps. In a run so short that the two overlap, the lower one counts.
    """
    warm = (step + 1) / cfg.warmup if step < cfg.warmup else 1.0
    last = max(cfg.steps - 1, 1)
    if cfg.schedule == "cosine":
        progress = max(step - cfg.warmup, 0) / max(last - cfg.warmup, 1)
        shape = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    else:
        decay_steps = max(round(cfg.steps * cfg.decay_fraction), 1)
        shape = min(1.0, max(0.0, (last - step) / decay_steps))
    return cfg.lr * min(warm, cfg.min_lr + (1 - cfg.min_lr) * shape)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group the same rate; a tensor rate (capturable optimisers) is filled in place."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr

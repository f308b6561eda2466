"""The mixture of experts: an FP32 router that never drops a token, and SwiGLU experts in the chosen precision.

The forward pass writes to no buffer. What must be counted comes back in a `RouterStats`, so a block that is
recomputed (activation checkpointing) is counted once, and evaluation counts nothing.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from mx_kernels import MXExperts, mx_linear
from torch import Tensor, nn

from mx_trainer.config import ModelConfig, RouterConfig
from mx_trainer.precision import Precision
from mx_trainer.torch_experts import TorchExperts


class RouterStats(NamedTuple):
    """What one router reports for one batch."""

    chance_E: Tensor
    """(E,) fp32: mean softmax probability of each expert."""
    z_loss: Tensor
    """() fp32: mean squared log-sum-exp of the logits."""
    tokens_E: Tensor
    """(E,) int64: tokens of this process sent to each expert; they sum to T * k."""


def load_balancing_loss(tokens_E: Tensor, chance_E: Tensor) -> Tensor:
    """() fp32: 1 when the load is even, E / k when every token goes to the same k experts (arXiv 2101.03961, eq. 4).

    Args:
        tokens_E: int64, the load that is to become even: of the whole batch, however many processes share it.
        chance_E: fp32, mean probabilities, through which the gradient flows: of this process's tokens.
    """
    share_E = tokens_E.float() / tokens_E.sum().clamp(min=1)
    return len(tokens_E) * torch.dot(share_E, chance_E)


def is_expert(name: str) -> bool:
    """Whether a model's parameter of this name belongs to the experts, of which a token uses top-k."""
    return ".experts." in name


def top_k_lowest_id(scores_TE: Tensor, k: int) -> Tensor:
    """Ids (T, k) int64 of the k largest scores of each row, in descending order; equal scores go to the lowest id.

    torch.topk leaves the order of ties open, so a replayed or resumed run could take other experts.
    """
    return scores_TE.sort(dim=-1, descending=True, stable=True).indices[:, :k]


class Router(nn.Module):
    """Top-k routing in FP32 with an auxiliary loss, a z-loss, and a load-balancing bias that no gradient reaches."""

    def __init__(self, width: int, experts: int, top_k: int, cfg: RouterConfig):
        super().__init__()
        self.cfg, self.top_k = cfg, top_k
        self.weight = nn.Parameter(torch.empty(experts, width))
        # FP32: 1.0 + 0.001 must not round away. int64: a count must not stall. Both are saved with the model.
        self.register_buffer("expert_bias", torch.zeros(experts, dtype=torch.float32))
        self.register_buffer("tokens_since_update", torch.zeros(experts, dtype=torch.int64))

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor, RouterStats]:
        """Route tokens.

        Returns:
            ids (T, k) int64, weights (T, k) fp32, statistics.
        """
        with torch.autocast(x_TD.device.type, enabled=False):
            return self.choose(F.linear(x_TD.float(), self.weight.float()))

    def choose(self, logits_TE: Tensor) -> tuple[Tensor, Tensor, RouterStats]:
        """From FP32 logits to experts, weights and statistics. The bias moves the choice, never the weights."""
        tokens, experts = logits_TE.shape
        softmax_TE = logits_TE.softmax(-1)
        scores_TE = softmax_TE if self.cfg.gate == "softmax" else logits_TE.sigmoid()
        ids_Tk = top_k_lowest_id(scores_TE.detach() + self.expert_bias, self.top_k)
        weights_Tk = scores_TE.gather(1, ids_Tk)
        if self.cfg.normalize:
            weights_Tk = weights_Tk / weights_Tk.sum(-1, keepdim=True).clamp(min=1e-20)
        tokens_E = (ids_Tk.unsqueeze(-1) == torch.arange(experts, device=ids_Tk.device)).sum((0, 1))
        stats = RouterStats(
            chance_E=softmax_TE.sum(0) / max(tokens, 1),
            z_loss=logits_TE.logsumexp(-1).square().sum() / max(tokens, 1),
            tokens_E=tokens_E,
        )
        return ids_Tk, weights_Tk, stats

    @torch.no_grad()
    def count(self, tokens_E: Tensor) -> None:
        """Add one training batch's counts to those of this optimiser step."""
        self.tokens_since_update += tokens_E

    @torch.no_grad()
    def update_bias(self) -> Tensor:
        """Once per optimiser step: raise the bias of experts below the mean load, lower it above (arXiv 2408.15664).

        Returns:
            The counts (E,) int64 since the last update, which are then zero again.
        """
        counts_E = self.tokens_since_update.clone()
        load_E = counts_E.float()
        self.expert_bias += self.cfg.bias_step * torch.sign(load_E.mean() - load_E)
        self.tokens_since_update.zero_()
        return counts_E


class Linear(nn.Module):
    """y = x W^T without bias. The weight is FP32; it is cast, or with a recipe quantised, where it is used."""

    def __init__(self, inputs: int, outputs: int, precision: Precision | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.recipe = precision.linear_recipe if precision else None

    def forward(self, x: Tensor) -> Tensor:
        """X (..., inputs) to (..., outputs) in x's dtype."""
        if self.recipe is None:
            return F.linear(x, self.weight.to(x.dtype))
        return mx_linear(x.bfloat16(), self.weight, recipe=self.recipe).to(x.dtype)


class SwiGLU(nn.Module):
    """The shared expert: a dense SwiGLU every token passes through."""

    def __init__(self, width: int, hidden: int, precision: Precision):
        super().__init__()
        self.gate_up = Linear(width, 2 * hidden, precision)
        self.down = Linear(hidden, width, precision)

    def forward(self, x: Tensor) -> Tensor:
        """X (..., D) to (..., D)."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class MoE(nn.Module):
    """Router, E SwiGLU experts (`mx_kernels.moe_mlp`: two grouped GEMMs), and the optional shared expert."""

    def __init__(self, cfg: ModelConfig, router: RouterConfig, precision: Precision):
        super().__init__()
        self.router = Router(cfg.width, cfg.experts, cfg.top_k, router)
        self.dtype = precision.expert_dtype
        if cfg.expert_kernels == "torch":
            self.experts = TorchExperts(cfg.experts, cfg.width, cfg.expert_width)
        else:
            self.experts = MXExperts(cfg.experts, cfg.width, cfg.expert_width, recipe=precision.expert_recipe)
        self.shared = SwiGLU(cfg.width, cfg.shared_width, precision) if cfg.shared_width else None

    def forward(self, x: Tensor) -> tuple[Tensor, RouterStats]:
        """X (..., D) to (..., D), and the router's statistics."""
        x_TD = x.reshape(-1, x.shape[-1])
        ids_Tk, weights_Tk, stats = self.router(x_TD)
        y_TD = self.experts(x_TD.to(self.dtype), ids_Tk, weights_Tk).to(x.dtype)
        if self.shared is not None:
            y_TD = y_TD + self.shared(x_TD)
        return y_TD.view_as(x), stats

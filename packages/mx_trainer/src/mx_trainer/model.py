"""A GPT with mixture-of-experts blocks: RMSNorm, rotary positions, QK-norm, causal attention, SwiGLU experts."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from mx_kernels import MXExperts
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mx_trainer.config import Config, ModelConfig, RouterConfig
from mx_trainer.moe import Linear, MoE, Router, RouterStats, load_balancing_loss
from mx_trainer.parallel import Parallel, is_fsdp_sharded
from mx_trainer.precision import Precision


class Output(NamedTuple):
    """What a forward pass returns; the losses are means over the batch."""

    logits: Tensor
    """(B, S, vocab) fp32."""
    loss: Tensor | None
    """() fp32 cross entropy in nats per token; None without targets."""
    aux_loss: Tensor
    """() fp32, the mean over the layers, unweighted."""
    z_loss: Tensor
    """() fp32, the mean over the layers, unweighted."""


class RMSNorm(nn.Module):
    """x / rms(x) * gain over the last axis, computed in FP32."""

    def __init__(self, width: int):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """X (..., width), any dtype, to the same."""
        return F.rms_norm(x.float(), self.gain.shape, self.gain.float(), eps=1e-6).to(x.dtype)


class Rotary(nn.Module):
    """Rotary position embeddings (arXiv 2104.09864) over the two halves of each head."""

    def __init__(self, head_width: int, block: int, base: float = 10_000.0):
        super().__init__()
        angle = torch.outer(torch.arange(block), base ** (-torch.arange(0, head_width, 2) / head_width))
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """X (B, heads, S, head_width), rotated in FP32, in its own dtype."""
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal multi-head attention with normalised queries and keys."""

    def __init__(self, cfg: ModelConfig, precision: Precision):
        super().__init__()
        self.heads = cfg.heads
        self.qkv = Linear(cfg.width, 3 * cfg.width, precision)
        self.out = Linear(cfg.width, cfg.width, precision)
        self.q_norm = RMSNorm(cfg.width // cfg.heads)
        self.k_norm = RMSNorm(cfg.width // cfg.heads)
        self.rotary = Rotary(cfg.width // cfg.heads, cfg.block)

    def forward(self, x: Tensor) -> Tensor:
        """X (B, S, D) to (B, S, D)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = self.rotary(self.q_norm(q)), self.rotary(self.k_norm(k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm attention, then pre-norm experts, each added to the residual stream."""

    def __init__(self, cfg: ModelConfig, router: RouterConfig, precision: Precision):
        super().__init__()
        self.attention_norm = RMSNorm(cfg.width)
        self.attention = Attention(cfg, precision)
        self.moe_norm = RMSNorm(cfg.width)
        self.moe = MoE(cfg, router, precision)
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(self, x: Tensor) -> tuple[Tensor, RouterStats]:
        """X (B, S, D) to (B, S, D), and the router's statistics."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        y, stats = self.moe(self.moe_norm(x))
        return x + self.dropout(y), stats


class GPT(nn.Module):
    """Tokens to logits. Parameters are FP32 (the master weights); activations have `precision.activations`."""

    def __init__(self, cfg: Config, precision: Precision):
        super().__init__()
        m = cfg.model
        self.block_size, self.activations = m.block, precision.activations
        self.checkpoint_activations = cfg.checkpoint_activations
        self.parallel: Parallel | None = None  # set where several processes share the batch
        self.embedding = nn.Embedding(m.vocab, m.width)
        self.blocks = nn.ModuleList(Block(m, cfg.router, precision) for _ in range(m.layers))
        self.norm = RMSNorm(m.width)
        self.head = Linear(m.width, m.vocab)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the initial weights from torch's global generator.

        Matrices have variance 1 / fan-in; those that write to the residual stream are smaller by sqrt(2 * layers), so
        that its variance does not grow with depth; embedding, head and router start small, the router so that the
        first tokens spread over all experts.
        """
        for name, p in self.named_parameters():
            if p.ndim < 2:
                continue
            std = p.shape[-1] ** -0.5
            if name.endswith(("attention.out.weight", "moe.experts.w2", "moe.shared.down.weight")):
                std /= math.sqrt(2 * len(self.blocks))
            elif name.endswith(("embedding.weight", "head.weight", "router.weight")):
                std = 0.02
            nn.init.normal_(p, std=std)

    def routers(self) -> list[Router]:
        return [module for module in self.modules() if isinstance(module, Router)]

    def prepare_weights(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Quantise the experts' weights once per optimiser step (without one: once, for inference).

        Under FSDP whole weights are there only while they are used: they are quantised at each use.
        """
        for module in self.modules():
            if isinstance(module, MXExperts) and module.recipe.is_mx and not is_fsdp_sharded(module.w1):
                module.prepare(optimizer, orientations="both" if optimizer else "row_only")

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Output:
        """Predict the next token at each position of tokens (B, S), S <= block.

        In training mode each router also counts its tokens (`Router.count`).
        """
        x = self.embedding(tokens).to(self.activations)
        all_stats = []
        for block in self.blocks:
            if self.checkpoint_activations and self.training:
                x, stats = checkpoint(block, x, use_reentrant=False)
            else:
                x, stats = block(x)
            all_stats.append(stats)
        tokens_LE = torch.stack([s.tokens_E for s in all_stats])
        if self.parallel is not None:
            self.parallel.sum_(tokens_LE)  # all layers' at once: no router waits for other processes
        if self.training:
            for router, tokens_E in zip(self.routers(), tokens_LE, strict=True):
                router.count(tokens_E)
        logits = self.head(self.norm(x)).float()
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return Output(
            logits=logits,
            loss=loss,
            aux_loss=torch.stack(
                [load_balancing_loss(t, s.chance_E) for t, s in zip(tokens_LE, all_stats, strict=True)]
            ).mean(),
            z_loss=torch.stack([s.z_loss for s in all_stats]).mean(),
        )

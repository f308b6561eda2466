"""What a run is: frozen dataclasses, one field per decision, checked before anything is written.

Every field is a command-line flag of `mx-train` (see `cli.py`); presets are instances of `Config` in `configs/`.
"""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mx_core.formats import BLOCK_SIZE

from mx_trainer.errors import ConfigError
from mx_trainer.precision import LINEAR_PRECISIONS, PRECISIONS

CORPORA = ("stdlib", "site-packages")
"""Names that `--data` knows; anything else is a path."""

QUANTIZED_DISPATCH = ("mxfp8", "mxfp8_floor")
"""Precisions whose rows can travel quantised: the experts' GEMMs then read the very bytes that were sent."""


@dataclass(frozen=True)
class ModelConfig:
    """The GPT: `layers` blocks of attention and a mixture of SwiGLU experts."""

    layers: int = 4
    """Transformer blocks."""
    width: int = 128
    """Model width D."""
    heads: int = 4
    """Attention heads; the head width is width / heads."""
    block: int = 256
    """Context length in tokens."""
    dropout: float = 0.0
    """Dropout on the output of attention and of the MoE layer."""
    experts: int = 8
    """Experts E in each MoE layer."""
    top_k: int = 2
    """Experts k that each token goes to."""
    expert_width: int = 128
    """Hidden width H of one expert."""
    shared_width: int = 0
    """Hidden width of an expert that sees every token, kept in high precision; 0 is none."""
    vocab: int = 0
    """Rows of the embedding; 0 takes what the data need, rounded up to a multiple of 64."""
    expert_kernels: Literal["mx", "torch"] = "mx"
    """Who computes the experts: mx_kernels, or, as a yardstick in BF16, torch's grouped_mm between unfused ops."""


@dataclass(frozen=True)
class RouterConfig:
    """How tokens choose experts and what keeps the load even. The router itself is always FP32."""

    gate: Literal["softmax", "sigmoid"] = "softmax"
    """Scores from logits: softmax (Switch, Mixtral) or sigmoid (DeepSeek-V3)."""
    normalize: bool = True
    """Divide the k chosen scores by their sum."""
    aux_loss: float = 0.01
    """Weight of the load-balancing auxiliary loss (Switch Transformer, arXiv 2101.03961, eq. 4)."""
    z_loss: float = 0.0001
    """Weight of the router z-loss (ST-MoE, arXiv 2202.08906, eq. 5)."""
    bias_step: float = 0.005
    """Step of the auxiliary-loss-free bias balancing (arXiv 2408.15664); 0 is off."""


@dataclass(frozen=True)
class DataConfig:
    """The text, and how it becomes tokens."""

    data: str = "stdlib"
    """`stdlib` (this Python's own sources), `site-packages` (those and the installed packages'), or a path: a text
    file, a folder of text, a token file `*.bin`, or a folder with nanoGPT's `train.bin` and `val.bin`."""
    tokenizer: Literal["bytes", "bpe"] = "bytes"
    """Bytes, or a byte-level BPE trained on the training files."""
    bpe_vocab: int = 4096
    """Vocabulary of the BPE."""
    val_fraction: float = 0.05
    """Share of the files (or of a single file's tail) held out for validation."""
    bytes_per_token: float = 0.0
    """Only for `.bin` data, whose tokenizer is unknown: what turns bits per token into `val_bpb`; 0 is unknown."""


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its learning-rate schedule."""

    steps: int = 400
    """Optimiser steps."""
    batch: int = 8
    """Sequences in one forward pass, of all processes together."""
    accumulate: int = 1
    """Forward passes in one optimiser step."""
    lr: float = 3e-3
    """Peak learning rate."""
    min_lr: float = 0.05
    """Last learning rate, as a fraction of the peak."""
    warmup: int = 40
    """Steps of linear warm-up."""
    schedule: Literal["wsd", "cosine"] = "wsd"
    """Warm-up, stable, decay; or a cosine after the warm-up."""
    decay_fraction: float = 0.4
    """Share of the steps in which `wsd` decays."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; gains and embeddings have none."""
    beta1: float = 0.9
    """AdamW's first-moment decay."""
    beta2: float = 0.95
    """AdamW's second-moment decay."""
    clip: float = 1.0
    """Largest gradient norm; 0 is off."""


@dataclass(frozen=True)
class ParallelConfig:
    """How a run is spread over the processes that torchrun starts. None of it has a meaning in a single process."""

    ep: int = 1
    """Ranks that share one copy of the experts (expert parallelism): a divisor of the processes and of --experts."""
    fsdp: bool = True
    """Shard parameters, gradients and moments over the ranks (FSDP2); without it, every rank has whole copies."""
    reshard: bool = True
    """With FSDP, give gathered parameters back after the forward pass and gather them again in the backward pass; without
    it they stay: 4 bytes of memory for each parameter, a third less traffic, and less work for the host."""
    dispatch: Literal["bf16", "mxfp8"] = "bf16"
    """How rows travel to the experts' ranks: as they are, or quantised (elements and scales), as are their gradients."""
    padded_dispatch: bool = False
    """Exchange buffers of a fixed size: nothing then waits for the GPU, but padding travels too."""
    capacity: float = 0.0
    """Size of those buffers in multiples of the even load; rows that do not fit are dropped and counted. 0 is the
    worst case: nothing is dropped."""
    heartbeat_timeout: float = 30.0
    """Seconds without a sign of life after which a process counts as lost, and the run stops and names it."""
    stall_timeout: float = 300.0
    """Seconds without any communication after which the run stops and names the process that the others wait for."""


@dataclass(frozen=True)
class Config:
    """One training run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    preset: str = "tiny"
    """A file of `mx_trainer/configs`; the other flags override its values."""
    precision: str = "mxfp8"
    """The expert GEMMs: `fp32`, `bf16`, or a recipe of mx_kernels (`mxfp8`, `mxfp8_floor`, `mxfp4`, ...)."""
    linear_precision: str = "high"
    """The attention projections and the shared expert: `high` (the activations' type) or a recipe."""
    activations: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the activations outside the experts; auto is bfloat16 on a GPU and float32 on a CPU."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:1`, ..."""
    compile: bool = False
    """torch.compile each transformer block."""
    checkpoint_activations: bool = False
    """Recompute each block in the backward pass instead of keeping its activations."""
    seed: int = 0
    """Of the initial weights, the order of the data, and dropout."""

    name: str = ""
    """Name of the run; empty makes one from preset, precision and time."""
    out: str = "runs"
    """Folder that holds the run folders."""
    log_every: int = 10
    """Steps between records in metrics.jsonl."""
    eval_every: int = 50
    """Steps between validations."""
    eval_tokens: int = 16384
    """Validation tokens of one such evaluation."""
    final_eval_tokens: int = 131072
    """Validation tokens of the last one."""
    save_every: int = 100
    """Steps between checkpoints."""
    keep: int = 2
    """Checkpoints kept."""
    sample_tokens: int = 200
    """Tokens of the sample printed at the end; 0 is none."""
    profile_steps: int = 0
    """Steps to take and throw away after the run, to see what part of the model takes how long; 0 is none."""

    @property
    def tokens_per_step(self) -> int:
        return self.optim.batch * self.optim.accumulate * self.model.block

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Config":
        """Read a `config.json` back; unknown fields are an error, missing ones take the defaults."""
        try:
            return _from_dict(cls, json.loads(path.read_text()))
        except (OSError, json.JSONDecodeError, TypeError) as error:
            raise ConfigError(f"{path}: not a readable run configuration ({error})") from error


def _from_dict(cls: type, values: dict):
    nested = {
        "model": ModelConfig,
        "router": RouterConfig,
        "data": DataConfig,
        "optim": OptimConfig,
        "parallel": ParallelConfig,
    }
    return cls(
        **{k: _from_dict(nested[k], v) if k in nested and cls is Config else v for k, v in values.items()}
    )


def validate(cfg: Config) -> None:
    """Refuse what cannot run, with one line that says what was expected and what came.

    Raises:
        ConfigError: for a single value out of range or an impossible combination.
    """
    m, r, d, o, p = cfg.model, cfg.router, cfg.data, cfg.optim, cfg.parallel

    def need(ok: bool, text: str) -> None:
        if not ok:
            raise ConfigError(text)

    positive = {
        "layers": m.layers, "width": m.width, "heads": m.heads, "experts": m.experts, "top-k": m.top_k,
        "expert-width": m.expert_width, "steps": o.steps, "batch": o.batch, "accumulate": o.accumulate,
        "log-every": cfg.log_every, "eval-every": cfg.eval_every, "save-every": cfg.save_every, "keep": cfg.keep,
        "eval-tokens": cfg.eval_tokens, "final-eval-tokens": cfg.final_eval_tokens, "ep": p.ep,
    }  # fmt: skip
    for name, value in positive.items():
        need(value >= 1, f"--{name} must be at least 1, got {value}")
    not_negative = {
        "shared-width": m.shared_width, "vocab": m.vocab, "aux-loss": r.aux_loss, "z-loss": r.z_loss,
        "bias-step": r.bias_step, "warmup": o.warmup, "weight-decay": o.weight_decay, "clip": o.clip,
        "bytes-per-token": d.bytes_per_token, "sample-tokens": cfg.sample_tokens, "seed": cfg.seed,
        "capacity": p.capacity, "profile-steps": cfg.profile_steps,
    }  # fmt: skip
    for name, value in not_negative.items():
        need(value >= 0, f"--{name} must not be negative, got {value}")
    for part in (m, r, d, o, p):
        for name, value in dataclasses.asdict(part).items():
            if isinstance(value, float):
                need(math.isfinite(value), f"--{name.replace('_', '-')} must be finite, got {value}")
    for name, value in {"heartbeat-timeout": p.heartbeat_timeout, "stall-timeout": p.stall_timeout}.items():
        need(value >= 2, f"--{name} must be at least 2 seconds, got {value}")
    need(m.block >= 2, f"--block must be at least 2, got {m.block}")
    need(0 <= m.dropout < 1, f"--dropout must be in [0, 1), got {m.dropout}")
    need(
        m.experts >= m.top_k, f"--experts must be at least --top-k, got {m.experts} experts and k = {m.top_k}"
    )
    for name, value in {
        "width": m.width,
        "expert-width": m.expert_width,
        "shared-width": m.shared_width,
    }.items():
        need(
            value % BLOCK_SIZE == 0, f"--{name} must be a multiple of {BLOCK_SIZE} (an MX block), got {value}"
        )
    need(m.width % m.heads == 0, f"--width must be a multiple of --heads, got {m.width} and {m.heads}")
    head = m.width // m.heads
    need(head % 2 == 0, f"the head width (width / heads) must be even for rotary embeddings, got {head}")
    need(o.lr > 0, f"--lr must be positive, got {o.lr}")
    need(0 <= o.min_lr <= 1, f"--min-lr is a fraction of --lr in [0, 1], got {o.min_lr}")
    need(o.warmup < o.steps, f"--warmup must be below --steps, got {o.warmup} and {o.steps}")
    need(0 < o.decay_fraction <= 1, f"--decay-fraction must be in (0, 1], got {o.decay_fraction}")
    for name, value in {"beta1": o.beta1, "beta2": o.beta2}.items():
        need(0 <= value < 1, f"--{name} must be in [0, 1), got {value}")
    need(0 < d.val_fraction < 1, f"--val-fraction must be in (0, 1), got {d.val_fraction}")
    need(
        d.bpe_vocab >= 257,
        f"--bpe-vocab must be at least 257 (256 bytes and the separator), got {d.bpe_vocab}",
    )
    need(
        cfg.precision in PRECISIONS,
        f"--precision must be one of {', '.join(PRECISIONS)}; got {cfg.precision!r}",
    )
    need(
        m.expert_kernels == "mx" or (cfg.precision == "bf16" and p.ep == 1),
        f"--expert-kernels torch needs --precision bf16 and --ep 1, got {cfg.precision!r} and {p.ep}",
    )
    need(m.experts % p.ep == 0, f"--ep must divide --experts, got {p.ep} and {m.experts}")
    need(
        p.dispatch == "bf16" or cfg.precision in QUANTIZED_DISPATCH,
        f"--dispatch mxfp8 needs --precision {', '.join(QUANTIZED_DISPATCH)}; got {cfg.precision!r}",
    )
    need(
        cfg.linear_precision in LINEAR_PRECISIONS,
        f"--linear-precision must be one of {', '.join(LINEAR_PRECISIONS)}; got {cfg.linear_precision!r}",
    )
    need(
        "/" not in cfg.name and cfg.name not in (".", ".."), f"--name must be a plain name, got {cfg.name!r}"
    )

"""`mx-train speed`: how fast one model trains with each precision and with torch's own grouped GEMM."""

import gc
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from mx_trainer.config import Config, validate
from mx_trainer.data import load_corpus
from mx_trainer.launch import create_run_dir
from mx_trainer.metrics import PeakMemory, dense_rate, flops_per_token
from mx_trainer.precision import resolve_device
from mx_trainer.profiling import Profile, profile_training
from mx_trainer.report import markdown_table
from mx_trainer.trainer import Trainer, resolve_vocab

TORCH = "torch"
"""The variant whose experts are torch's grouped_mm between unfused ops, in BF16; the others are precisions."""
WARMUP_STEPS = 3


@dataclass(frozen=True)
class Speed:
    """One variant, over its timed steps."""

    variant: str
    tokens_per_s: float
    peak_memory: int
    """Bytes, from building the model on."""
    mfu: float | None
    """Of the dense BF16 rate measured in the same process; None on a CPU."""
    first_step_s: float
    """Compilation included."""
    train_loss: float
    """Of the last timed step: every variant has seen the same batches."""
    profile: Profile


def variant_config(cfg: Config, variant: str) -> Config:
    """The configuration of a variant."""
    kernels, precision = ("torch", "bf16") if variant == TORCH else ("mx", variant)
    return replace(cfg, precision=precision, model=replace(cfg.model, expert_kernels=kernels))


def run_speed(cfg: Config, variants: list[str], steps: int, console: Console) -> list[Speed]:
    """Train each variant for a few steps from the same start; print a table and write it into a run folder."""
    for variant in variants:
        validate(variant_config(cfg, variant))
    corpus = load_corpus(cfg.data)
    cfg = resolve_vocab(cfg, corpus)
    out = create_run_dir(cfg, "speed")
    cfg.save(out / "config.json")
    results = []
    for variant in variants:
        console.rule(f"{cfg.preset} {variant}")
        with resolve_device(cfg.device):  # draws the weights there: a billion take a CPU half a minute
            trainer = Trainer(variant_config(cfg, variant), corpus)
        if not results:
            console.print(f"{trainer.describe()}, on {trainer.device}", highlight=False)
        results.append(_measure(trainer, variant, steps))
        del trainer
        forget()
        r = results[-1]
        console.print(
            f"{r.tokens_per_s:,.0f} tokens/s, {r.peak_memory / 2**20:,.0f} MiB, first step {r.first_step_s:.1f} s, "
            f"loss {r.train_loss:.4f}",
            highlight=False,
        )
        _write(out, results)  # now: the next one may not fit on the GPU
    for head, rows in (_speed_table(results), _parts_table(results)):
        table = Table(*head)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    console.print(f"tables {out}", highlight=False, soft_wrap=True)
    return results


def _write(out: Path, results: list[Speed]) -> None:
    (out / "speed.json").write_text(json.dumps([asdict(r) for r in results], indent=2) + "\n")
    for name, table in {"speed": _speed_table(results), "step": _parts_table(results)}.items():
        (out / f"{name}.md").write_text(markdown_table(*table) + "\n")


def _measure(trainer: Trainer, variant: str, steps: int) -> Speed:
    device, cfg = trainer.device, trainer.cfg
    peak = PeakMemory(device)
    start = time.perf_counter()
    trainer.train_step()[0].tolist()
    first = time.perf_counter() - start
    for _ in range(WARMUP_STEPS - 1):
        trainer.train_step()[0].tolist()
    start = time.perf_counter()
    losses = [trainer.train_step()[0] for _ in range(steps)]
    loss = losses[-1].tolist()[0]  # waits for the GPU
    rate = steps * cfg.tokens_per_step / (time.perf_counter() - start)
    memory = peak.read()
    mfu = None
    if device.type == "cuda":
        mfu = rate * flops_per_token(trainer.model, cfg.model) / dense_rate(device)
    return Speed(variant, rate, memory, mfu, first, loss, profile_training(trainer, 3))


def forget() -> None:
    """Give back the memory of a variant, and its compiled code: no variant is to profit from the one before."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _speed_table(results: list[Speed]) -> tuple[list[str], list[list[str]]]:
    base = results[0].tokens_per_s
    rows = [
        [
            r.variant,
            f"{r.tokens_per_s:,.0f}",
            f"{r.tokens_per_s / base:.2f}",
            "" if r.mfu is None else f"{100 * r.mfu:.1f} %",
            f"{r.peak_memory / 2**30:.1f} GiB",
        ]
        for r in results
    ]
    return ["experts", "tokens/s", f"× {results[0].variant}", "MFU", "peak memory"], rows


def _parts_table(results: list[Speed]) -> tuple[list[str], list[list[str]]]:
    parts = list(dict.fromkeys(part for r in results for part in r.profile.parts))
    rows = [[part, *(f"{r.profile.parts.get(part, 0):.2f}" for r in results)] for part in parts]
    rows.append(["busy", *(f"{r.profile.busy:.1f}" for r in results)])
    return ["ms a step", *(r.variant for r in results)], rows

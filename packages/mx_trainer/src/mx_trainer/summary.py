"""What a finished run came to, in one small file: `summary.json`."""

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from mx_trainer import report
from mx_trainer.metrics import dense_rate, flops_per_token, read_metrics
from mx_trainer.trainer import Evaluation, Trainer


@dataclass(frozen=True)
class Summary:
    """The outcome of a run and how fast it was."""

    val_loss: float
    """Nats per token, at the end."""
    val_bpb: float | None
    """Bits per byte; None where the bytes behind the tokens are unknown."""
    tokens_per_s: float
    """Median over the log's records; evaluation and checkpoints left out."""
    peak_memory: int
    """Bytes."""
    tflops: float
    """Model FLOP per second (`metrics.flops_per_token`) in units of 1e12."""
    dense_tflops: float | None
    """What a large BF16 product reaches on the run's GPUs, measured beside it; None on a CPU."""
    mfu: float | None
    """Model FLOP utilisation: the one over the other."""
    min_expert_share: float
    """Share of tokens of the least used expert in the last quarter, as a fraction of 1 / E."""
    device: str
    torch: str


def summarise(run_dir: Path, trainer: Trainer, evaluation: Evaluation, peak_memory: int) -> Summary:
    """Make and write `summary.json` of a finished run."""
    records = read_metrics(run_dir)
    rate = statistics.median(r["tokens_per_s"] for r in records if "tokens_per_s" in r)
    flops = rate * flops_per_token(trainer.model, trainer.cfg.model)
    on_gpu = trainer.device.type == "cuda"
    dense = trainer.parallel.world * dense_rate(trainer.device) if on_gpu else None
    summary = Summary(
        val_loss=evaluation.loss,
        val_bpb=evaluation.bpb,
        tokens_per_s=rate,
        peak_memory=peak_memory,
        tflops=flops / 1e12,
        dense_tflops=None if dense is None else dense / 1e12,
        mfu=None if dense is None else flops / dense,
        min_expert_share=report.min_expert_share(records),
        device=torch.cuda.get_device_name(trainer.device) if on_gpu else "cpu",
        torch=torch.__version__,
    )
    (run_dir / "summary.json").write_text(json.dumps(asdict(summary), indent=2) + "\n")
    return summary


def load_summary(run_dir: Path) -> Summary:
    """Read `summary.json` back."""
    return Summary(**json.loads((run_dir / "summary.json").read_text()))


def speed_in_words(s: Summary) -> str:
    """One line."""
    text = f"{s.tokens_per_s:,.0f} tokens/s (median, evaluation left out), {s.peak_memory / 2**20:,.0f} MiB at most"
    if s.mfu is None:
        return text
    return f"{text}, {s.tflops:.1f} TFLOP/s, {100 * s.mfu:.1f} % of the dense BF16 rate"

"""What a run measures: records on disk, throughput, peak memory, model size and FLOP."""

import contextlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from mx_trainer.config import ModelConfig
from mx_trainer.moe import is_expert


class RunLog:
    """`metrics.jsonl`, one record a line, and the same numbers as TensorBoard events.

    On resume, records past the checkpoint's step are cut off: the steps are taken again and would stand twice.
    """

    def __init__(self, run_dir: Path, resume_step: int = 0):
        self._path = run_dir / "metrics.jsonl"
        kept = [r for r in read_metrics(run_dir) if r["step"] <= resume_step] if self._path.exists() else []
        scratch = self._path.with_suffix(".tmp")
        scratch.write_text("".join(json.dumps(r) + "\n" for r in kept))
        scratch.replace(self._path)
        self._file = self._path.open("a")
        self._board = SummaryWriter(
            str(run_dir / "tensorboard"), purge_step=resume_step + 1 if resume_step else None
        )

    def write(self, step: int, **values: Any) -> None:
        """Append one record; plain numbers also go to TensorBoard."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            if isinstance(value, int | float):
                group = "val" if name.startswith("val_") else "train"
                self._board.add_scalar(f"{group}/{name}", value, step)

    def close(self) -> None:
        self._file.close()
        self._board.close()


class NoLog:
    """Of the processes that write nothing."""

    def write(self, step: int, **values: Any) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The records of a run; a last line cut short by a kill is left out."""
    records = []
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


class StepTimer:
    """Tokens per second of training alone: evaluation, checkpoints and the log stand outside of `with`."""

    def __init__(self, device: torch.device):
        self._device = device
        self.seconds, self.tokens = 0.0, 0

    def __enter__(self) -> "StepTimer":
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._start

    def take(self) -> float:
        """Tokens per second since the last call."""
        rate = self.tokens / max(self.seconds, 1e-9)
        self.seconds, self.tokens = 0.0, 0
        return rate


class PeakMemory:
    """Largest memory in use since construction, in bytes: CUDA's allocator, or the process's resident set."""

    def __init__(self, device: torch.device):
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        elif sys.platform == "linux":
            with contextlib.suppress(
                OSError
            ):  # without the right to, the peak is the process's since its start
                Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM (proc(5))

    def read(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        if sys.platform == "linux":
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def parameter_counts(model: nn.Module, cfg: ModelConfig) -> tuple[int, int]:
    """All parameters, and those one token uses: of the experts only top_k out of E."""
    total = sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if is_expert(name))
    return total, total - experts + experts * cfg.top_k // cfg.experts


def flops_per_token(model: nn.Module, cfg: ModelConfig) -> float:
    """FLOP of forward and backward for one training token, recomputation not counted.

    Six per active parameter outside the embedding, plus attention's two products over half the context
    (PaLM, arXiv 2204.02311, appendix B, with the causal half).
    """
    _, active = parameter_counts(model, cfg)
    return 6.0 * (active - cfg.vocab * cfg.width) + 6.0 * cfg.layers * cfg.width * cfg.block


def dense_rate(device: torch.device) -> float:
    """FLOP per second of a BF16 product of 8192³ random values on this GPU, the median of ten."""
    size = 8192
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(2 + 10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        a @ b
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return 2 * size**3 / statistics.median(seconds[2:])

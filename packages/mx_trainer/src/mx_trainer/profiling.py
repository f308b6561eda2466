"""Where the time of a training step goes, by part of the model, from torch's profiler."""

import json
import re
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from mx_trainer.trainer import Trainer

COMMUNICATION = "communication"
OTHER = "norms, rotary, casts, residuals, the rest"
PARTS = {
    "routing": r"mx::(route|slot_weights)|aten::(sort|argsort|topk|searchsorted)$",
    "gather + quantise": r"mx::gather|aten::index(_select|_put_)?$",
    "expert GEMMs": r"mx::grouped_gemm|aten::_?grouped_mm",
    "SwiGLU + quantise": r"mx::d?swiglu",
    "combine": r"mx::combine|aten::index_add",
    "quantise weights": r"mx::quantize",
    "attention": r"scaled_dot_product|(flash|efficient|cudnn)_attention",
    "dense GEMMs (attention, router, head)": r"aten::(mm|addmm|bmm|linear)$",
    "optimiser and clipping": r"^Optimizer|_fused_adamw|_foreach",
    "loss": r"cross_entropy|log_softmax|nll_loss",
    COMMUNICATION: r"^(nccl:|c10d::|_c10d_functional::|record_param_comms|FSDP::|fsdp::)",
}
"""Parts, and the ops that belong to each. The innermost op that matches counts: weights are quantised in the optimiser's
step, and that is not the optimiser's time. torch.compile fuses small ops across parts: those are in `OTHER`."""
_PATTERNS = {part: re.compile(pattern) for part, pattern in PARTS.items()}
_ROUTER_KERNEL = re.compile(r"sort|logsumexp|topk")
"""Names of torch.compile's kernels that hold the router's choice."""
_DRIVER_CALL = re.compile(r"cu(da)?[A-Z]")
"""CUDA's runtime and driver calls. They have no kernels, but torch before 2.15 numbers them like ops and gives one that
has an op's number that op's kernels once more (pytorch/pytorch#196282)."""


@dataclass(frozen=True)
class Profile:
    """Milliseconds a step: of a GPU's kernels, or of the CPU."""

    parts: dict[str, float]
    busy: float
    """Their sum; what runs at the same time, as communication may, counts twice."""
    step: float
    """Wall time of a step, slowed down by the profiler itself."""


def profile_training(trainer: Trainer, steps: int) -> Profile:
    """Take `steps` training steps under the profiler. They change the trainer's model: throw it away afterwards."""
    on_gpu = trainer.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    trainer.train_step()  # a recompilation, if there is one
    if on_gpu:
        torch.cuda.synchronize(trainer.device)  # else what is left of that step would be recorded too
    with profile(activities=activities) as recorded:
        start = time.perf_counter()
        for _ in range(steps):
            trainer.train_step()
        if on_gpu:
            torch.cuda.synchronize(trainer.device)
        wall = time.perf_counter() - start
    micros = _gpu_micros(recorded.events()) if on_gpu else _cpu_micros(recorded.events())
    parts = {part: micros[part] / 1e3 / steps for part in (*PARTS, OTHER) if micros[part]}
    return Profile(parts, sum(parts.values()), 1e3 * wall / steps)


def _part_of(event: Any) -> str:
    while event is not None:
        for part, pattern in _PATTERNS.items():
            if pattern.search(event.name):
                return part
        event = event.cpu_parent
    return OTHER


def _cpu_micros(events: Any) -> dict[str, float]:
    micros: dict[str, float] = defaultdict(float)
    for event in events:
        micros[_part_of(event)] += event.self_cpu_time_total
    return micros


def _gpu_micros(events: Any) -> dict[str, float]:
    micros: dict[str, float] = defaultdict(float)
    total = 0.0
    ops = {event.name for event in events if event.device_type == DeviceType.CPU}
    for event in events:
        if (
            event.device_type == DeviceType.CUDA and event.name not in ops
        ):  # else the time line's copy of an op's name
            total += event.time_range.elapsed_us()
        for kernel in () if _DRIVER_CALL.match(event.name) else event.kernels:
            part = _part_of(event)
            if part == OTHER and _ROUTER_KERNEL.search(kernel.name):
                part = "routing"
            micros[part] += kernel.duration
    micros[OTHER] += max(total - sum(micros.values()), 0.0)  # launched by no op that the profiler knows
    return micros


def write_profile(run_dir: Path, result: Profile, console: Console) -> None:
    """`profile.json`, and a table on the screen."""
    (run_dir / "profile.json").write_text(json.dumps(asdict(result), indent=2) + "\n")
    table = Table("part", "ms", "share", title="time of a step", title_justify="left")
    for part, ms in result.parts.items():
        table.add_row(part, f"{ms:.2f}", f"{100 * ms / result.busy:.1f} %")
    console.print(table)
    console.print(
        f"{result.busy:.1f} ms busy, {result.step:.1f} ms a step under the profiler", highlight=False
    )

"""What machine a run was taken on: chip, driver, clocks and power as found, package versions, commit of this code."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

PACKAGES = (
    "torch",
    "nvidia-cutlass-dsl",
    "triton",
    "torchao",
    "quack-kernels",
    "transformer-engine",
    "deep-gemm",
)
NVIDIA_SMI = {
    "driver": "driver_version",
    "sm_clock_mhz": "clocks.sm",
    "sm_clock_max_mhz": "clocks.max.sm",
    "power_w": "power.draw",
    "power_limit_w": "power.limit",
}


def describe() -> dict[str, str | float | None]:
    """The machine as flat JSON values; what cannot be read is None."""
    facts: dict[str, str | float | None] = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "processor": platform.machine(),
        "cpu_count": os.cpu_count() or 0,
        "python": platform.python_version(),
        "commit": _commit(),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "capability": f"{properties.major}.{properties.minor}",
            "sms": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
        }
        values = _output(
            "nvidia-smi", f"--query-gpu={','.join(NVIDIA_SMI.values())}", "--format=csv,noheader,nounits"
        )
        fields = values.splitlines()[0].split(", ") if values else [None] * len(NVIDIA_SMI)
        facts |= dict(zip(NVIDIA_SMI, fields, strict=True))
    return facts | {package: _version(package) for package in PACKAGES}


def _commit() -> str | None:
    """Of the repository that this code is in, wherever the command is run; None if it is installed elsewhere."""
    git = "git", "-C", str(Path(__file__).parent)
    tracked = _output(*git, "ls-files", "--error-unmatch", Path(__file__).name)
    return _output(*git, "describe", "--always", "--dirty", "--exclude=*") if tracked else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None

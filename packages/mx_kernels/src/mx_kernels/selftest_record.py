"""The record that sm100's self-test passed on this machine, without which "auto" does not take that backend.

One JSON file for each GPU model, driver, package version and DSL version, in the user's cache folder.
"""

import functools
import hashlib
import importlib.metadata
import json
from pathlib import Path

import torch

from mx_kernels.paths import cache_dir, write_whole


def installed_version(distribution: str) -> str:
    """Version of an installed distribution; "none" where it runs from a source tree or is absent."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def driver_version() -> str:
    """The NVIDIA kernel driver, as Linux tells it; "none" without one."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "none"
    words = text.splitlines()[0].split()
    return next((w for w in words if w[0].isdigit() and "." in w), "none")


def machine_key(device: torch.device) -> dict[str, str]:
    """What a record is valid for."""
    return {
        "gpu": torch.cuda.get_device_name(device),
        "driver": driver_version(),
        "mx-kernels": installed_version("mx-kernels"),
        "nvidia-cutlass-dsl": installed_version("nvidia-cutlass-dsl"),
    }


def record_path(key: dict[str, str]) -> Path:
    """File of the record for this key."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir("selftest") / f"{digest}.json"


def write(key: dict[str, str], passed: bool, report: dict) -> Path:
    """Keep the outcome of a self-test; an earlier one for the same key is replaced."""
    path = record_path(key)
    record = json.dumps({"machine": key, "passed": passed, "report": report}, indent=2) + "\n"
    write_whole(path, lambda part: part.write_text(record))
    why_not_trusted.cache_clear()
    return path


@functools.cache
def why_not_trusted(device: torch.device) -> str | None:
    """Why "auto" should not take sm100 on this device, or None if its self-test has passed here."""
    key = machine_key(device)
    path = record_path(key)
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return f"its self-test has not run on this machine ({key['gpu']}, driver {key['driver']}): mx-doctor --selftest"
    if record.get("machine") == key and record.get("passed") is True:
        return None
    return f"its self-test failed on this machine: see {path}, and mx-doctor --selftest"

"""Ratios of a benchmark to a torch operation of the same run, and the baseline that they are held to."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

BASELINE = Path(__file__).with_name("baseline.json")
SLOWER = 2.0
"""A ratio above this times the baseline's fails."""

ELEMENTWISE = torch.randn(1 << 20)
MATRIX = torch.randn(512, 512)
YARDSTICKS: dict[str, Callable[[], object]] = {
    "exp of 2^20 floats": lambda: torch.exp(ELEMENTWISE),
    "fp32 product of 512^3": lambda: MATRIX @ MATRIX,
}


clock = time.process_time
"""Of both sides: processor time of one thread, so that a busy machine does not count."""


def fastest(call: Callable[[], object], rounds: int = 15) -> float:
    """Processor seconds of the fastest of several calls."""
    times = []
    for _ in range(rounds):
        start = clock()
        call()
        times.append(clock() - start)
    return min(times)


def check_ratio(name: str, yardstick: str, ratio: float) -> None:
    """Compare with baseline.json, or write into it if $MX_UPDATE_BASELINE is 1."""
    baseline = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    if os.environ.get("MX_UPDATE_BASELINE") == "1":
        baseline[name] = {"yardstick": yardstick, "ratio": float(f"{ratio:.3g}")}
        BASELINE.write_text(json.dumps(dict(sorted(baseline.items())), indent=1) + "\n")
        return
    known = baseline.get(name)
    assert known is not None, f"{name}: not in {BASELINE.name}; write it with MX_UPDATE_BASELINE=1"
    assert known["yardstick"] == yardstick
    limit = SLOWER * known["ratio"]
    assert ratio <= limit, (
        f"{ratio:.2f} × {yardstick}; the baseline has {known['ratio']}, at most {limit:.2f}"
    )

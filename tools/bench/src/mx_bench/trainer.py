"""Section "trainer": tokens per second of `mx-train` in BF16 and MXFP8, each run in a process of its own."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mx_bench.results import FAILED, Measurement

SECTION = "trainer"
PRECISIONS = ("bf16", "mxfp8")
WARMUP_RECORDS = 3  # records of metrics.jsonl left out: compilation, allocator, caches

TIMEOUT_S = 600


def measure_trainer(
    preset: str, *, steps: int, threads: int | None = None, at_once: bool = False
) -> list[Measurement]:
    """Seconds per step of one preset, from the trainer's own metrics.

    Args:
        preset: of mx-train.
        steps: of each run; two compile everything and are too few to measure.
        threads: of the CPU, or as many as torch takes.
        at_once: both precisions at the same time, to compile and not to measure.
    """
    environment = os.environ | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
    with ThreadPoolExecutor(len(PRECISIONS) if at_once else 1) as pool:
        return list(pool.map(lambda precision: _measure(preset, precision, steps, environment), PRECISIONS))


def _measure(preset: str, precision: str, steps: int, environment: Mapping[str, str]) -> Measurement:
    case, contestant = f"{preset}, {steps} steps", f"ours {precision}"
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "mx_trainer", "--preset", preset, "--precision", precision),
            *("--steps", str(steps), "--warmup", "1", "--log-every", "1", "--eval-every", str(steps)),
            *("--eval-tokens", "4096", "--final-eval-tokens", "4096", "--sample-tokens", "0"),
            *("--data", "stdlib", "--out", folder, "--name", "bench"),  # speed needs no larger text
        ]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
        except subprocess.TimeoutExpired:
            return Measurement(SECTION, case, contestant, None, note=f"{FAILED}not done after {TIMEOUT_S} s")
        if run.returncode != 0:
            reason = (run.stderr.strip().splitlines() or ["no message"])[-1]
            return Measurement(SECTION, case, contestant, None, note=f"{FAILED}{reason}")
        records = [
            json.loads(line) for line in (Path(folder) / "bench" / "metrics.jsonl").read_text().splitlines()
        ]
        config = json.loads((Path(folder) / "bench" / "config.json").read_text())
    rates = [record["tokens_per_s"] for record in records if record.get("tokens_per_s")][WARMUP_RECORDS:]
    if len(rates) < 2:
        return Measurement(SECTION, case, contestant, None, note="too few steps to tell a rate")
    tokens = config["optim"]["batch"] * config["optim"]["accumulate"] * config["model"]["block"]
    low, rate, high = statistics.quantiles(rates, n=4)
    return Measurement(
        SECTION,
        case,
        contestant,
        seconds=tokens / rate,
        spread=(high - low) / rate,
        rounds=len(rates),
        note=f"{rate:,.0f} tokens/s",
    )

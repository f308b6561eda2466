"""Compiling before measuring: a process for each section, all at the same time.

Compilation is what a first run spends most of its time with, one core of many at a time; kernels, torch.compile and the
trainer keep what they compiled on disk, where the measuring process finds it.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from mx_bench.results import FAILED

TIMEOUT_S = 600


def warm_sections(names: Sequence[str], say: Callable[[str], None], *, quick: bool) -> bool:
    """Run `mx-bench --warm --section NAME` for every name, at once; say how long each took, and what failed in it.

    Returns:
        Whether nothing failed.
    """
    say(f"compiling {len(names)} sections, each in a process of its own; nothing is measured meanwhile")
    start = time.perf_counter()
    option = ["--quick"] if quick else []

    def warm(name: str) -> bool:
        command = [sys.executable, "-m", "mx_bench", *option, "--warm", "--section", name]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            say(f"{name}: not compiled after {TIMEOUT_S} s")
            return False
        say(f"{name}: compiled in {time.perf_counter() - start:.0f} s")
        if run.returncode != 0:
            say(complaint(run.stdout, run.stderr))
        return run.returncode == 0

    with ThreadPoolExecutor(len(names)) as pool:
        return all(list(pool.map(warm, names)))


def complaint(stdout: str, stderr: str) -> str:
    """The lines of a warming process that say what failed, or the last that it wrote."""
    lines = [line for line in stdout.splitlines() if FAILED in line]
    return "\n".join(lines or (stderr.strip() or stdout.strip() or "ended without a word").splitlines()[-1:])

"""`mx-train` under torchrun's agent, with ranks that fail on purpose.

The agent is torchrun's own, called as a library so that its processes can be forked from one that has imported everything:
`test_failure_slow.py` has the command itself.
"""

import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from .ranks import fork_server

SMALL = (
    "--preset=smoke", "--layers=1", "--width=32", "--heads=2", "--block=32", "--experts=4", "--expert-width=32", "--batch=4",
    "--warmup=2", "--log-every=1", "--eval-every=100", "--eval-tokens=256", "--final-eval-tokens=256", "--sample-tokens=0",
    "--device=cpu",
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """What one rank does in one of the run's lives: when it begins its `step`-th step, or `delay` seconds after that."""

    rank: int
    kind: Literal["kill", "stop", "sleep", "memory"]
    life: int = 0
    step: int = 2
    delay: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    error: str
    """Torchrun's report; empty if every rank succeeded."""
    logs: dict[tuple[int, int], str]
    """What each (life, rank) wrote."""
    delays: dict[tuple[int, int], float]
    """Seconds from a life's fault to the last word of each rank of it."""


def torchrun(
    world: int, args: Sequence[str], faults: Sequence[Fault], logs: Path, *, max_restarts: int = 0
) -> Outcome:
    """Run `mx-train` with these arguments in `world` processes."""
    fork_server()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world,
        run_id=logs.name,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=max_restarts,
        start_method="forkserver",
        shutdown_timeout=8,
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL),
    )
    error = ""
    try:
        elastic_launch(config, _rank_main)(tuple(args), tuple(faults))
    except ChildFailedError as failure:
        error = str(failure)
    folders = {
        (int(life.name.rpartition("_")[2]), int(rank.name)): rank
        for life in logs.glob("*/attempt_*")
        for rank in life.iterdir()
    }
    written = {
        key: "".join((folder / f"{name}.log").read_text() for name in ("stdout", "stderr"))
        for key, folder in folders.items()
    }
    began_at = {
        life: float(match[1])
        for (life, _), text in written.items()
        if (match := re.search(r"fault at ([\d.]+)", text))
    }
    delays = {
        (life, rank): (folder / "stderr.log").stat().st_mtime - began_at[life]
        for (life, rank), folder in folders.items()
        if life in began_at
    }
    return Outcome(error, written, delays)


def _rank_main(args: tuple[str, ...], faults: tuple[Fault, ...]) -> None:
    from mx_trainer.cli import train
    from mx_trainer.trainer import Trainer

    torch.set_num_threads(1)
    rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    mine = [fault for fault in faults if (fault.rank, fault.life) == (rank, life)]
    steps, train_step = 0, Trainer.train_step

    def failing_step(trainer: Trainer):
        nonlocal steps
        steps += 1
        for fault in mine:
            if fault.step == steps:
                threading.Timer(fault.delay, _fail, [fault]).start() if fault.delay else _fail(fault)
        return train_step(trainer)

    Trainer.train_step = failing_step
    code = train(args)
    if code:
        raise SystemExit(code)


def _fail(fault: Fault) -> None:
    print(f"fault at {time.time()}", flush=True)
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "stop":  # for good, but not for the half minute after which torchrun loses patience
        subprocess.Popen(["sh", "-c", f"sleep 14; kill -9 {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind == "sleep":
        time.sleep(600)
    else:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 TiB (simulated).")


def random_kills(seed: int, lives: int, world: int) -> list[Fault]:
    """In each of the first lives, one rank killed within its first three steps, checkpoints included."""
    rng = random.Random(seed)
    return [
        Fault(rng.randrange(world), "kill", life, rng.randint(1, 3), rng.uniform(0.001, 0.3))
        for life in range(lives)
    ]

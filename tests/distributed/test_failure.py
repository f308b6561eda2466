"""A rank that is killed, hangs, stops or runs out of memory: the others leave in time and name it, and torchrun goes on."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mx_trainer.checkpoint import find_checkpoint, save_checkpoint
from mx_trainer.config import Config, ParallelConfig
from mx_trainer.errors import ConfigError
from mx_trainer.failure import _Judge
from mx_trainer.parallel import Parallel, init_parallel
from mx_trainer.restart import checkpoint_to_continue, started_again
from support.checkpoints import same_state, whole_state

from .ranks import run_ranks
from .torchrun import SMALL, Fault, random_kills, torchrun

HEARTBEAT, STALL = 4, 5
MARGIN = 10
"""Seconds after the timeout (after death, where a process died) within which docs/scaling.md promises the message."""


@pytest.fixture(scope="session")
def args(text: Path) -> list[str]:
    return [
        *SMALL, f"--data={text}", "--val-fraction=0.1", "--steps=12", "--save-every=1",
    ]  # fmt: skip


# --- killed, and started again ----------------------------------------------------------------------------------------


def kill_and_compare(args: list[str], folder: Path, seeds: list[int], lives: int) -> None:
    """Runs with random kills must end as one without, bit for bit, and each survivor must name who died."""
    run = [*args, f"--out={folder}"]
    assert torchrun(2, [*run, "--name=straight"], [], folder / "logs").error == ""
    want = whole_state(find_checkpoint(folder / "straight"))
    for seed in seeds:
        faults = random_kills(seed, lives, 2)
        outcome = torchrun(2, [*run, f"--name=run{seed}"], faults, folder / f"logs{seed}", max_restarts=lives)
        assert outcome.error == "", faults
        assert same_state(whole_state(find_checkpoint(folder / f"run{seed}")), want), faults
        for fault in faults:
            survivor = (fault.life, 1 - fault.rank)
            assert f"rank {fault.rank} (process" in outcome.logs[survivor], (fault, outcome.logs[survivor])
            assert "has died" in outcome.logs[survivor]
            assert outcome.delays[survivor] < MARGIN


def test_killed_at_random_moments(args, tmp_path):
    kill_and_compare(args, tmp_path, [1], 2)


@pytest.mark.slow
def test_killed_at_many_random_moments(args, tmp_path):
    kill_and_compare(args, tmp_path, list(range(2, 8)), 4)


# --- hung, stopped, out of memory -------------------------------------------------------------------------------------


def check_named(outcome, fault: Fault, world: int, words: str, limit: float) -> None:
    pattern = rf"rank {fault.rank} \(process \d+ on \S+\) {words}"
    for rank in set(range(world)) - {fault.rank}:
        text = outcome.logs[0, rank]
        assert re.search(pattern, text), (rank, text)
        assert outcome.delays[0, rank] < limit


def test_a_rank_that_hangs(args, tmp_path):
    """Four ranks in two groups of expert parallelism: those that wait for those that wait for it are not blamed."""
    fault = Fault(2, "sleep", step=3)
    outcome = torchrun(
        4,
        [*args, "--ep=2", f"--stall-timeout={STALL}", f"--out={tmp_path}", "--name=r"],
        [fault],
        tmp_path / "logs",
    )
    check_named(
        outcome, fault, 4, r"hangs at trainer.py:\d+ run: no collective for \d+ s, which", STALL + MARGIN
    )
    assert find_checkpoint(tmp_path / "r").name == "step-00000002"


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_that_is_stopped(args, tmp_path, rank):
    fault = Fault(rank, "stop", step=3)
    outcome = torchrun(
        2,
        [*args, f"--heartbeat-timeout={HEARTBEAT}", f"--out={tmp_path}", "--name=r"],
        [fault],
        tmp_path / "logs",
    )
    check_named(outcome, fault, 2, r"has not been heard of for \d+ s, last seen at", HEARTBEAT + MARGIN)


def test_a_rank_out_of_memory(args, tmp_path):
    fault = Fault(1, "memory", step=3)
    outcome = torchrun(2, [*args, f"--out={tmp_path}", "--name=r"], [fault], tmp_path / "logs")
    check_named(outcome, fault, 2, "is out of memory: CUDA out of memory", MARGIN)
    assert re.search(r"rank\s+: 1", outcome.error)  # torchrun's report has the first cause
    assert "OutOfMemoryError" in outcome.error


# --- who is to blame --------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def judge(rank: int, world: int) -> _Judge:
    cfg = ParallelConfig(heartbeat_timeout=10, stall_timeout=50)
    who = [["host", str(os.getpid()), "here" if r < 2 else "there"] for r in range(world)]
    return _Judge(Parallel(torch.device("cpu"), rank, world), cfg, who)


def test_only_rank_0_judges_all(clock):
    assert judge(0, 3).watched == [0, 1, 2]
    assert judge(2, 3).watched == [0]


def test_a_silent_rank_is_named_after_the_timeout(clock):
    court = judge(0, 3)
    for second in range(12):
        clock[0] = second
        verdict = court.look([f"{second} 7 a", f"{second} 7 b", f"{min(second, 1)} 7 c.py:1 f"])
        assert (verdict is not None) == (second > 11)
    clock[0] = 12
    rank, what = court.look(["12 7 a", "12 7 b", "1 7 c.py:1 f"])
    assert rank == 2
    assert "not been heard of for 11 s, last seen at c.py:1 f" in what


def test_those_behind_are_named_after_the_timeout(clock):
    court = judge(0, 4)
    assert court.look([f"0 {c} x" for c in (1, 1, 1, 1)]) is None
    verdicts = []
    for second in range(1, 60):
        clock[0] = second
        verdicts.append(court.look([f"{second} {c} at{c}" for c in (9, 8, 7, 9)]))
    assert verdicts[:51] == [None] * 51
    rank, what = verdicts[51]
    assert rank == 2
    assert what == "hangs at at7: no collective for 51 s, which the others wait for"


def test_progress_anywhere_resets_the_clock(clock):
    court = judge(0, 2)
    for second in range(200):
        clock[0] = second
        assert court.look([f"{second} 5 x", f"{second} {second // 40} x"]) is None


def test_nobody_behind(clock):
    court = judge(0, 2)
    court.look(["0 5 x", "0 5 y"])
    for second in range(1, 52):
        clock[0] = second
        verdict = court.look([f"{second} 5 x", f"{second} 5 y"])
    assert "no rank has entered fewer than another" in verdict[1]


def test_a_dead_process_on_this_machine_is_seen_at_once(clock):
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    court = judge(0, 2)
    court._who[1] = ["host", str(pid), "here"]
    assert court.look(["0 5 x", "0 5 y"]) == (1, "has died, last seen at y")
    court._who[1] = [
        "host",
        str(pid),
        "there",
    ]  # of another machine, nothing can be said but by its heartbeats
    assert court.look(["0 5 x", "0 5 y"]) is None


# --- started again ----------------------------------------------------------------------------------------------------


def test_what_a_restart_goes_on_from(tmp_path, monkeypatch):
    cfg = Config(out=str(tmp_path), name="r")
    assert checkpoint_to_continue(cfg, None, False) is None
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    assert checkpoint_to_continue(cfg, None, False) is None
    with pytest.raises(ConfigError, match="--max-restarts needs a --name"):
        checkpoint_to_continue(replace(cfg, name=""), None, False)
    old, new = (save_checkpoint(tmp_path / "r/checkpoints", step, {"step": step}, 2) for step in (1, 2))
    assert checkpoint_to_continue(cfg, new, False) == new
    with pytest.raises(ConfigError, match=r"newest checkpoint.*step-00000002.*got.*step-00000001"):
        checkpoint_to_continue(cfg, old, False)
    assert checkpoint_to_continue(cfg, None, True) == new
    assert checkpoint_to_continue(cfg, old, True) == new
    assert checkpoint_to_continue(replace(cfg, name="other"), None, True) is None


def counted_by(machine: int) -> bool:
    """Torchrun counts the failures of its own machine; when it starts again because another's failed, it counts nothing."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(int(os.environ["RANK"] == str(machine)))
    return started_again(init_parallel(Config(device="cpu")))


@pytest.mark.parametrize("machine", [1, -1])
def test_all_ranks_know_of_a_restart(machine):
    assert run_ranks(2, counted_by, machine) == [machine >= 0] * 2

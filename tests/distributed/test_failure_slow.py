"""The torchrun command itself, and two of its agents, as on two machines: a worker is killed, both start theirs again."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mx_trainer.checkpoint import find_checkpoint, list_checkpoints
from support.checkpoints import same_state, whole_state

from .ranks import _free_port
from .test_failure import args as args
from .torchrun import torchrun

pytestmark = pytest.mark.slow


def start(command: list[str], folder: Path) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    log = (folder / "log").open("w")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *command],
        stdout=log,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def kill_a_worker(agent: subprocess.Popen[str], run: Path, step: int) -> None:
    """SIGKILL a process of this agent as soon as the checkpoint of `step` is there."""
    deadline = time.monotonic() + 200
    while not any(p.name >= f"step-{step:08d}" for p in list_checkpoints(run / "checkpoints")):
        assert agent.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_command(args, tmp_path, nodes):
    run = ["-m", "mx_trainer", *args, f"--out={tmp_path}"]
    assert torchrun(2, [*run[2:], "--name=straight"], [], tmp_path / "logs").error == ""
    where = ["--standalone", "--nproc-per-node=2"]
    if nodes == 2:
        where = [
            "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{_free_port()}",
            "--rdzv-id=test",
        ]  # fmt: skip
    agents = [
        start([*where, "--max-restarts=2", *run, "--name=r"], tmp_path / f"agent{i}") for i in range(nodes)
    ]
    try:
        kill_a_worker(agents[-1], tmp_path / "r", 3)
        codes = [agent.wait(timeout=250) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    logs = [(tmp_path / f"agent{i}" / "log").read_text() for i in range(nodes)]
    assert codes == [0] * nodes, logs
    assert re.search(r"mx-train: error: rank \d \(process \d+ on \S+\) has died", "".join(logs)), logs
    states = [whole_state(find_checkpoint(tmp_path / name)) for name in ("straight", "r")]
    assert same_state(*states)

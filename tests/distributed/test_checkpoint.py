"""Checkpoints that one number of processes writes and another reads: the same bits, and the same run."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mx_trainer.checkpoint import find_checkpoint
from mx_trainer.config import Config, DataConfig, ModelConfig, OptimConfig, ParallelConfig
from mx_trainer.errors import CheckpointError
from mx_trainer.metrics import read_metrics
from support.checkpoints import differences, whole_state

from .ranks import make_trainer, run_ranks
from .torchrun import SMALL, torchrun

STEPS = 2
"""Steps before the checkpoint, and again after it."""


@pytest.fixture(scope="session")
def cfg(text: Path) -> Config:
    return Config(
        model=ModelConfig(
            layers=1, width=32, heads=2, block=16, experts=4, top_k=2, expert_width=32, shared_width=32
        ),
        data=DataConfig(data=str(text), val_fraction=0.1),
        optim=OptimConfig(steps=2 * STEPS, batch=12, warmup=1, lr=4e-3),
        device="cpu",
        precision="fp32",
    )


def go_on(cfg: Config, run_dir: Path, resume: bool) -> list[float]:
    """Load a checkpoint if there is to be one, train `STEPS` steps and save; the losses."""
    trainer = make_trainer(cfg)
    if resume:
        trainer.resume(find_checkpoint(run_dir))
    losses = [trainer.train_step()[0][0].item() for _ in range(STEPS)]
    trainer.save(run_dir)
    return losses


def rewrite(cfg: Config, source: Path, target: Path) -> None:
    """Load and save again: nothing but the sharding may change."""
    trainer = make_trainer(cfg)
    trainer.resume(find_checkpoint(source))
    trainer.save(target)


def spread(cfg: Config, how: str) -> Config:
    ep = int(how[2:]) if how.startswith("ep") else 1
    return replace(cfg, parallel=ParallelConfig(ep=ep, fsdp="copies" not in how))


def bits(state: dict[str, Any]) -> dict[str, Any]:
    """What must not depend on how many processes wrote it."""
    return {name: value for name, value in state.items() if not name.startswith("rng") and name != "world"}


@pytest.fixture(scope="session")
def straight(cfg: Config, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Path]:
    """One process, never stopped: its losses, and its checkpoint of half way."""
    folder = tmp_path_factory.mktemp("straight")
    losses = run_ranks(1, go_on, cfg, folder, False)[0]
    return losses + run_ranks(1, go_on, replace(cfg, keep=2), folder, True)[0], folder


@pytest.mark.parametrize(
    ("writers", "written", "readers", "read"),
    [
        (1, "fsdp", 2, "fsdp"), (2, "fsdp", 1, "fsdp"), (2, "ep2", 4, "ep2"), (4, "ep4", 2, "ep2"), (3, "fsdp", 1, "fsdp"),
        (2, "copies", 4, "ep2"), (4, "ep2", 3, "fsdp"),
    ],
)  # fmt: skip
def test_other_numbers_of_processes(cfg, straight, tmp_path, writers, written, readers, read):
    here, there = spread(cfg, written), spread(cfg, read)
    first = run_ranks(writers, go_on, here, tmp_path / "run", False)
    before = whole_state(find_checkpoint(tmp_path / "run"))
    run_ranks(readers, rewrite, there, tmp_path / "run", tmp_path / "copy")
    copy = whole_state(find_checkpoint(tmp_path / "copy"))
    assert copy["world"] == readers
    assert bits(before).keys() == bits(copy).keys()
    assert not differences(bits(before), bits(copy))
    second = run_ranks(readers, go_on, there, tmp_path / "run", True)
    losses = torch.cat(
        [torch.tensor(ranks).mean(0) for ranks in (first, second)]
    )  # every rank has its own tokens'
    torch.testing.assert_close(losses, torch.tensor(straight[0]), rtol=1e-5, atol=0)


def with_dropout(cfg: Config) -> Config:
    return replace(cfg, model=replace(cfg.model, dropout=0.2))


def test_generators(cfg, tmp_path):
    """Dropout draws from every rank's own generator: two processes go on bit for bit, four draw anew."""
    cfg = with_dropout(cfg)
    both = run_ranks(2, go_on_twice, cfg, tmp_path / "straight")
    assert both[0] != both[1]
    run_ranks(2, go_on, cfg, tmp_path / "r", False)
    four = run_ranks(4, first_draws, cfg, tmp_path / "r")
    assert len({first for first, _ in four}) == 4
    assert all(first == second for first, second in four)
    again = run_ranks(2, go_on, cfg, tmp_path / "r", True)
    assert [losses[STEPS:] for losses in both] == again
    want, got = (whole_state(find_checkpoint(tmp_path / name)) for name in ("straight", "r"))
    assert want.keys() == got.keys()
    assert not differences(want, got)


def go_on_twice(cfg: Config, run_dir: Path) -> list[float]:
    trainer = make_trainer(cfg)
    losses = [trainer.train_step()[0][0].item() for _ in range(2 * STEPS)]
    trainer.save(run_dir)
    return losses


def first_draws(cfg: Config, run_dir: Path) -> list[float]:
    """Of two resumes."""
    trainer, draws = make_trainer(cfg), []
    for _ in range(2):
        trainer.resume(find_checkpoint(run_dir))
        draws.append(torch.rand(()).item())
    return draws


# --- what goes wrong on one rank --------------------------------------------------------------------------------------


def test_a_rank_that_cannot_write_or_read(cfg, tmp_path):
    run_ranks(2, go_on, cfg, tmp_path, False)
    before = whole_state(find_checkpoint(tmp_path))
    for message in run_ranks(2, full_disk, cfg, tmp_path):
        assert re.search(r"step-0+3.tmp: rank 1: OSError: .*No space left", message)
    assert find_checkpoint(tmp_path).name == "step-00000002"
    assert not differences(before, whole_state(find_checkpoint(tmp_path)))
    for message in run_ranks(2, flipped_bit, cfg, tmp_path):
        assert re.search(
            r"rank \d: .*damaged checkpoint \(__1_0.distcp does not match its SHA-256\)", message
        )


def full_disk(cfg: Config, run_dir: Path) -> str:
    import torch.distributed.checkpoint as dcp

    def write_data(*_):
        raise OSError(28, "No space left on device")

    trainer = make_trainer(cfg)
    trainer.resume(find_checkpoint(run_dir))
    trainer.train_step()
    if trainer.parallel.rank == 1:
        dcp.FileSystemWriter.write_data = write_data
    with pytest.raises(CheckpointError) as error:
        trainer.save(run_dir)
    return str(error.value)


def flipped_bit(cfg: Config, run_dir: Path) -> str:
    trainer = make_trainer(cfg)
    shard = find_checkpoint(run_dir) / "__1_0.distcp"
    if trainer.parallel.is_main:
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
    trainer.parallel.barrier()
    weights = [p.detach().clone() for p in trainer.model.parameters()]
    with pytest.raises(CheckpointError) as error:
        trainer.resume(find_checkpoint(run_dir))
    assert all(map(torch.equal, trainer.model.parameters(), weights))
    return str(error.value)


def test_the_command_line(cfg, tmp_path):
    """Saved by two processes that share the experts, loaded by one."""
    args = [
        *SMALL,
        f"--data={cfg.data.data}",
        "--val-fraction=0.1",
        f"--out={tmp_path}",
        "--name=r",
        "--ep=2",
    ]
    assert torchrun(2, [*args, "--steps=3"], [], tmp_path / "logs2").error == ""
    assert (
        torchrun(1, [f"--resume={tmp_path / 'r'}", "--ep=1", "--steps=5"], [], tmp_path / "logs1").error == ""
    )
    records = read_metrics(tmp_path / "r")
    assert [r["step"] for r in records if "train_loss" in r] == [1, 2, 3, 4, 5]

"""Checkpoints that one number of processes writes and another reads: the same bits, and the same run."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mx_trainer.checkpoint import find_checkpoint
from mx_trainer.config import Config, DataConfig, ModelConfig, OptimConfig, ParallelConfig
from support.checkpoints import differences, whole_state

from .ranks import run_ranks

STEPS = 3
"""Steps before the checkpoint, and again after it."""


@pytest.fixture(scope="session")
def cfg(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text(Path(torch.nn.functional.__file__).read_text()[:60_000])
    os.environ["MX_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    return Config(
        model=ModelConfig(
            layers=1, width=32, heads=2, block=16, experts=4, top_k=2, expert_width=32, shared_width=32
        ),
        data=DataConfig(data=str(folder / "a.txt"), val_fraction=0.1),
        optim=OptimConfig(steps=2 * STEPS, batch=12, warmup=1, lr=4e-3),
        device="cpu",
        precision="fp32",
    )


def go_on(cfg: Config, run_dir: Path, resume: bool) -> list[float]:
    """Load a checkpoint if there is to be one, train `STEPS` steps and save; the losses."""
    from mx_trainer.data import load_corpus
    from mx_trainer.trainer import Trainer, resolve_vocab

    corpus = load_corpus(cfg.data)
    trainer = Trainer(resolve_vocab(cfg, corpus), corpus)
    if resume:
        trainer.resume(find_checkpoint(run_dir))
    losses = [trainer.train_step()[0][0].item() for _ in range(STEPS)]
    trainer.save(run_dir)
    return losses


def rewrite(cfg: Config, source: Path, target: Path) -> None:
    """Load and save again: nothing but the sharding may change."""
    from mx_trainer.data import load_corpus
    from mx_trainer.trainer import Trainer, resolve_vocab

    corpus = load_corpus(cfg.data)
    trainer = Trainer(resolve_vocab(cfg, corpus), corpus)
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
    losses = torch.cat([torch.tensor(ranks).mean(0) for ranks in (first, second)])  # every rank has its own tokens'
    torch.testing.assert_close(losses, torch.tensor(straight[0]), rtol=1e-5, atol=0)

"""A corpus and a configuration small enough that twenty steps take a second."""

import argparse
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from mx_trainer.config import Config, DataConfig, ModelConfig, OptimConfig
from mx_trainer.data import Corpus, load_corpus
from mx_trainer.trainer import Trainer, resolve_vocab

SMALL = [
    "--preset=smoke", "--layers=2", "--width=32", "--heads=2", "--block=32",
    "--experts=4", "--expert-width=32", "--batch=4", "--warmup=2", "--log-every=1",
    "--eval-every=10", "--eval-tokens=256", "--final-eval-tokens=512", "--save-every=10", "--sample-tokens=0",
]  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory):
    """No test reads or fills the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MX_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty text files of real code, 250 kB together, one in a subfolder, and two that are not text."""
    folder = tmp_path_factory.mktemp("text")
    modules = (argparse, inspect, json, subprocess)
    lines = "".join(Path(m.__file__).read_text() for m in modules).splitlines(keepends=True)
    size = len(lines) // 40
    (folder / "sub").mkdir()
    for i in range(40):
        name = f"sub/{i:02}.txt" if i == 7 else f"{i:02}.txt"
        (folder / name).write_text("".join(lines[i * size : (i + 1) * size]))
    (folder / "image.raw").write_bytes(b"\xff\xfe\x00\x01")
    (folder / "with_nul.txt").write_bytes(b"text\0text")
    return folder


@pytest.fixture
def small() -> Config:
    return Config(
        model=ModelConfig(layers=2, width=32, heads=2, block=32, experts=4, top_k=2, expert_width=32),
        data=DataConfig(),
        optim=OptimConfig(steps=20, batch=4, warmup=2, lr=4e-3),
        device="cpu",
    )


@pytest.fixture(scope="session")
def corpus(text_folder: Path) -> Corpus:
    return load_corpus(DataConfig(data=str(text_folder), val_fraction=0.1))


@pytest.fixture
def make_trainer(corpus: Corpus):
    def make(cfg: Config, **changes) -> Trainer:
        return Trainer(resolve_vocab(replace(cfg, **changes), corpus), corpus)

    return make


def spawn(args: Sequence[str]) -> subprocess.Popen[str]:
    """`mx-train` with one thread, as the tests themselves run: the order of sums depends on the number of threads."""
    return subprocess.Popen(
        [sys.executable, "-m", "mx_trainer", *args],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

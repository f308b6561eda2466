"""The trainer section, with a process that writes what mx-train writes, or fails."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from mx_bench import trainer


@pytest.fixture
def fake_train(monkeypatch):
    """Replace the process: `rates` are tokens per second of each record, or a reason to fail."""

    def install(rates: list[float] | str) -> list[list[str]]:
        commands = []

        def run(command, **options):
            commands.append(command)
            assert options["env"]["OMP_NUM_THREADS"] == "1"
            if isinstance(rates, str):
                return SimpleNamespace(returncode=1, stderr=f"Traceback …\n{rates}\n")
            out = Path(command[command.index("--out") + 1]) / "bench"
            out.mkdir()
            lines = [json.dumps({"step": i, "tokens_per_s": rate}) for i, rate in enumerate(rates)]
            (out / "metrics.jsonl").write_text("\n".join(lines))
            config = {"optim": {"batch": 4, "accumulate": 2}, "model": {"block": 100}}
            (out / "config.json").write_text(json.dumps(config))
            return SimpleNamespace(returncode=0, stderr="")

        monkeypatch.setattr(subprocess, "run", run)
        return commands

    return install


def test_seconds_of_a_step(fake_train):
    """The first records are compilation; the median of the rest gives the step of 800 tokens."""
    commands = fake_train([1.0, 1.0, 1.0, 400.0, 400.0, 400.0])
    bf16, mxfp8 = trainer.measure_trainer("smoke", steps=6, threads=1)
    assert (bf16.seconds, bf16.rounds, bf16.contestant) == (2.0, 3, "ours bf16")
    assert mxfp8.contestant == "ours mxfp8"
    assert ["bf16" in c for c in commands] == [True, False]


def test_both_at_once_to_compile(fake_train):
    commands = fake_train([1.0, 1.0])
    both = trainer.measure_trainer("smoke", steps=2, threads=1, at_once=True)
    assert [m.contestant for m in both] == ["ours bf16", "ours mxfp8"]
    assert not any(m.is_failure for m in both)
    assert len(commands) == 2
    fake_train("ValueError: no such preset")
    assert all(m.is_failure for m in trainer.measure_trainer("x", steps=2, threads=1, at_once=True))


def test_failures_are_notes(fake_train, monkeypatch):
    fake_train("ValueError: no such preset")
    assert trainer.measure_trainer("x", steps=6, threads=1)[0].note == "failed: ValueError: no such preset"
    fake_train([1.0, 1.0])
    assert trainer.measure_trainer("x", steps=2, threads=1)[0].note == "too few steps to tell a rate"

    def too_long(*args, **options):
        raise subprocess.TimeoutExpired("mx-train", 600)

    monkeypatch.setattr(subprocess, "run", too_long)
    assert trainer.measure_trainer("x", steps=6)[0].note == "failed: not done after 600 s"

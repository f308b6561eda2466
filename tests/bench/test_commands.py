"""Every command beside mx-bench: --help works everywhere, and a missing GPU is one line."""

import runpy
import sys
import warnings
from pathlib import Path

import pytest
import torch

NEED_A_GPU = ("mx_bench.gemm_tiles", "mx_bench.memory_bound_tiles", "mx_bench.memory_bound_host")
COMMANDS = (*NEED_A_GPU, "mx_bench.memory_bound", "mx_bench.project.scaling", "mx_bench.project.refit")
SCRIPT = Path(__file__).parents[2] / "tools" / "docs" / "block_scaling.py"


def status(monkeypatch, command: str, *arguments: str) -> int | str | None:
    """Run a module or script as `python` does; the status that it ends with."""
    monkeypatch.setattr(sys, "argv", [command, *arguments])
    run = runpy.run_path if command.endswith(".py") else runpy.run_module
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # runpy, of a module that a test has imported
        with pytest.raises(SystemExit) as end:
            run(command, run_name="__main__")
    return end.value.code


@pytest.mark.parametrize("command", [*COMMANDS, str(SCRIPT)], ids=lambda c: c.rpartition("/")[2])
def test_help(monkeypatch, capsys, command):
    assert status(monkeypatch, command, "--help") == 0
    assert capsys.readouterr().out.startswith("usage: ")


@pytest.mark.parametrize("command", NEED_A_GPU)
def test_a_missing_gpu_is_one_line(monkeypatch, capsys, command):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert status(monkeypatch, command) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"python -m {command}: needs a GPU with kernels (")
    assert error.endswith("), found none\n")
    assert error.count("\n") == 1


def test_arguments_that_do_not_exist(monkeypatch, capsys, tmp_path):
    assert status(monkeypatch, "mx_bench.gemm_tiles", "forward") == 2
    assert "expected one of fprop, dgrad, wgrad, got 'forward'" in capsys.readouterr().err
    assert status(monkeypatch, "mx_bench.project.scaling", str(tmp_path)) == 2
    assert "no such page" in capsys.readouterr().err

"""Warming: everything is called once, nothing is measured, and what failed is said and gives status 1."""

import subprocess
from types import SimpleNamespace

import pytest
from mx_bench import cli, warm
from mx_bench.cases import Case
from mx_bench.plan import Plan, run_cases
from mx_bench.results import Measurement, load

WARM = Plan("cpu", quick=True, warm=True)


def test_every_contestant_is_called_once_and_failures_come_back():
    seen = []

    def broken(number: int) -> None:
        seen.append("broken")
        raise RuntimeError("no such tile")

    cases = [Case("case", {"broken": broken, "ours": lambda n: seen.append(n), "absent": "not installed"})]
    (failure,) = run_cases("section", cases, WARM)
    assert seen == ["broken", 0]
    assert failure.key == ("section", "case", "broken")
    assert failure.note == "failed: RuntimeError: no such tile"
    assert failure.is_failure


def test_a_case_that_cannot_be_set_up_is_a_failure():
    def cases():
        yield Case("first", {"ours": lambda _: None})
        raise MemoryError("no room")

    (failure,) = run_cases("section", cases(), WARM)
    assert failure.is_failure


def test_what_is_no_failure():
    assert not Measurement("s", "c", "x", None, note="not installed").is_failure
    assert not Measurement("s", "c", "x", 1.0, note="1,000 tokens/s").is_failure
    assert not Measurement("s", "c", "x", None, note="too few steps to tell a rate").is_failure


@pytest.fixture
def sections(monkeypatch):
    """Sections in place of the real ones: "good" and "bad" (which raises) and the ceilings; returns what ran in this process."""
    ran = []

    def good(plan: Plan) -> list[Measurement]:
        ran.append("good")
        return [] if plan.warm else [Measurement("good", "case", "ours", 1e-3, 0.01, 3)]

    def bad(plan: Plan) -> list[Measurement]:
        ran.append("bad")
        raise RuntimeError("boom")

    monkeypatch.setattr(cli, "SECTIONS", {"ceilings": good, "good": good, "bad": bad})
    return ran


def test_a_failure_is_said_and_is_status_1(sections, tmp_path, capsys):
    assert cli.main(["--out", str(tmp_path / "out"), "--warm"]) == 1
    assert "bad | section | all: failed: RuntimeError: boom" in capsys.readouterr().out
    assert cli.main(["--out", str(tmp_path / "out"), "--warm", "--section", "good"]) == 0
    assert not (tmp_path / "out").exists()


@pytest.fixture
def on_a_gpu(monkeypatch):
    """A plan for a GPU; the processes that warm are recorded, and give these statuses by section."""
    statuses: dict[str, int] = {}
    commands = []
    monkeypatch.setattr(cli, "Plan", lambda device, **options: Plan("cuda", **options))

    def run(command, **options):
        commands.append(command)
        status = statuses.get(command[-1], 0)
        said = "[3 s] good | case | ours: failed: RuntimeError: no such tile\n" if status else ""
        return SimpleNamespace(returncode=status, stdout=f"[0 s] hello\n{said}", stderr="")

    monkeypatch.setattr(warm.subprocess, "run", run)
    return SimpleNamespace(statuses=statuses, commands=commands)


def test_a_gpu_run_compiles_first_and_goes_on_after_a_failure(
    sections, on_a_gpu, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(cli, "machine", SimpleNamespace(describe=lambda: {"device": "test"}))
    on_a_gpu.statuses["good"] = 1
    assert cli.main(["--quick", "--out", str(tmp_path)]) == 0
    assert sorted(command[-1] for command in on_a_gpu.commands) == ["bad", "good"]
    assert all(
        command[1:6] == ["-m", "mx_bench", "--quick", "--warm", "--section"] for command in on_a_gpu.commands
    )
    printed = capsys.readouterr().out
    assert "compiling 2 sections, each in a process of its own" in printed
    assert "good | case | ours: failed: RuntimeError: no such tile" in printed
    assert "hello" not in printed
    assert load(tmp_path / "results.json").sections_done == ("ceilings", "good", "bad")


@pytest.mark.parametrize("status", [0, 1])
def test_warming_a_gpu_measures_nothing(sections, on_a_gpu, tmp_path, monkeypatch, status):
    monkeypatch.setattr(cli, "machine", SimpleNamespace(describe=lambda: {"device": "test"}))
    on_a_gpu.statuses["bad"] = status
    assert cli.main(["--warm", "--out", str(tmp_path)]) == status
    assert len(on_a_gpu.commands) == 2
    assert sections == []


def test_one_section_compiles_in_its_own_process(sections, on_a_gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "machine", SimpleNamespace(describe=lambda: {"device": "test"}))
    assert cli.main(["--section", "good", "--out", str(tmp_path)]) == 0
    assert on_a_gpu.commands == []
    assert sections == ["good"]


def test_a_process_that_does_not_end_or_dies_is_a_failure(monkeypatch):
    said = []

    def too_long(command, **options):
        raise subprocess.TimeoutExpired(command, 600)

    monkeypatch.setattr(warm.subprocess, "run", too_long)
    assert not warm.warm_sections(["good"], said.append, quick=False)
    assert said[-1] == "good: not compiled after 600 s"
    assert warm.complaint("", "Traceback\nKilled") == "Killed"
    assert warm.complaint("", "") == "ended without a word"

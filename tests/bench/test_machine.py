"""What a run says of its machine and its code."""

import subprocess
from pathlib import Path

from mx_bench import machine


def git(*arguments: str, cwd: Path) -> str:
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True).stdout.strip()


def test_the_commit_is_that_of_this_code_wherever_it_is_run(tmp_path, monkeypatch):
    git("init", "-q", cwd=tmp_path)
    git("commit", "-q", "--allow-empty", "-m", "another repository", cwd=tmp_path)
    before = machine.describe()["commit"]
    monkeypatch.chdir(tmp_path)
    assert machine.describe()["commit"] == before
    assert before is None or not str(before).startswith(git("rev-parse", "--short", "HEAD", cwd=tmp_path))


def test_code_outside_of_a_repository_has_no_commit(tmp_path, monkeypatch):
    git("init", "-q", cwd=tmp_path)
    git("commit", "-q", "--allow-empty", "-m", "a repository that does not hold it", cwd=tmp_path)
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "machine.py"))
    assert machine.describe()["commit"] is None

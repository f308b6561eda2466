"""The baseline of tests/benchmarks: a slower ratio fails, an unknown benchmark fails, every benchmark is in it."""

import ast
import json

import pytest
from benchmarks import ratios


@pytest.fixture
def baseline(tmp_path, monkeypatch):
    path = tmp_path / "baseline.json"
    path.write_text(json.dumps({"test_x": {"yardstick": "exp", "ratio": 2.0}}))
    monkeypatch.setattr(ratios, "BASELINE", path)
    return path


def test_slower_than_the_baseline_fails(baseline):
    ratios.check_ratio("test_x", "exp", 3.9)
    with pytest.raises(AssertionError, match=r"at most 4\.00"):
        ratios.check_ratio("test_x", "exp", 4.1)


def test_an_unknown_benchmark_and_another_yardstick_fail(baseline):
    with pytest.raises(AssertionError, match=r"not in baseline\.json"):
        ratios.check_ratio("test_y", "exp", 1.0)
    with pytest.raises(AssertionError):
        ratios.check_ratio("test_x", "product", 1.0)


def test_update(baseline, monkeypatch):
    monkeypatch.setenv("MX_UPDATE_BASELINE", "1")
    ratios.check_ratio("test_y", "exp", 1.23456)
    assert json.loads(baseline.read_text())["test_y"] == {"yardstick": "exp", "ratio": 1.23}


def test_every_benchmark_has_a_baseline():
    known = {name.split("[")[0] for name in json.loads(ratios.BASELINE.read_text())}
    found = set()
    for name in ("test_bench_core.py", "test_bench_layer.py"):
        tree = ast.parse(ratios.BASELINE.with_name(name).read_text())
        found |= {f.name for f in tree.body if isinstance(f, ast.FunctionDef) and f.name.startswith("test_")}
    assert found == known


def test_fastest_of_several_calls():
    assert 0 < ratios.fastest(lambda: sum(range(100_000)), rounds=3) < 1

"""`mx-train scaling` end to end: every layout, its table, its bytes, its checkpoint."""

import json

import pytest
from mx_trainer.cli import train
from mx_trainer.exchange import row_bytes
from mx_trainer.profiling import COMMUNICATION

from .ranks import run_ranks

WIDTH, EXPERTS, K, STEPS = 32, 4, 2, 11


def scaling(flags: list[str]) -> int:
    return train(["scaling", *flags])


@pytest.fixture
def flags(tmp_path, text) -> list[str]:
    return [
        "--preset=smoke", "--layers=1", f"--width={WIDTH}", "--heads=2", "--block=16", f"--experts={EXPERTS}",
        f"--top-k={K}", "--expert-width=32", "--batch=4", f"--steps={STEPS}", "--warmup=1", "--lr=1e-4", "--eval-tokens=128",
        f"--data={text}", f"--out={tmp_path}", "--name=s", "--device=cpu", "--precisions", "mxfp8",
    ]  # fmt: skip


def test_table(tmp_path, flags):
    assert run_ranks(2, scaling, flags) == [0, 0]
    written = json.loads((tmp_path / "s" / "scaling.json").read_text())
    results = {r["layout"]: r for r in written["precisions"]["mxfp8"]}
    assert written["link_bytes_per_s"] > 0
    names = ["one process", "FSDP", "EP", "EP, rows in MXFP8", "FSDP × EP, 1×2", "EP, padded"]
    assert list(results) == names
    assert len((tmp_path / "s" / "scaling.md").read_text().splitlines()) == 4 + len(names)
    for name, r in results.items():
        assert max(r["loss_differences"]) < (1e-3 if "MXFP8" in name else 1e-4), name
        assert (r["efficiency"] == 1) == (name == "one process")
        assert (COMMUNICATION in r["profile"]["parts"]) == (name != "one process")
        assert r["host_ms"] > 0
        if "EP" in name:
            want = K * sum(row_bytes(WIDTH, 2, "MXFP8" in name).values()) * (2 if "padded" in name else 1)
            counts = EXPERTS * 8 / (4 * 16 / 2)
            # Validation dispatches as well, forward only, after the steps are counted.
            assert sum(r["bytes_per_token"].values()) == want + counts, name
    assert (tmp_path / "s" / "mxfp8" / "checkpoints" / f"step-{STEPS:08d}").is_dir()


def test_a_world_of_one_shows_what_fsdp_costs(tmp_path, flags):
    assert run_ranks(1, scaling, flags) == [0]
    one, fsdp = json.loads((tmp_path / "s" / "scaling.json").read_text())["precisions"]["mxfp8"]
    assert (one["layout"], fsdp["layout"], fsdp["processes"]) == ("one process", "FSDP", 1)
    assert fsdp["losses"] == one["losses"]


def test_every_layout_must_fit_before_anything_starts(tmp_path, flags, monkeypatch, capsys):
    for name, value in {"WORLD_SIZE": "3", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert scaling([*flags, "--batch=6"]) == 2
    assert f"--ep must divide --experts, got 3 and {EXPERTS}" in capsys.readouterr().err
    assert not (tmp_path / "s").exists()

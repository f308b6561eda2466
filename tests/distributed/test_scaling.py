"""`mx-train scaling` end to end: every layout, its table, its bytes, its checkpoint."""

import json
import os
from pathlib import Path

import torch
from mx_trainer.exchange import row_bytes

from .ranks import run_ranks

WIDTH, EXPERTS, K, STEPS = 32, 4, 2, 11


def scaling(flags: list[str]) -> int:
    from mx_trainer.cli import train

    return train(["scaling", *flags])


def test_table(tmp_path, monkeypatch):
    text = tmp_path / "a.txt"
    text.write_text(Path(torch.nn.functional.__file__).read_text()[:40_000])
    monkeypatch.setitem(os.environ, "MX_CACHE_DIR", str(tmp_path / "cache"))
    flags = [
        "--preset=smoke", "--layers=1", f"--width={WIDTH}", "--heads=2", "--block=16", f"--experts={EXPERTS}",
        f"--top-k={K}", "--expert-width=32", "--batch=4", f"--steps={STEPS}", "--warmup=1", "--lr=1e-4", "--eval-tokens=128",
        f"--data={text}", f"--out={tmp_path}", "--name=s", "--device=cpu", "--precisions", "mxfp8",
    ]  # fmt: skip
    assert run_ranks(2, scaling, flags) == [0, 0]
    results = {r["layout"]: r for r in json.loads((tmp_path / "s" / "scaling.json").read_text())["mxfp8"]}
    names = ["one process", "FSDP", "EP", "EP, rows in MXFP8", "FSDP × EP, 1×2", "EP, padded"]
    assert list(results) == names
    assert len((tmp_path / "s" / "scaling.md").read_text().splitlines()) == 2 + len(names)
    for name, r in results.items():
        assert max(r["loss_differences"]) < (1e-3 if "MXFP8" in name else 1e-4), name
        assert (r["efficiency"] == 1) == (name == "one process")
        if "EP" in name:
            want = K * sum(row_bytes(WIDTH, 2, "MXFP8" in name).values()) * (2 if "padded" in name else 1)
            counts = EXPERTS * 8 / (4 * 16 / 2)
            # Validation dispatches as well, forward only, after the steps are counted.
            assert sum(r["bytes_per_token"].values()) == want + counts, name
    assert (tmp_path / "s" / "mxfp8" / "checkpoints" / f"step-{STEPS:08d}").is_dir()

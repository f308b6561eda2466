"""`mx-train compare`: the verdict on made-up curves, and a small real one with its control."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from mx_kernels import RECIPES
from mx_trainer import report
from mx_trainer.cli import train
from mx_trainer.compare import Comparison, Roles, judge
from mx_trainer.config import Config
from mx_trainer.faults import fault_of
from mx_trainer.metrics import read_metrics
from mx_trainer.quant_error import KINDS, measure_quantization

STEPS = (10, 20, 30, 40)


def curve(*losses: float) -> list[dict]:
    points = [{"step": s, "val_loss": v} for s, v in zip(STEPS, losses, strict=True)]
    return [{"step": 5, "tokens_per_s": 100.0}, *points]


def verdict(base: list[float], candidate: list[float], control: list[float] | None = None) -> Comparison:
    losses = {"bf16": base, "mxfp8": candidate, "mxfp4": control or []}
    records = {
        p: {
            seed: curve(3 if p == "mxfp8" else 9, 5, 4.2 if p == "mxfp8" else 4, v)
            for seed, v in enumerate(values)
        }
        for p, values in losses.items()
        if values
    }
    results, tolerance = judge(records, dict.fromkeys(records, 1 << 20), "bf16", warmup=10)
    return Comparison(Roles("bf16", "mxfp8", "mxfp4"), results, tolerance, {}, None)


def test_parity_within_half_a_percent():
    c = verdict([2.0, 2.0], [2.009, 2.009])
    assert c.tolerance_percent == pytest.approx(0.5)
    assert c.candidate.difference_percent == pytest.approx(0.45)
    assert c.candidate.parity
    assert c.as_expected
    assert not verdict([2.0, 2.0], [2.011, 2.011]).candidate.parity
    assert not verdict([2.0, 2.0], [1.98, 1.98]).candidate.parity  # better is not the same either


def test_parity_within_twice_the_seed_spread():
    c = verdict([1.98, 2.02], [2.04, 2.04])
    assert c.tolerance_percent == pytest.approx(2 * 100 * (0.02 * 2**0.5) / 2.0)
    assert c.candidate.parity
    assert not verdict([1.98, 2.02], [2.07, 2.07]).candidate.parity


def test_largest_gap_leaves_the_warm_up_out():
    c = verdict([2.0, 2.0], [2.0, 2.0])
    assert c.candidate.largest_gap_percent == pytest.approx(5.0)  # 4.2 against 4, not 3 against 9
    assert c.results["bf16"].largest_gap_percent == 0


def test_a_control_at_parity_is_a_failure():
    assert verdict([2.0, 2.0], [2.0, 2.0], [2.1, 2.1]).as_expected
    assert not verdict([2.0, 2.0], [2.0, 2.0], [2.005, 2.005]).as_expected
    assert not verdict([2.0, 2.0], [2.0, 2.0], [1.9, 1.9]).as_expected
    assert not verdict([2.0, 2.0], [2.1, 2.1], [2.1, 2.1]).as_expected


def test_a_precision_with_fewer_seeds_is_held_against_the_same_seeds():
    c = verdict([1.9, 2.1], [1.91, 2.11], [2.2])
    assert c.control.by_seed_percent == pytest.approx([100 * (2.2 / 1.9 - 1)])
    assert c.control.difference_percent == pytest.approx(100 * (2.2 / 1.9 - 1))
    assert c.control.spread is None
    assert c.candidate.by_seed_percent == pytest.approx([100 * 0.01 / 1.9, 100 * 0.01 / 2.1])


def test_quantization_error_by_kind(small, make_trainer):
    trainer = make_trainer(small)
    tokens, targets = trainer.sampler.next_batch(4, trainer.device)
    before = {k: v.clone() for k, v in trainer.model.state_dict().items()}
    fine = measure_quantization(trainer.model, tokens, targets, RECIPES["mxfp8"])
    coarse = measure_quantization(trainer.model, tokens, targets, RECIPES["mxfp4"])
    floor = measure_quantization(trainer.model, tokens, targets, RECIPES["mxfp8_floor"])
    assert set(fine) == set(KINDS)
    for kind in KINDS:
        for axis in ("row", "column"):
            assert 26 < getattr(fine[kind], axis).sqnr_db < 36, kind  # E4M3: 3 mantissa bits
            assert 10 < getattr(coarse[kind], axis).sqnr_db < 22, kind
            assert getattr(fine[kind], axis).saturation == 0
    assert floor["x"].row.saturation > 0
    assert all(torch.equal(v, before[k]) for k, v in trainer.model.state_dict().items())
    assert all(p.grad is None for p in trainer.model.parameters())


SMALL_RUN = ["--preset=smoke", "--steps=40", "--warmup=4", "--final-eval-tokens=8192"]


def test_a_small_comparison(tmp_path, capsys):
    """All of it at a size where one seed differs from the next by more than any precision from BF16: so the control is
    held against the candidate seed by seed, not by the verdict (`test_the_control_fails` does that)."""
    code = train(
        [
            "compare",
            *SMALL_RUN,
            "--device=cpu",
            f"--out={tmp_path}",
            "--name=c",
            "--seeds=2",
            "--control=mxfp4",
        ]
    )
    text = capsys.readouterr().out
    folder = tmp_path / "c"
    outcome = json.loads((folder / "results.json").read_text())
    results = outcome["results"]
    assert list(results) == ["bf16", "mxfp8", "mxfp4"]
    assert results["mxfp8"]["parity"], outcome
    assert code == (0 if outcome["as_expected"] else 1)
    assert len({loss for r in results.values() for loss in r["final_loss"].values()}) == 6
    assert all(r["peak_memory"] > 50 << 20 and r["tokens_per_s"] > 0 for r in results.values())
    assert outcome["quantization"]["x"]["row"]["sqnr_db"] > 26

    def early_gap(precision: str) -> float:
        """Mean absolute difference to BF16 from the same seed at the first evaluation."""
        first = {
            (p, seed): report.series(read_metrics(folder / f"{p}-seed{seed}"), "val_loss")[1][0]
            for p in ("bf16", precision)
            for seed in (0, 1)
        }
        return sum(abs(first[precision, s] - first["bf16", s]) for s in (0, 1)) / 2

    assert 0 < early_gap("mxfp8") < early_gap("mxfp4")
    assert (folder / "comparison.png").stat().st_size > 20_000
    table = (folder / "comparison.md").read_text()
    assert "| mxfp8 |" in table
    assert "mxfp8 is at parity with bf16" in table
    assert "The control mxfp4" in table
    assert "picture" in text
    runs = [str(folder / f"{p}-seed{s}") for p in results for s in (0, 1)]

    # The same runs, without the control's second seed, judged again.
    again = ["compare", f"--out={tmp_path}", "--name=again", "--control=mxfp4", "--runs", *runs[:5]]
    assert train(again) in (0, 1)
    second = json.loads((tmp_path / "again" / "results.json").read_text())
    assert second["results"]["mxfp8"] == results["mxfp8"]
    assert list(second["results"]["mxfp4"]["final_loss"]) == ["0"]
    assert second["quantization"] == outcome["quantization"]

    refused = {
        "is not finished": [*runs[:3], str(folder / "unfinished")],
        "no run of mxfp4": runs[:4],
        "at least 2 seeds of bf16": [runs[0], *runs[2:]],
        "differ in more than precision and seed: optim": [*runs[:5], str(folder / "other")],
    }
    for name in ("unfinished", "other"):
        shutil.copytree(folder / "mxfp4-seed1", folder / name)
    (folder / "unfinished" / "summary.json").unlink()
    cfg = Config.load(folder / "other" / "config.json")
    replace(cfg, optim=replace(cfg.optim, lr=1.0)).save(folder / "other" / "config.json")
    for i, (words, folders) in enumerate(refused.items()):
        args = ["compare", f"--out={tmp_path}", f"--name=r{i}", "--control=mxfp4", "--runs", *folders]
        assert train(args) == 2
        assert words in capsys.readouterr().err
        assert not (tmp_path / f"r{i}").exists()


def test_wrong_scales_are_wrong(small, make_trainer):
    """The first loss is another one, the gradients too; without the fault all is as in mxfp8."""
    losses = {}
    for precision in ("mxfp8", "mxfp8_wrong_scales"):
        trainer = make_trainer(small, precision=precision)
        clean = [trainer.train_step()[0][0].item() for _ in range(2)]
        trainer = make_trainer(small, precision=precision)
        with fault_of(precision):
            losses[precision] = [trainer.train_step()[0][0].item() for _ in range(2)]
        losses[precision, "clean"] = clean
    assert losses["mxfp8"] == losses["mxfp8", "clean"] == losses["mxfp8_wrong_scales", "clean"]
    assert all(a != b for a, b in zip(losses["mxfp8"], losses["mxfp8_wrong_scales"], strict=True))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_control_fails(tmp_path):
    """The default comparison, with two seeds and two thirds of the steps."""
    assert (
        train(["compare", "--device=cpu", f"--out={tmp_path}", "--name=c", "--seeds=2", "--steps=200"]) == 0
    )
    outcome = json.loads((tmp_path / "c" / "results.json").read_text())
    assert outcome["results"]["mxfp8_wrong_scales"]["difference_percent"] > 1.5 * outcome["tolerance_percent"]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ("--seeds=1", "--seeds must be at least 2"),
        ("--candidate=mxfp9", "--precision must be one of"),
        ("--experts=1", "--experts must be at least --top-k"),
        ("--runs=nowhere", "nowhere is not a run folder"),
        ("--runs", "--runs needs run folders, got none"),
    ],
)
def test_refusals(args, text, tmp_path, capsys):
    assert train(["compare", args, f"--out={tmp_path / 'runs'}"]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()

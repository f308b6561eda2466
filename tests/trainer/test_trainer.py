"""Training as a whole: case C20 (resume), a killed run, accumulation, and what a run leaves."""

import math
import signal
import time
from dataclasses import replace

import pytest
import torch
from mx_trainer import report
from mx_trainer.checkpoint import find_checkpoint, list_checkpoints
from mx_trainer.cli import train
from mx_trainer.config import Config, OptimConfig, RouterConfig
from mx_trainer.errors import CheckpointError
from mx_trainer.metrics import read_metrics
from mx_trainer.parallel import Parallel
from mx_trainer.progress import Progress
from rich.console import Console
from support.checkpoints import same_state, whole_state

from .conftest import SMALL, spawn

QUIET = Console(quiet=True)


def run(trainer, folder):
    folder.mkdir(exist_ok=True)
    return trainer.run(folder, Progress(QUIET, trainer.cfg.optim.steps, "test"))


def same_records(a, b) -> bool:
    """All but the clock."""
    return [{k: v for k, v in r.items() if k != "tokens_per_s"} for r in a] == [
        {k: v for k, v in r.items() if k != "tokens_per_s"} for r in b
    ]


@pytest.mark.parametrize("precision", ["fp32", "mxfp8"])
def test_c20_resume_in_a_new_process(precision, text_folder, tmp_path):
    flags = [
        *SMALL, f"--precision={precision}", f"--data={text_folder}", "--val-fraction=0.1", "--steps=20",
        "--dropout=0.1", "--accumulate=2", "--gate=sigmoid", "--shared-width=32", f"--out={tmp_path}",
    ]  # fmt: skip
    assert train([*flags, "--name=straight"]) == 0
    process = spawn([*flags, "--name=resumed"])
    folder = tmp_path / "resumed"
    kill_after(process, folder, 10)
    step = int(find_checkpoint(folder).name[-8:])
    assert train([f"--resume={folder}"]) == 0
    straight, resumed = read_metrics(tmp_path / "straight"), read_metrics(folder)
    assert [r["step"] for r in straight if "train_loss" in r] == list(range(1, 21))
    assert same_records(straight, resumed)
    states = [whole_state(find_checkpoint(tmp_path / n)) for n in ("straight", "resumed")]
    assert same_state(*states)
    assert any(v.abs().sum() > 0 for k, v in states[0].items() if k.endswith("expert_bias"))
    assert step in (10, 20)


def kill_after(process, folder, step: int) -> None:
    """SIGKILL as soon as the checkpoint of `step` is there."""
    deadline = time.monotonic() + 200
    while not any(p.name >= f"step-{step:08d}" for p in list_checkpoints(folder / "checkpoints")):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()


def test_resume_in_the_same_process(small, make_trainer):
    cfg = replace(small, model=replace(small.model, dropout=0.1))
    straight = make_trainer(cfg)
    want = [straight.train_step()[0] for _ in range(12)]
    first = make_trainer(cfg)
    for _ in range(5):
        first.train_step()
    state = first.state_dict()
    torch.manual_seed(99)
    second = make_trainer(replace(cfg, seed=0))
    second.load_state_dict(state)
    for step in range(5, 12):
        assert torch.equal(second.train_step()[0], want[step])


def test_state_of_other_data_or_model_is_refused(small, make_trainer):
    trainer = make_trainer(small)
    state = trainer.state_dict()
    with pytest.raises(CheckpointError, match="has changed"):
        trainer.load_state_dict({**state, "data_sha256": "0" * 64})
    wider = make_trainer(small, model=replace(small.model, layers=3))
    with pytest.raises(CheckpointError, match="another model"):
        wider.load_state_dict(state)


def test_accumulation_equals_a_big_batch(small, make_trainer):
    """In FP32 and without the auxiliary losses, which are not sums over tokens."""
    cfg = replace(small, precision="fp32", router=RouterConfig(aux_loss=0, z_loss=0))
    big = make_trainer(cfg, optim=replace(cfg.optim, batch=8, accumulate=1))
    parts = make_trainer(cfg, optim=replace(cfg.optim, batch=2, accumulate=4))
    for _ in range(3):
        (a, tokens_a), (b, tokens_b) = big.train_step(), parts.train_step()
        torch.testing.assert_close(a[[0, 3]], b[[0, 3]], rtol=1e-5, atol=0)
        assert torch.equal(tokens_a, tokens_b)
    for (name, p), q in zip(big.model.named_parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4, msg=name)


def test_clipping(small, make_trainer):
    norms = []
    for clip in (0.0, 1e-3):
        trainer = make_trainer(small, optim=replace(small.optim, clip=clip))
        taken = {}
        trainer.optimizer.register_step_pre_hook(
            lambda opt, *_, taken=taken: taken.update(
                norm=math.sqrt(
                    sum(p.grad.square().sum().item() for g in opt.param_groups for p in g["params"])
                )
            )
        )
        reported = trainer.train_step()[0][3].item()
        norms.append((reported, taken["norm"]))
    assert norms[0][0] == pytest.approx(norms[0][1], rel=1e-5)
    assert norms[1] == pytest.approx((norms[0][0], 1e-3), rel=1e-3)


def test_evaluation_changes_nothing(small, make_trainer):
    cfg = replace(small, model=replace(small.model, dropout=0.2))
    a, b = make_trainer(cfg), make_trainer(cfg)
    first = a.evaluate(1024)
    assert first == a.evaluate(1024)
    assert first.tokens == 1024
    assert first.bpb == pytest.approx(first.loss / math.log(2))
    torch.manual_seed(cfg.seed)
    want = a.train_step()[0]
    torch.manual_seed(cfg.seed)
    assert torch.equal(b.train_step()[0], want)


def test_loss_falls_and_stays_near_the_entropy_of_guessing_at_first(small, make_trainer):
    trainer = make_trainer(small, optim=replace(small.optim, steps=60))
    losses = [trainer.train_step()[0][0].item() for _ in range(60)]
    assert losses[0] == pytest.approx(math.log(256), abs=0.1)
    assert sum(losses[-5:]) / 5 < 3.6


def test_what_a_run_leaves(small, make_trainer, tmp_path):
    cfg = replace(small, log_every=5, eval_every=10, save_every=10, eval_tokens=256)
    result = run(make_trainer(cfg), tmp_path / "run")
    assert result.finished
    records = read_metrics(result.run_dir)
    logged = [r for r in records if "train_loss" in r]
    assert [r["step"] for r in logged] == [5, 10, 15, 20]
    assert [r["step"] for r in records if "val_bpb" in r] == [10, 20]
    for r in logged:
        layers = r["expert_tokens"]
        assert [sum(layer) for layer in layers] == [5 * 4 * 32 * 2] * 2  # steps * batch * block * k
    assert [p.name for p in list_checkpoints(result.run_dir / "checkpoints")] == [
        "step-00000010",
        "step-00000020",
    ]
    assert list((result.run_dir / "tensorboard").glob("events.out.tfevents.*"))
    for picture in (report.plot_loss(result.run_dir, "t"), report.plot_expert_load(result.run_dir, "t")):
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert picture.stat().st_size > 10_000
    assert 0 <= report.min_expert_share(records) <= 1


def test_the_ranks_add_up_their_losses_once_a_record(small, make_trainer, tmp_path, monkeypatch):
    shapes = []
    monkeypatch.setattr(Parallel, "sum_", lambda _, x: shapes.append(tuple(x.shape)) or x)
    run(
        make_trainer(replace(small, log_every=5, eval_every=20, save_every=7, eval_tokens=256)),
        tmp_path / "run",
    )
    records, before_saving, validation = [(5, 4)] * 4, [(2, 4), (4, 4)], [()]
    assert sorted(shapes) == sorted(records + before_saving + validation)


def test_tensorboard_has_the_same_numbers(small, make_trainer, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = run(make_trainer(replace(small, log_every=5, eval_every=20, eval_tokens=256)), tmp_path / "run")
    events = EventAccumulator(str(result.run_dir / "tensorboard"))
    events.Reload()
    want = [(r["step"], r["train_loss"]) for r in read_metrics(result.run_dir) if "train_loss" in r]
    got = [(e.step, e.value) for e in events.Scalars("train/train_loss")]
    assert got == [(step, pytest.approx(loss)) for step, loss in want]
    assert "val/val_bpb" in events.Tags()["scalars"]


def test_ctrl_c_saves(small, make_trainer, tmp_path):
    trainer = make_trainer(small, save_every=1000)
    step = trainer.train_step

    def interrupted():
        if trainer.step == 6:
            signal.raise_signal(signal.SIGINT)
        return step()

    trainer.train_step = interrupted
    before = signal.getsignal(signal.SIGINT)
    result = run(trainer, tmp_path / "run")
    assert not result.finished
    assert result.steps == 7
    assert find_checkpoint(tmp_path / "run").name == "step-00000007"
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("log_every", [1, 10])
def test_a_loss_that_is_not_finite_stops_the_run_and_is_not_saved(small, make_trainer, tmp_path, log_every):
    trainer = make_trainer(small, log_every=log_every, save_every=3)
    step = trainer.train_step

    def poisoned():
        if trainer.step == 4:
            trainer.model.norm.gain.data[0] = math.nan
        return step()

    trainer.train_step = poisoned
    with pytest.raises(FloatingPointError, match="not finite by step"):
        run(trainer, tmp_path / "run")
    assert find_checkpoint(tmp_path / "run").name == "step-00000003"


def test_metrics_cut_short_by_a_kill_are_read(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train_loss": 2.0}\n{"step": 2, "tra')
    assert read_metrics(tmp_path) == [{"step": 1, "train_loss": 2.0}]


def test_bins_train_too(tmp_path, small):
    import numpy as np
    from mx_trainer.config import DataConfig
    from mx_trainer.data import load_corpus
    from mx_trainer.trainer import Trainer, resolve_vocab

    np.random.default_rng(0).integers(0, 300, 3000).astype(np.uint16).tofile(tmp_path / "tokens.bin")
    corpus = load_corpus(DataConfig(data=str(tmp_path / "tokens.bin"), val_fraction=0.2))
    cfg = resolve_vocab(replace(small, optim=OptimConfig(steps=3, warmup=1, batch=2)), corpus)
    assert cfg.model.vocab == 320
    result = run(Trainer(cfg, corpus), tmp_path / "run")
    assert result.evaluation.bpb is None
    assert result.evaluation.loss > 1


def test_resolved_config_round_trips(tmp_path):
    cfg = Config(precision="mxfp4", optim=OptimConfig(lr=0.1), name="x")
    cfg.save(tmp_path / "config.json")
    assert Config.load(tmp_path / "config.json") == cfg


def test_bpe_trains_and_counts_bytes(text_folder, small, tmp_path):
    from mx_trainer.config import DataConfig
    from mx_trainer.data import load_corpus
    from mx_trainer.trainer import Trainer, resolve_vocab

    corpus = load_corpus(DataConfig(data=str(text_folder), val_fraction=0.1, tokenizer="bpe", bpe_vocab=600))
    cfg = resolve_vocab(replace(small, optim=OptimConfig(steps=3, warmup=1, batch=2)), corpus)
    assert cfg.model.vocab == 640
    result = run(Trainer(cfg, corpus), tmp_path / "run")
    tokens_per_byte = corpus.info.val_tokens / corpus.info.val_bytes
    whole = Trainer(cfg, corpus).evaluate(10**9)
    assert whole.bpb == pytest.approx(whole.loss / math.log(2) * tokens_per_byte, rel=0.01)
    assert result.evaluation.bpb < result.evaluation.loss / math.log(2)

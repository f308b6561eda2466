"""The command line: what is refused (one line, nothing written), what overrides what, and sampling."""

import os
import sys

import pytest
from mx_trainer.checkpoint import find_checkpoint
from mx_trainer.cli import sample, train
from mx_trainer.config import Config
from mx_trainer.metrics import read_metrics

from .conftest import SMALL


def refused(capsys, tmp_path, *args: str) -> str:
    """The one line on stderr; asserts that nothing was written."""
    before = sorted(tmp_path.rglob("*"))
    assert train([*args, f"--out={tmp_path / 'runs'}"]) == 2
    captured = capsys.readouterr()
    assert sorted(tmp_path.rglob("*")) == before
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert "Traceback" not in captured.err
    assert "---" not in captured.err
    return lines[0]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ("--experts=2 --top-k=3", "--experts must be at least --top-k, got 2 experts and k = 3"),
        ("--width=100", "--width must be a multiple of 32 (an MX block), got 100"),
        ("--expert-width=40", "--expert-width must be a multiple of 32"),
        ("--shared-width=33", "--shared-width must be a multiple of 32"),
        ("--width=96 --heads=5", "--width must be a multiple of --heads, got 96 and 5"),
        ("--width=96 --heads=32", "head width (width / heads) must be even"),
        ("--precision=mxfp9", "--precision must be one of fp32, bf16, mxfp8"),
        ("--linear-precision=bf16", "--linear-precision must be one of high, mxfp8"),
        ("--steps=0", "--steps must be at least 1, got 0"),
        ("--batch=-1", "--batch must be at least 1, got -1"),
        ("--warmup=600 --steps=500", "--warmup must be below --steps, got 600 and 500"),
        ("--dropout=1.0", "--dropout must be in [0, 1), got 1.0"),
        ("--lr=0", "--lr must be positive, got 0.0"),
        ("--lr=inf", "--lr must be finite, got inf"),
        ("--capacity=inf", "--capacity must be finite, got inf"),
        ("--preset=smoke --preset=huge", "--preset must be one of"),
        ("--min-lr=2", "--min-lr is a fraction"),
        ("--val-fraction=0", "--val-fraction must be in (0, 1)"),
        ("--bpe-vocab=100", "--bpe-vocab must be at least 257"),
        ("--seed=-1", "--seed must not be negative"),
        ("--name=../x", "--name must be a plain name"),
        ("--preset=huge", "--preset must be one of"),
        ("--data=/no/such/place", "an existing path, got '/no/such/place'"),
        ("--vocab=100", "--vocab must be at least the data's 256, got 100"),
        ("--device=cuda:99", "not on this machine"),
        ("--device=tpu", "--device must be auto, cpu or cuda"),
        ("--widht=64", "unknown argument '--widht=64', did you mean --width?"),
        (
            "--steps=many",
            "Error parsing --steps: invalid literal for int() with base 10: 'many' (mx-train --help",
        ),
        (
            "--gate=relu",
            "invalid choice 'relu' for argument '--gate'. Expected one of ('softmax', 'sigmoid') (",
        ),
        ("--lr", "Missing value for argument '--lr'"),
        ("trian", "unknown argument 'trian'"),
        ("--resume=/no/such/run", "no checkpoint in it"),
    ],
)
def test_refusals(capsys, tmp_path, args, text):
    assert text in refused(capsys, tmp_path, *args.split())


def test_data_shorter_than_the_block_is_refused(capsys, tmp_path):
    file = tmp_path / "short.txt"
    file.write_text("x" * 300)
    line = refused(capsys, tmp_path, f"--data={file}", "--block=256")
    assert "training data must hold at least 512 tokens" in line
    file.write_text("x" * 3000)
    assert "validation data must hold at least 257" in refused(
        capsys, tmp_path, f"--data={file}", "--block=256"
    )


def test_help_lists_every_field(capsys):
    with pytest.raises(SystemExit) as error:
        train(["--help"])
    assert error.value.code == 0
    text = capsys.readouterr().out
    for flag in (
        "--precision",
        "--expert-width",
        "--gate",
        "--data",
        "--lr",
        "--resume",
        "--checkpoint-activations",
    ):
        assert flag in text


def test_help_into_a_closed_pipe(monkeypatch):
    """As in `mx-train --help | head`: no traceback, not even at exit, which flushes what is left."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", pipe)
        with pytest.raises(SystemExit) as end:
            train(["--help"])
    assert end.value.code == 0


@pytest.fixture(scope="module")
def finished(text_folder, tmp_path_factory):
    """A finished run of 6 steps."""
    out = tmp_path_factory.mktemp("runs")
    flags = [*SMALL, f"--data={text_folder}", "--steps=6", "--save-every=3", f"--out={out}", "--name=run"]
    assert train([*flags, "--sample-tokens=8", "--eval-every=3"]) == 0
    return out / "run"


def test_a_run_folder(finished):
    for name in (
        "config.json", "corpus.json", "metrics.jsonl", "tensorboard", "checkpoints", "loss.png", "expert_load.png",
    ):  # fmt: skip
        assert (finished / name).exists(), name
    cfg = Config.load(finished / "config.json")
    assert cfg.preset == "smoke"  # overridden fields are resolved
    assert (cfg.model.width, cfg.optim.steps, cfg.model.vocab) == (32, 6, 256)


def test_what_is_printed(text_folder, tmp_path, capsys):
    flags = [
        *SMALL,
        f"--data={text_folder}",
        "--steps=3",
        f"--out={tmp_path}",
        "--name=run",
        "--sample-tokens=8",
    ]
    assert train(flags) == 0
    text = capsys.readouterr().out
    for expected in (
        "sha256",
        "sample",
        "bits per byte",
        "loss.png",
        "expert_load.png",
        "metrics.jsonl",
        "tokens/s",
    ):
        assert expected in text


def test_an_existing_run_is_not_overwritten(finished, capsys, text_folder):
    before = (finished / "metrics.jsonl").read_bytes()
    assert (
        train([*SMALL, f"--data={text_folder}", f"--out={finished.parent}", "--name=run", "--steps=6"]) == 2
    )
    assert "exists" in capsys.readouterr().err
    assert (finished / "metrics.jsonl").read_bytes() == before


def test_resume_of_a_finished_run(finished, capsys):
    assert train([f"--resume={finished}"]) == 2
    assert "already at step 6 of 6; --steps N goes on" in capsys.readouterr().err
    assert train([f"--resume={finished}", "--lr=1"]) == 2
    assert "--lr is fixed by the resumed run (0.004), got 1.0" in capsys.readouterr().err


def test_resume_can_go_further_and_back(finished, capsys):
    assert train([f"--resume={finished}", "--steps=8"]) == 0
    assert [r["step"] for r in read_metrics(finished) if "train_loss" in r] == list(range(1, 9))
    assert train([f"--resume={finished / 'checkpoints' / 'step-00000006'}", "--steps=7"]) == 0
    assert [r["step"] for r in read_metrics(finished) if "train_loss" in r] == list(range(1, 8))
    assert find_checkpoint(finished).name == "step-00000007"


def test_damaged_checkpoint_is_refused(finished, capsys, tmp_path):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    state = find_checkpoint(copy) / "__0_0.distcp"
    data = bytearray(state.read_bytes())
    data[len(data) // 2] ^= 0x10
    state.write_bytes(data)
    for command in (lambda: train([f"--resume={copy}", "--steps=20"]), lambda: sample([str(copy)])):
        assert command() == 2
        assert "damaged checkpoint" in capsys.readouterr().err


def test_sampling(finished, capsys):
    def text(*args: str) -> str:
        assert sample([str(finished), "--tokens=20", *args]) == 0
        return capsys.readouterr().out

    first = text("--prompt=def ", "--seed=1")
    assert first.startswith("def ")
    assert len(first) > 4
    assert text("--prompt=def ", "--seed=1") == first
    assert text("--prompt=def ", "--seed=2") != first
    assert text("--temperature=0") == text("--temperature=0", "--seed=5")
    assert text("--top-k=1", "--temperature=1") == text("--temperature=0")
    assert sample([str(finished), "--tokens=0"]) == 2
    assert sample([str(finished), "--temperature=nan"]) == 2
    assert sample([str(finished), "--nope"]) == 2
    assert sample([str(finished.parent)]) == 2


def test_bpe_from_the_command_line(text_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(text_folder.parent)
    relative = text_folder.name
    flags = [*SMALL, f"--data={relative}", "--val-fraction=0.1", "--tokenizer=bpe", "--bpe-vocab=600"]
    assert train([*flags, "--steps=4", "--save-every=2", f"--out={tmp_path}", "--name=run"]) == 0
    monkeypatch.chdir(tmp_path)  # a resumed run finds its data from anywhere
    assert train(["--resume=run", "--steps=5"]) == 0
    capsys.readouterr()
    assert sample(["run", "--tokens=5", "--prompt=import"]) == 0
    assert capsys.readouterr().out.startswith("import")


def test_module_entry_point(tmp_path):
    import subprocess

    done = subprocess.run(
        [sys.executable, "-m", "mx_trainer", "--width=33", f"--out={tmp_path}"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr == "mx-train: error: --width must be a multiple of 32 (an MX block), got 33\n"

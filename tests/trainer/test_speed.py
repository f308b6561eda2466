"""What is measured of a run: the yardstick of plain torch, time by part, `mx-train speed`, `summary.json`."""

import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from mx_trainer import profiling
from mx_trainer.cli import train
from mx_trainer.profiling import COMMUNICATION, OTHER, PARTS, profile_training
from mx_trainer.speed import variant_config
from mx_trainer.summary import load_summary
from mx_trainer.torch_experts import TorchExperts
from torch.autograd import DeviceType

from trainer.conftest import SMALL


def test_torch_experts_are_the_same_function(small, make_trainer):
    """The same model from the same seed: weights equal, loss and gradients within BF16's rounding."""
    mx, plain = (make_trainer(variant_config(small, v)) for v in ("bf16", "torch"))
    assert isinstance(plain.model.blocks[0].moe.experts, TorchExperts)
    for (name, a), (other, b) in zip(
        mx.model.named_parameters(), plain.model.named_parameters(), strict=True
    ):
        assert name == other
        assert torch.equal(a, b), name
    tokens, targets = mx.sampler.next_batch(4, mx.device)
    losses = []
    for trainer in (mx, plain):
        out = trainer.model(tokens, targets)
        out.loss.backward()
        losses.append(out.loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    for (name, a), b in zip(mx.model.named_parameters(), plain.model.parameters(), strict=True):
        assert (a.grad - b.grad).norm() <= 0.02 * a.grad.norm(), name


def test_time_by_part(small, make_trainer):
    trainer = make_trainer(small, precision="mxfp8")
    result = profile_training(trainer, 2)
    assert trainer.step == 3
    assert set(result.parts) == {*PARTS, OTHER} - {COMMUNICATION}
    assert all(ms > 0 for ms in result.parts.values())
    assert result.busy == pytest.approx(sum(result.parts.values()))
    assert 0 < result.busy < 1.2 * result.step


def _op(name, *kernels, parent=None):
    kernels = [SimpleNamespace(name=kernel, duration=us) for kernel, us in kernels]
    return SimpleNamespace(name=name, device_type=DeviceType.CPU, kernels=kernels, cpu_parent=parent)


def _on_gpu(name, us):
    span = SimpleNamespace(elapsed_us=lambda: us)
    return SimpleNamespace(
        name=name, device_type=DeviceType.CUDA, kernels=[], cpu_parent=None, time_range=span
    )


def test_every_kernel_on_a_gpu_counts_once(monkeypatch):
    """Recording begins on an idle GPU; a runtime call with an op's number, and the time line's copies of ops, add nothing."""
    optimizer = _op("Optimizer.step#AdamW.step")
    compiled = _op("CompiledFunction", ("triton_poi_fused_add", 900), ("triton_per_fused_logsumexp", 40))
    events = [
        optimizer,
        _op("aten::_fused_adamw_", ("multi_tensor_apply_kernel", 500), parent=optimizer),
        _op("mx::grouped_gemm", ("grouped_gemm_sm90", 3000), parent=compiled),
        compiled,
        _op("cudaStreamIsCapturing", *((k.name, k.duration) for k in compiled.kernels), parent=optimizer),
        _op("cuLaunchKernelEx", ("multi_tensor_apply_kernel", 500)),
        *(_on_gpu(k.name, k.duration) for k in compiled.kernels),
        _on_gpu("multi_tensor_apply_kernel", 500),
        _on_gpu("grouped_gemm_sm90", 3000),
        _on_gpu("Memset (Device)", 7),  # of no op
        _on_gpu("Optimizer.step#AdamW.step", 600),
    ]
    log = []

    @contextmanager
    def record(activities):
        log.append("record")
        yield SimpleNamespace(events=lambda: events)

    monkeypatch.setattr(profiling, "profile", record)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("wait"))
    trainer = SimpleNamespace(device=torch.device("cuda"), train_step=lambda: log.append("step"))
    result = profile_training(trainer, 2)
    assert log == ["step", "wait", "record", "step", "step", "wait"]
    assert result.parts == pytest.approx(
        {"routing": 0.02, "expert GEMMs": 1.5, "optimiser and clipping": 0.25, OTHER: (900 + 7) / 2e3}
    )
    assert result.busy == pytest.approx((900 + 40 + 500 + 3000 + 7) / 2e3)


def test_speed(tmp_path):
    args = ["speed", *SMALL, "--device=cpu", f"--out={tmp_path}", "--name=s", "--timed-steps=2"]
    assert train([*args, "--variants", "torch", "bf16", "mxfp8"]) == 0
    rows = json.loads((tmp_path / "s" / "speed.json").read_text())
    assert [r["variant"] for r in rows] == ["torch", "bf16", "mxfp8"]
    assert all(r["tokens_per_s"] > 0 and r["mfu"] is None for r in rows)
    torch_loss, bf16_loss, mxfp8_loss = (r["train_loss"] for r in rows)
    assert torch_loss == pytest.approx(bf16_loss, rel=5e-3)
    assert mxfp8_loss != bf16_loss
    assert "expert GEMMs" in (tmp_path / "s" / "step.md").read_text()


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--variants", "mxfp9"], "--precision must be one of"),
        (["--timed-steps=0"], "--timed-steps must be at least 1"),
    ],
)
def test_speed_refuses(args, text, tmp_path, capsys):
    assert train(["speed", *args, f"--out={tmp_path / 'runs'}"]) == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("args", [["--expert-kernels=torch"], ["--expert-kernels=torch", "--precision=fp32"]])
def test_torch_experts_are_bf16_only(args, tmp_path, capsys):
    assert train([*args, f"--out={tmp_path / 'runs'}"]) == 2
    assert "--expert-kernels torch needs --precision bf16" in capsys.readouterr().err


def test_a_run_leaves_a_summary_and_a_profile(tmp_path, capsys):
    args = [*SMALL, "--device=cpu", f"--out={tmp_path}", "--name=r", "--steps=6", "--profile-steps=1"]
    assert train(args) == 0
    summary = load_summary(tmp_path / "r")
    records = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert summary.val_loss == next(r["val_loss"] for r in reversed(records) if "val_loss" in r)
    assert summary.mfu is None
    assert summary.tflops > 0
    parts = json.loads((tmp_path / "r" / "profile.json").read_text())["parts"]
    assert "expert GEMMs" in parts
    assert "time of a step" in capsys.readouterr().out

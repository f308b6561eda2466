"""The self-test: every check passes in the emulator, and planted failures come out as what they are."""

import dataclasses
import sys
from pathlib import Path

import ptxsim
import pytest
import torch
from mx_kernels import registry, selftest_record
from mx_kernels.problem import GemmProblem
from mx_kernels.sm100 import selftest

COMMAND = (sys.executable, str(Path(__file__).with_name("selftest_process.py")))
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", selftest.CHECKS)
def test_every_check_passes(name):
    with ptxsim.gpu("sm_100a", sms=6):
        answer = selftest.run_here(name, CPU)
    assert answer["passed"], answer


def test_checks_run_in_processes_of_their_own():
    outcome = selftest.run(CPU, names=["scale copy", "one mma"], timeout=120, command=COMMAND)
    assert outcome["passed"], outcome
    assert [c["name"] for c in outcome["checks"]] == ["scale copy", "one mma"]


@pytest.mark.parametrize(
    ("kind", "detail"),
    [
        ("wrong value", "wrong value: y: 1 of 2 values are wrong; at (1,) expected 2.0, got 3.0"),
        ("hang", "hung: killed after"),
        ("crash", "crashed: SIGSEGV"),
        ("exit", "failed: exit code 7"),
        ("raise", "RuntimeError: CUDA error: an illegal instruction"),
    ],
)
def test_planted_failures_are_reported_as_such(monkeypatch, kind, detail):
    monkeypatch.setenv("PLANTED", kind)
    outcome = selftest.run(
        CPU, names=["one mma", "layer"], timeout=15 if kind == "hang" else 120, command=COMMAND
    )
    first, rest = outcome["checks"]
    assert not outcome["passed"]
    assert first["detail"].startswith(detail)
    assert rest == {"name": "layer", "passed": False, "seconds": 0.0, "detail": "not run after a failure"}


@pytest.mark.parametrize("passed", [True, False, None])
def test_auto_takes_sm100_only_where_it_has_passed(monkeypatch, tmp_path, passed):
    monkeypatch.setenv("MX_CACHE_DIR", str(tmp_path))
    key = {"gpu": "NVIDIA B200", "driver": "580", "mx-kernels": "0", "nvidia-cutlass-dsl": "4"}
    monkeypatch.setattr(selftest_record, "machine_key", lambda device: key)
    selftest_record.why_not_trusted.cache_clear()
    if passed is not None:
        selftest_record.write(key, passed, {})
    reason = selftest_record.why_not_trusted(torch.device("cuda", 0))
    selftest_record.why_not_trusted.cache_clear()
    if passed:
        assert reason is None
    else:
        assert "mx-doctor --selftest" in reason


def test_asked_for_by_name_it_needs_no_record():
    problem = GemmProblem("fprop", "mxfp8_e4m3", "mxfp8_e4m3", torch.bfloat16)
    with ptxsim.gpu("sm_100a", sms=6):
        assert registry.why_not("sm100", "grouped_gemm", problem, CPU) is None


@pytest.mark.skipif(not hasattr(torch.nn.functional, "scaled_grouped_mm"), reason="torch has none")
def test_the_oracle_has_torch_s_signature():
    """Names of arguments and enums, on tensors without memory."""
    offs = selftest.group_ends((128, 256))
    with torch._subclasses.FakeTensorMode() as mode:
        x, w = (
            dataclasses.replace(t, data=mode.from_tensor(t.data), scale=mode.from_tensor(t.scale)).to("cuda")
            for t in (selftest.exact_operand(384, 256), selftest.exact_operand(2, 384, 256))
        )
        y = selftest.torch_scaled_gemm(x, w, mode.from_tensor(offs).to("cuda"))
    assert (y.shape, y.dtype) == ((384, 384), torch.bfloat16)

"""mx-doctor: its report, exit codes, and the self-test's record."""

import json
import sys
import types

import pytest
import torch
from mx_kernels import arch, doctor, registry, selftest_record


def test_report_for_people(capsys) -> None:
    assert doctor.main([]) == 0
    text = capsys.readouterr().out
    assert f"torch {torch.__version__}" in text
    assert "cpu: " not in text.partition("every op has a backend")[0].partition("mxfp8: quantize")[2]
    for family, _, _ in doctor.FAMILIES:
        assert f"  {family} " in text
    assert "sm90: needs sm_90a, got cpu" in text
    assert "every op has a backend" in text


def test_json_report(capsys) -> None:
    assert doctor.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"][0]["device"] == "cpu"
    assert found["devices"][0]["complete"] is True
    assert set(found["devices"][0]["families"]) == {family for family, _, _ in doctor.FAMILIES}


def test_an_op_without_a_backend_is_an_error(capsys, monkeypatch) -> None:
    real = registry.why_not
    monkeypatch.setattr(
        registry, "why_not", lambda name, op, *a, **k: "broken" if op == "route" else real(name, op, *a, **k)
    )
    assert doctor.main([]) == 1
    text = capsys.readouterr().out
    assert "cpu: broken (1 of 19, first: both: route)" in text
    assert "some ops have no backend here" in text


def test_selftest_needs_a_blackwell_gpu(capsys, monkeypatch) -> None:
    monkeypatch.setattr(doctor, "devices", lambda: [torch.device("cpu")])
    assert doctor.main(["--selftest"]) == 2
    assert "no GPU of capability 10.0 or 10.3" in capsys.readouterr().err


@pytest.mark.parametrize("passed", [True, False])
def test_selftest_is_run_printed_and_recorded(capsys, monkeypatch, tmp_path, passed) -> None:
    device = torch.device("cuda", 0)
    properties = types.SimpleNamespace(name="Test B200", major=10, minor=0, multi_processor_count=148)
    checks = [{"name": "scale copy", "passed": passed, "seconds": 0.25, "detail": "" if passed else "row 3"}]
    selftest = types.ModuleType("mx_kernels.sm100.selftest")
    selftest.run = lambda device: {"passed": passed, "checks": checks}
    monkeypatch.setattr(arch, "_properties", lambda index: properties)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Test B200")
    monkeypatch.setattr(doctor, "devices", lambda: [device])
    monkeypatch.setitem(sys.modules, "mx_kernels.sm100.selftest", selftest)
    monkeypatch.setenv("MX_CACHE_DIR", str(tmp_path))

    assert doctor.main(["--selftest"]) == (0 if passed else 1)
    text = capsys.readouterr().out
    assert ("ok   scale copy" if passed else "FAIL scale copy (0.2 s): row 3") in text
    record = json.loads(selftest_record.record_path(selftest_record.machine_key(device)).read_text())
    assert record["passed"] is passed
    assert record["report"]["checks"] == checks
    assert (selftest_record.why_not_trusted(device) is None) is passed
    selftest_record.why_not_trusted.cache_clear()

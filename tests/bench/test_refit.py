"""Refitting: rows of a run replace the old ones, and constants that were made up are found again."""

import dataclasses
import json

import pytest
from mx_bench.project import check, refit
from mx_bench.project.machines import H200, OVERHEAD
from mx_bench.results import Measurement, Results, load

OLD = load(check.MEASURED)


def made_up(machine, overheads) -> Results:
    """What mx-bench would have measured if the model were right with these."""
    with refit.using(machine, overheads):
        modelled = {row.measurement.key: row.modelled for row in check.rows(OLD, machine)}
    ceilings = {"copy": {"bytes": 1e9, "seconds": 1e9 / machine.copy_bandwidth},
                "dense BF16": {"flop": 1e12, "seconds": 1e12 / machine.sustained_flops_bf16}}  # fmt: skip
    rows = [
        dataclasses.replace(m, **({"seconds": modelled[m.key]} if m.key in modelled else ceilings[m.case]))
        for m in OLD.measurements
    ]
    return dataclasses.replace(OLD, measurements=tuple(rows))


def test_made_up_constants_are_found():
    machine = dataclasses.replace(
        H200, copy_bandwidth=4.4e12, sustained_flops_bf16=7e14, sustained_flops_mx=7e14,
        bubble_clocks=4500, dequantize_a_clocks=500, dequantize_b_clocks=700, dequantize_b_transposed_clocks=900,
    )  # fmt: skip
    overheads = {"stream": 0.02, "indexed": 0.2, "gather_quantize": 0.5, "dswiglu_quantize": 0.1}
    results = made_up(machine, {**OVERHEAD, **overheads})
    found, shares = refit.fitted(results)
    assert found.copy_bandwidth == pytest.approx(4.4e12)
    assert found.sustained_flops_bf16 == found.sustained_flops_mx == pytest.approx(7e14)
    assert {kind: shares[kind] for kind in overheads} == pytest.approx(overheads, abs=0.02)
    with refit.using(found, shares):
        assert max(abs(row.error) for row in check.rows(results, found)) < 0.03
    assert OVERHEAD["indexed"] != 0.2, "the model's own constants are untouched"


def test_rows_of_the_run_replace_the_old_ones():
    key = next(row.measurement for row in check.rows(OLD, H200))
    run = Results({"device": "NVIDIA H200", "commit": "abc"}).with_section(key.section, [
        dataclasses.replace(key, seconds=1.0),
        dataclasses.replace(key, contestant="torch.bmm"),
        Measurement("trainer", "gpu_50m", "ours bf16", 1.0),
        dataclasses.replace(key, contestant="ours MXFP8", seconds=None, note="failed: x"),
    ])  # fmt: skip
    new = refit.merged(OLD, run, "now")
    assert len(new.measurements) == len(OLD.measurements)
    changed = [m for m in new.measurements if m not in OLD.measurements]
    assert [(m.key, m.seconds, m.note) for m in changed] == [(key.key, 1.0, "now")]
    assert (new.machine["commit"], new.machine["driver"]) == ("abc", OLD.machine["driver"])


@pytest.mark.parametrize(
    ("machine", "smoke"), [({"device": "NVIDIA B200"}, False), ({"device": "NVIDIA H200"}, True), ({}, False)]
)
def test_other_machines_and_smoke_sizes_are_refused(machine, smoke):
    with pytest.raises(ValueError, match="expected a run on an H200"):
        refit.merged(OLD, Results(machine, smoke=smoke))


def test_the_command(tmp_path, capsys):
    run, to = tmp_path / "results.json", tmp_path / "h200.json"
    OLD.save(run)
    assert refit.main([str(run), "--to", str(to)]) == 0
    printed = capsys.readouterr().out
    assert "dequantize_a_clocks" in printed
    assert 'OVERHEAD["indexed"]' in printed
    assert {m.key for m in load(to).measurements} == {m.key for m in OLD.measurements}
    assert len(to.read_text().splitlines()) < len(OLD.measurements) + 12  # a line for each
    assert json.loads(to.read_text())["schema_version"] == 1
    assert refit.main([str(tmp_path / "nothing.json"), "--to", str(to)]) == 2
    assert capsys.readouterr().err.startswith("refit: error: ")

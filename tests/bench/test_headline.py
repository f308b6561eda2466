"""The headline, from made-up measurements of a Blackwell machine and of ones that are not known."""

import dataclasses

import pytest
from mx_bench.cli import main
from mx_bench.headline import headline, peak_flops
from mx_bench.results import Measurement, Results

B200 = {"device": "NVIDIA B200", "capability": "10.0", "sms": 148, "sm_clock_max_mhz": "1965"}
LAYER = "wide T16384 D4096 H1536 E64 k6"
PEAK_MX = 148 * 1965e6 * 16384


def run(machine=B200, *, smoke=False) -> Results:
    return (
        Results(machine, smoke=smoke)
        .with_section("ceilings", [
            Measurement("ceilings", "copy", "torch copy_", 1e-3, bytes=6.7e9),
            Measurement("ceilings", "dense BF16", "torch.matmul", 1e-3, flop=1.7e12),
        ])
        .with_section("memory-bound", [
            Measurement("memory-bound", "quantise, row, 65536 x 7168", "ours", 2e-4, bytes=6.365e-4 * 2e12),
            Measurement("memory-bound", "quantise, row, 65536 x 7168", "copy", 2e-4, bytes=1.2e9),
            Measurement("memory-bound", "combine, T 8192", "ours", 1e-4, bytes=6e8),
        ])
        .with_section("grouped GEMM", [
            Measurement("grouped GEMM", "fprop, 8 groups", "ours MXFP8", 1e-3, flop=0.5 * PEAK_MX * 1e-3),
            Measurement("grouped GEMM", "fprop, 8 groups", "ours BF16", 1e-3, flop=0.25 * PEAK_MX * 1e-3),
            Measurement("grouped GEMM", "fprop, 8 groups", "QuACK MXFP8", 1e-3, flop=1e12),
            Measurement("grouped GEMM", "dgrad, 8 groups", "ours MXFP8", None, note="failed"),
        ])
        .with_section("MoE layer", [
            Measurement("MoE layer", f"{LAYER} forward", "ours BF16", 3e-3),
            Measurement("MoE layer", f"{LAYER} forward", "ours MXFP8", 2e-3),
            Measurement("MoE layer", f"{LAYER} forward + backward", "ours BF16", 9e-3),
            Measurement("MoE layer", f"{LAYER} forward + backward", "ours MXFP8", 5e-3),
        ])
        .with_section("trainer", [
            Measurement("trainer", "gpu_50m", "ours bf16", 0.12),
            Measurement("trainer", "gpu_50m", "ours mxfp8", 0.10),
        ])
    )  # fmt: skip


def test_every_figure_of_a_blackwell_run():
    layer, training, mx, bf16, quantiser = headline(run())
    assert layer == (
        f"MoE layer {LAYER}, MXFP8 over BF16: forward 1.50x, backward 2.00x, both 1.80x "
        "(published on B200: 3.5x over a Hopper-era layer)"
    )
    assert training == "training step, MXFP8 over BF16: 1.20x (published on B200: 1.5x)"
    assert mx.startswith("fprop, 8 groups, ours MXFP8: ")
    assert mx.endswith(" 50% of peak")
    assert bf16.endswith(" 50% of peak")  # its own peak is half as high
    assert quantiser.endswith("6.37 TB/s, 95% of the copy's speed")


def test_peaks():
    assert peak_flops(run(), "ours MXFP8") == pytest.approx(PEAK_MX)
    hopper = run({"capability": "9.0", "sms": 132, "sm_clock_max_mhz": 1980})
    assert (
        peak_flops(hopper, "ours MXFP8")
        == peak_flops(hopper, "ours BF16")
        == pytest.approx(1.07e15, rel=0.01)
    )


@pytest.mark.parametrize("missing", ["capability", "sms", "sm_clock_max_mhz"])
def test_an_unknown_machine_has_no_peak(missing):
    machine = {key: value for key, value in B200.items() if key != missing}
    assert peak_flops(run(machine), "ours MXFP8") is None
    assert not any("of peak" in line for line in headline(run(machine)))
    assert len(headline(run(machine))) == 3


def test_what_did_not_run_is_left_out():
    whole = run()
    only_both = [m for m in whole.measurements if m.case != f"{LAYER} forward" and m.section != "trainer"]
    lines = headline(dataclasses.replace(whole, measurements=tuple(only_both)))
    assert lines[0].startswith(f"MoE layer {LAYER}, MXFP8 over BF16: both 1.80x (")
    assert not any("training step" in line for line in lines)
    assert headline(Results(B200)) == []


def test_smoke_sizes_have_no_headline():
    assert headline(run(smoke=True)) == []


def test_report_shows_a_run_made_elsewhere(tmp_path, capsys):
    run().save(tmp_path / "results.json")
    assert main(["report", str(tmp_path / "results.json"), "--to", str(tmp_path / "page")]) == 0
    printed = capsys.readouterr().out
    page = (tmp_path / "page" / "results.md").read_text()
    for line in headline(run()):
        assert line in printed
        assert f"- {line}" in page
    assert (tmp_path / "page" / "grouped_GEMM.png").stat().st_size > 0

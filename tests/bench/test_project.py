"""The projection: work is counted right, terms behave, the H200 is reproduced, and every line is called projected."""

import dataclasses
import subprocess
import sys

import pytest
from mx_bench.cli import main
from mx_bench.gemm import SHAPES as GEMM_SHAPES
from mx_bench.project import check
from mx_bench.project.layer import BYTES, GroupedGemm, moe_steps, weight_steps
from mx_bench.project.machines import (
    B200,
    GENERAL_SOURCES,
    H200,
    MACHINES,
    OVERHEAD,
    SOURCES,
    Machine,
    load_machine,
    sources_of,
)
from mx_bench.project.model import (
    end_to_end_speedup,
    estimate,
    gemm_estimate,
    gemm_terms,
    project_layer,
    tiling,
)
from mx_bench.project.report import constants
from mx_bench.results import Measurement, Results, load
from mx_bench.shapes import DESIGN_SHAPES, MODEL_SHAPES, MoEShape

SHAPES = (*DESIGN_SHAPES, *MODEL_SHAPES)
PRECISIONS = ("bf16", "mxfp8")
ROWS = list(check.rows(load(check.MEASURED), H200))


def row_name(row: check.Row) -> str:
    return " | ".join(row.measurement.key)


# the H200 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS, ids=row_name)
def test_the_h200_is_reproduced(row: check.Row):
    if row.reason:
        assert abs(row.error) > check.TOLERANCE, (
            "the model reaches this row now: take it out of check.OUTSIDE"
        )
    else:
        assert abs(row.error) <= check.TOLERANCE


def test_the_h200_rows_are_all_there():
    """Every shape and mode of the GEMM in both precisions, the memory-bound kernels, both layers with both passes."""
    measured = {row.measurement.key for row in ROWS}
    ours = [m for m in load(check.MEASURED).measurements if m.contestant.startswith("ours") and m.seconds]
    assert measured == {m.key for m in ours if m.section != "trainer"}
    assert len(measured) == len(ROWS)
    for shape in GEMM_SHAPES:
        for mode in ("fprop", "dgrad", "wgrad"):
            for contestant in ("ours BF16", "ours MXFP8"):
                assert ("grouped GEMM", shape.case_name(mode, 0.0), contestant) in measured
    for shape in DESIGN_SHAPES:
        for passes in ("forward", "forward + backward"):
            assert ("MoE layer", f"{shape.case_name} {passes}", "ours MXFP8") in measured
    assert sum(key[0] == "memory-bound" for key in measured) >= 19
    assert set(check.OUTSIDE) < measured


def test_few_constants_for_many_rows():
    """Fitted numbers, against measured rows: a constant a row would prove nothing."""
    fitted = [s for s in (*SOURCES["H200"].values(), *GENERAL_SOURCES.values()) if s.startswith("fitted")]
    assert len(fitted) * 5 < len(ROWS)


def test_a_wrong_constant_is_seen():
    """The tolerance is tight enough to notice a tensor core, a memory or a conversion that is off by 30 %."""
    for field in ("sustained_flops_bf16", "copy_bandwidth", "dequantize_a_clocks"):
        wrong = dataclasses.replace(H200, **{field: 1.3 * getattr(H200, field)})
        rows = check.rows(load(check.MEASURED), wrong)
        assert any(abs(row.error) > check.TOLERANCE for row in rows if not row.reason), field


def test_rows_that_did_not_run_are_left_out():
    measured = load(check.MEASURED)
    none = tuple(dataclasses.replace(m, seconds=None) for m in measured.measurements)
    assert list(check.rows(dataclasses.replace(measured, measurements=none), H200)) == []


# work ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_gemm_work_of_a_layer(shape: MoEShape):
    for precision in PRECISIONS:
        steps = moe_steps(shape, precision)
        forward = sum(s.gemm.flop for s in steps if s.gemm and not s.backward)
        backward = sum(s.gemm.flop for s in steps if s.gemm and s.backward)
        assert forward == pytest.approx(shape.forward_flop)
        assert backward == pytest.approx(2 * shape.forward_flop)


def test_memory_traffic_of_the_quantised_gather():
    shape = DESIGN_SHAPES[0]
    (gather,) = (s for s in moe_steps(shape, "mxfp8") if s.name == "F1 gather x")
    rows = shape.rows + 64 * shape.experts  # half a unit of padding for each expert
    assert gather.bytes == pytest.approx(2 * shape.tokens * shape.width + rows * shape.width * BYTES["mxfp8"])


def test_weights_are_read_once_a_step_or_once_a_pass():
    shape = DESIGN_SHAPES[0]
    weights = 3 * shape.experts * shape.width * shape.expert_width
    (once,) = weight_steps(shape, in_call=False)
    assert once.bytes == pytest.approx(weights * (2 + 2 * 33 / 32))
    assert sum(s.bytes for s in weight_steps(shape, in_call=True)) == pytest.approx(
        weights * 2 * (2 + 33 / 32)
    )
    projection = project_layer(shape, B200, "mxfp8")
    assert projection.seconds(once_a_step=True) > projection.seconds()


def test_bytes_and_tiles_of_a_gemm():
    gemm = GroupedGemm("fprop", rows=300, groups=3, n=64, k=32, sizes=(0, 129, 171))
    assert gemm.bytes("bf16") == 2 * (300 * 32 + 3 * 64 * 32 + 300 * 64)
    assert gemm.bytes("mxfp8") == 33 / 32 * (300 * 32 + 3 * 64 * 32) + 2 * 300 * 64
    assert gemm.row_tiles(128) == 4
    assert dataclasses.replace(gemm, sizes=()).row_tiles(128) == pytest.approx(300 / 128 + 1.5)
    wgrad = dataclasses.replace(gemm, mode="wgrad")
    assert (wgrad.row_tiles(128), wgrad.columns, wgrad.reduced) == (3, 32, 100)
    assert wgrad.bytes("bf16") == 2 * (300 * 32 + 300 * 64 + 3 * 64 * 32)


def test_tiles_are_those_of_the_backend():
    """16 groups of 4096 rows, N 4096: sm90 takes 128 x 256 in clusters of two, sm100 pairs with 256 x 256."""
    gemm = GroupedGemm("fprop", 16 * 4096, 16, 4096, 4096, (4096,) * 16)
    hopper, blackwell = tiling(gemm, H200, "bf16"), tiling(gemm, B200, "mxfp8")
    assert (hopper.tile_m, hopper.tile_n, hopper.waves) == (128, 256, -(-16 * 16 * 16 // 66))
    assert (blackwell.tile_m, blackwell.tile_n, blackwell.waves) == (128, 256, -(-16 * 16 * 16 // 74))
    assert blackwell.operand_rows == 128 + 128  # half of B sits in the other CTA's shared memory


# terms ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", MACHINES.values(), ids=lambda machine: machine.name)
def test_every_constant_has_a_source(machine: Machine):
    assert set(SOURCES[machine.name]) == {f.name for f in dataclasses.fields(Machine)} - {"name"}
    assert sources_of(machine) is SOURCES[machine.name]
    table = constants([machine])
    assert {row[1] for row in table.rows} == set(SOURCES[machine.name]) | set(GENERAL_SOURCES)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=lambda machine: machine.name)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_no_gemm_beats_its_machine(machine: Machine, shape: MoEShape):
    for precision in PRECISIONS:
        peak = getattr(machine, "sustained_flops_mx" if precision == "mxfp8" else "sustained_flops_bf16")
        for step in moe_steps(shape, precision):
            if step.gemm:
                item = estimate(step, machine, precision)
                assert step.gemm.flop / item.seconds <= peak
                assert step.gemm.bytes(precision) / item.seconds <= machine.copy_bandwidth
                assert item.limit in gemm_terms(step.gemm, machine, precision)


def test_a_faster_memory_never_slows_the_layer():
    faster = dataclasses.replace(B200, copy_bandwidth=2 * B200.copy_bandwidth)
    for shape in SHAPES:
        assert (
            project_layer(shape, faster, "mxfp8").seconds() <= project_layer(shape, B200, "mxfp8").seconds()
        )


def test_overheads_do_not_shrink_with_the_memory_alone():
    """Twice the memory speed halves a copy, but not the instructions of gather + quantise."""
    faster = dataclasses.replace(H200, copy_bandwidth=2 * H200.copy_bandwidth, launch_s=1e-12)
    slower, stays = dataclasses.replace(H200, launch_s=1e-12), OVERHEAD["gather_quantize"]
    for name, gain in (("F5 combine", 2.0), ("F1 gather x", (1 + stays) / (0.5 + stays))):
        (step,) = (s for s in moe_steps(DESIGN_SHAPES[0], "mxfp8") if s.name == name)
        ratio = estimate(step, slower, "mxfp8").seconds / estimate(step, faster, "mxfp8").seconds
        assert ratio == pytest.approx(gain, rel=1e-3)


def test_small_k_is_bound_by_memory_and_large_k_by_power():
    small, large = (GroupedGemm("fprop", 65536, 8, 4096, k, (8192,) * 8) for k in (128, 8192))
    assert gemm_estimate(small, B200, "mxfp8")[1] in ("HBM", "epilogue")
    assert gemm_estimate(large, B200, "mxfp8")[1] == "power"


def test_published_products_are_near():
    """Other people's kernels on a B200 reach 60 to 100 % of what is projected for ours: a yardstick, not a fit."""
    for source, gemm, rate in check.PUBLISHED:
        assert 0.6 < rate * gemm_estimate(gemm, B200, "mxfp8")[0] / gemm.flop <= 1.0, source


def test_end_to_end_follows_amdahl():
    assert end_to_end_speedup(2.0, 0.5) == pytest.approx(4 / 3)
    assert end_to_end_speedup(1.0, 0.9) == pytest.approx(1.0)


# a user's machine ----------------------------------------------------------------------------------------------------


def test_machine_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('base = "B200"\nsms = 100\n')
    machine = load_machine(path)
    assert machine == dataclasses.replace(B200, name="mine", sms=100)
    sources = sources_of(machine)
    assert sources["sms"] == "the machine file"
    assert sources["l2_bandwidth"].startswith("B200: published")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base = 'X'", "base must be one of"),
        ("smz = 1", "no such field: smz"),
        ("backend = 'cpu'", "no such field: backend"),
        ("sms = -1", "must be a positive number"),
        ("sms = 0", "must be a positive number"),
        ("sms = true", "must be a positive number"),
        ("sms = 'many'", "must be a positive number"),
        ("sms =", "expected TOML"),
    ],
)
def test_machine_file_errors(tmp_path, text, message):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_machine(path)


# what it prints ------------------------------------------------------------------------------------------------------


def test_every_line_says_projected(tmp_path, capsys):
    path = tmp_path / "mine.toml"
    path.write_text('base = "GB300"\ncopy_bandwidth = 7.5e12\n')
    results = tmp_path / "results.json"
    load(check.MEASURED).save(results)
    for arguments in (
        ["--machine", "B200", "--machine", str(path), "--shape", "DeepSeek-V3", "--expert-share", "0.3"],
        ["--machine", "H200", "--against", str(results)],
        ["--page", str(tmp_path / "docs")],
    ):
        assert main(["project", *arguments]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines
        assert all("projected" in line for line in lines)


def test_the_page(tmp_path, capsys):
    assert main(["project", "--page", str(tmp_path)]) == 0
    page = (tmp_path / "projection.md").read_text()
    assert "\n@" not in page
    for shape in DESIGN_SHAPES:
        assert f"{shape.case_name}" in page
    for field in dataclasses.fields(Machine):
        assert field.name == "name" or f"| {field.name} |" in page
    assert {path.name for path in (tmp_path / "images").iterdir()} == {
        "projection_h200.png",
        "projection_layers.png",
    }


def test_against_a_run_of_ones_own(tmp_path, capsys):
    """A run on other hardware: the model's error on its rows, and no row that it does not know."""
    measured = load(check.MEASURED)
    Results(measured.machine).with_section("MoE layer", [
        dataclasses.replace(m, seconds=m.seconds / 2) for m in measured.measurements if m.section == "MoE layer" and m.seconds
    ]).save(tmp_path / "results.json")  # fmt: skip
    assert main(["project", "--machine", "H200", "--against", str(tmp_path / "results.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 12
    assert all("+" in line for line in lines[2:])


def test_command_line_refuses_in_one_line(capsys):
    assert main(["project", "--machine", "nowhere.toml"]) == 2
    assert main(["project", "--expert-share", "1.5"]) == 2
    assert main(["project", "--shape", "nothing"]) == 2
    assert main(["project", "--against", "nowhere.json"]) == 2
    assert capsys.readouterr().err.count("\n") == 4


@pytest.mark.parametrize(
    ("option", "idle"),
    [
        (["--against", "x.json"], ["--shape", "wide"]),
        (["--against", "x.json"], ["--expert-share", "0.3"]),
        (["--page", "x"], ["--machine", "B200"]),
        (["--page", "x"], ["--shape", "wide"]),
        (["--page", "x"], ["--against", "x.json"]),
    ],
)
def test_options_that_would_do_nothing_are_refused(option, idle, capsys):
    assert main(["project", *option, *idle]) == 2
    assert f"{option[0]} does not take {idle[0]}" in capsys.readouterr().err


def test_a_reader_that_has_read_enough():
    """`mx-bench project | head` ends without a traceback."""
    process = subprocess.Popen(
        [sys.executable, "-m", "mx_bench", "project"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    assert process.stderr
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 1


def test_a_memory_bound_case_of_an_unknown_kind():
    unknown = Measurement("memory-bound", "sort, 65536", "ours", 1e-3, bytes=1e6)
    with pytest.raises(ValueError, match=r"'sort, 65536': expected one that begins with"):
        list(check.rows(Results({}).with_section("memory-bound", [unknown]), H200))

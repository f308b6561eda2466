"""The projection: work is counted right, terms behave, a user's machine file is checked, and all is called projected."""

import dataclasses

import pytest
from mx_bench.cli import main
from mx_bench.project.layer import BYTES, moe_steps
from mx_bench.project.machines import B200, MACHINES, SOURCES, Machine, load_machine
from mx_bench.project.model import end_to_end_speedup, estimate, gemm_terms, project_layer
from mx_bench.shapes import DESIGN_SHAPES, MODEL_SHAPES, MoEShape

SHAPES = (*DESIGN_SHAPES, *MODEL_SHAPES)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_gemm_work_of_a_layer(shape: MoEShape):
    for precision in ("bf16", "mxfp8"):
        steps = moe_steps(shape, precision)
        forward = sum(s.gemm.flop for s in steps if s.gemm and not s.backward)
        backward = sum(s.gemm.flop for s in steps if s.gemm and s.backward)
        assert forward == pytest.approx(shape.forward_flop)
        assert backward == pytest.approx(2 * shape.forward_flop)


def test_memory_traffic_of_the_quantised_gather():
    shape = DESIGN_SHAPES[0]
    (gather,) = (s for s in moe_steps(shape, "mxfp8") if s.name == "F1 gather x")
    read, written = 2 * shape.tokens * shape.width, shape.rows * shape.width
    assert gather.bytes == pytest.approx(read + written * BYTES["mxfp8"])


@pytest.mark.parametrize("machine", MACHINES.values(), ids=lambda machine: machine.name)
def test_every_constant_has_a_source(machine: Machine):
    assert set(SOURCES[machine.name]) == {f.name for f in dataclasses.fields(Machine)} - {"name"}


@pytest.mark.parametrize("machine", MACHINES.values(), ids=lambda machine: machine.name)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_no_gemm_beats_its_machine(machine: Machine, shape: MoEShape):
    for precision in ("bf16", "mxfp8"):
        peak = getattr(machine, "sustained_flops_mx" if precision == "mxfp8" else "sustained_flops_bf16")
        for step in moe_steps(shape, precision):
            if step.gemm:
                item = estimate(step, machine, precision)
                assert step.gemm.flop / item.seconds <= peak
                assert item.limit in gemm_terms(step.gemm, machine, precision)


def test_a_faster_memory_never_slows_the_layer():
    faster = dataclasses.replace(B200, copy_bandwidth=2 * B200.copy_bandwidth)
    for shape in SHAPES:
        assert (
            project_layer(shape, faster, "mxfp8").seconds() <= project_layer(shape, B200, "mxfp8").seconds()
        )


def test_end_to_end_follows_amdahl():
    assert end_to_end_speedup(2.0, 0.5) == pytest.approx(4 / 3)
    assert end_to_end_speedup(1.0, 0.9) == pytest.approx(1.0)


def test_machine_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('base = "B200"\nsms = 100\n')
    assert load_machine(path) == dataclasses.replace(B200, name="mine", sms=100)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base = 'X'", "base must be one of"),
        ("smz = 1", "no such field: smz"),
        ("sms = -1", "must be a positive number"),
    ],
)
def test_machine_file_errors(tmp_path, text, message):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_machine(path)


def test_command_line_says_projected(capsys):
    assert main(["project", "--machine", "B200"]) == 0
    table = capsys.readouterr().out
    assert "projected for B200" in table


def test_command_line_refuses_in_one_line(capsys):
    assert main(["project", "--machine", "nowhere.toml"]) == 2
    assert main(["project", "--expert-share", "1.5"]) == 2
    assert capsys.readouterr().err.count("\n") == 2

"""What the compiler made of the kernels: no spills, no local memory, on either architecture."""

import os
import re
import subprocess
import sys

import pytest
import torch

TARGETS = ("sm_90a", "sm_100a")


def plans():
    """One plan of every kernel that the backends use with their tiles."""
    from mx_kernels import problem as p
    from mx_kernels.generic import backend as b
    from mx_kernels.generic.dequantize import _kernel as dequantize

    args = "mxfp8_e4m3", "rceil", "blocked_128x4"
    for dtype in (torch.bfloat16, torch.float32):
        for orientation in ("row", "col", "dual"):
            for aligned in (True, False):
                yield (
                    b._plan_quantize,
                    p.QuantizeProblem(dtype, *args, orientation),
                    (256, 256),
                    (256, 1),
                    aligned,
                    0,
                )
            grouped = p.QuantizeProblem(dtype, *args, orientation, 2, True)
            yield b._plan_quantize, grouped, (256, 256), (256, 1), True, 4
            for weighted in (False,) if orientation == "row" else (False, True):
                gathered = p.GatherQuantizeProblem(dtype, *args, orientation, weighted)
                yield b._plan_gather_quantize, gathered, (256, 256), True, 512
        compact = p.QuantizeProblem(dtype, "mxfp8_e5m2", "floor", "linear", "row", 2, True, "compact")
        yield b._plan_quantize, compact, (256, 256), (256, 1), True, 4
        for format in (None, "mxfp8_e4m3"):
            yield b._plan_swiglu, p.SwigluProblem(dtype, format), 256, 512, 4
            for columns in (False, True)[: 2 if format else 1]:
                yield b._plan_dswiglu, p.DSwigluProblem(dtype, format, columns=columns), 256, 256, 4
        for k in (1, 8):
            yield b._plan_combine, p.CombineProblem(dtype, k), 64, 256, True
            yield b._plan_combine_backward, p.CombineProblem(dtype, k, backward=True), 64, 512, 256
    yield b._plan_gather, p.GatherProblem(torch.bfloat16), 512, 256
    yield b._plan_route, p.RouteProblem(torch.int64, 8, 512), 64
    for mode in ("fprop", "dgrad", "wgrad"):
        for row_map in ("aligned", "compact")[: 1 if mode == "wgrad" else 2]:
            yield dequantize, p.GemmProblem(mode, args[0], "mxfp8_e5m2", torch.bfloat16, row_map), None
    yield b._plan_slot_weights, p.SlotWeightsProblem(8), 64, 512


def compile_all(target: str) -> None:
    """Print the compiler's resource report of every kernel, after its problem."""
    import cutlass.cute as cute

    compile_, options = cute.compile, " remarks{ptx}"
    cute.compile = lambda *args, **kwargs: compile_(*args, options=kwargs["options"] + options)
    for make, problem, *key in plans():
        print("KERNEL", make.__name__, problem, file=sys.stderr, flush=True)
        make(problem, target, *key)


@pytest.mark.parametrize("target", TARGETS)
def test_no_spills(target):
    done = subprocess.run(
        [sys.executable, __file__, target],
        capture_output=True,
        text=True,
        env=os.environ | {"MX_DISK_CACHE": "0"},
        check=True,
    )
    reports = done.stderr.split("KERNEL ")[1:]
    assert len(reports) > 40
    assert all("Used" in r for r in reports)
    spilled = [r.splitlines()[0] for r in reports if re.search(r"[1-9]\d* bytes (stack frame|spill)", r)]
    assert not spilled, "\n".join(spilled)


if __name__ == "__main__":
    compile_all(sys.argv[1])

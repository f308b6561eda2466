"""The host side: compiled DSL functions on CPU tensors, several architectures, bounds, errors, torch ops, the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import ptxsim
import pytest
import torch
from ptxsim import program
from ptxsim.host import shim

cute = pytest.importorskip("cutlass.cute")
from cutlass.cute.runtime import from_dlpack, make_fake_compact_tensor  # noqa: E402
from emulator.core import dsl_kernels  # noqa: E402

pytest_plugins = ["ptxsim.pytest_plugin"]
ROOT = Path(__file__).parents[3]


def tensors(n=300):
    torch.manual_seed(0)
    return torch.randn(n), torch.randn(n), torch.full((n,), float("nan"))


def compile_ffi(arch):
    n = cute.sym_int()
    fake = lambda: make_fake_compact_tensor(dsl_kernels.cutlass.Float32, (n,), assumed_align=4)  # noqa: E731
    return cute.compile(
        dsl_kernels.scale_add, fake(), fake(), fake(), options=f"--enable-tvm-ffi --gpu-arch {arch}"
    )


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_classic_call(emulated_gpu, arch):
    a, b, c = tensors()
    gpu = emulated_gpu(arch)
    views = [from_dlpack(x) for x in (a, b, c)]
    cute.compile(dsl_kernels.scale_add, *views)(*views)
    assert torch.equal(c, torch.addcmul(torch.full_like(a, 1.5), a, b))
    assert gpu.launches[-1].config.grid == (3, 1, 1)
    assert gpu.machine.program.module.target == arch


def test_tvm_ffi_call_and_several_architectures_in_one_process():
    a, b, c = tensors()
    compiled = {}
    for arch in ("sm_100a", "sm_90a", "sm_100a"):
        with ptxsim.gpu(arch) as gpu:
            if arch not in compiled:
                compiled[arch] = compile_ffi(arch)
            c.zero_()
            compiled[arch](a, b, c)
            assert torch.equal(c, torch.addcmul(torch.full_like(a, 1.5), a, b))
            assert gpu.machine.program.module.target == arch


def test_argument_checks_of_the_dsl_still_work(emulated_gpu):
    a, b, c = tensors()
    emulated_gpu()
    with pytest.raises(ValueError, match="shape"):
        compile_ffi("sm_100a")(a, b, c[:200])


def test_nothing_is_left_behind():
    from cutlass.cutlass_dsl import CuTeDSL

    before = (os.environ.get("CUTE_DSL_LIBS"), dict(vars(CuTeDSL._get_dsl().envar)))
    with ptxsim.gpu():
        pass
    assert before == (os.environ.get("CUTE_DSL_LIBS"), dict(vars(CuTeDSL._get_dsl().envar)))


def test_call_outside_a_gpu_says_so(capfd):
    a, b, c = tensors()
    with ptxsim.gpu():
        views = [from_dlpack(x) for x in (a, b, c)]
        compiled = cute.compile(dsl_kernels.scale_add, *views)
        compiled(*views)
    with pytest.raises(Exception, match=r".*"):  # of the DSL's own kind
        assert compiled(*views) == 0
    assert "outside `with ptxsim.gpu(...)`" in capfd.readouterr().err


@pytest.mark.parametrize("ffi", [False, True])
def test_access_outside_a_view(emulated_gpu, ffi):
    """A view's own extent is the limit, not its storage."""
    emulated_gpu()
    storage = torch.zeros(100)
    if ffi:
        fake = make_fake_compact_tensor(dsl_kernels.cutlass.Float32, (cute.sym_int(),), assumed_align=4)
        compiled = cute.compile(
            dsl_kernels.past_the_end, fake, dsl_kernels.cutlass.Int32(1), options="--enable-tvm-ffi"
        )
        call = lambda n: compiled(storage[10:20], n)  # noqa: E731
    else:
        view = from_dlpack(storage[10:20], assumed_align=4)
        compiled = cute.compile(dsl_kernels.past_the_end, view, dsl_kernels.cutlass.Int32(1))
        call = lambda n: compiled(view, dsl_kernels.cutlass.Int32(n))  # noqa: E731
    call(10)
    with pytest.raises(
        ptxsim.Fault, match=r"global store .* past the end of argument 0 \(10,\) \(40 bytes\)"
    ):
        call(11)
    assert storage.sum() == 10


def test_torch_op_over_a_compiled_function(emulated_gpu):
    gpu = emulated_gpu("sm_100a", schedule="random", seed=5)
    compiled = compile_ffi("sm_100a")
    library = torch.library.Library("ptxsim_test", "FRAGMENT")
    library.define("scale_add(Tensor a, Tensor b) -> Tensor")

    def scale_add(a, b):
        c = torch.empty_like(a)
        compiled(a, b, c)
        return c

    library.impl("scale_add", scale_add, "CPU")
    a, b, _ = tensors()
    assert torch.equal(torch.ops.ptxsim_test.scale_add(a, b), torch.addcmul(torch.full_like(a, 1.5), a, b))
    assert len(gpu.launches) == 1


@pytest.mark.parametrize(("arch", "backend"), [("sm_100a", "sm100"), ("sm_90a", "sm90")])
def test_mx_kernels_on_cpu_tensors(emulated_gpu, arch, backend):
    import mx_kernels

    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    want = mx_kernels.quantize_mx(x, backend="cpu")
    gpu = emulated_gpu(arch, schedule="late")
    got = mx_kernels.quantize_mx(x, backend=backend)
    assert torch.equal(got.data.view(torch.uint8), want.data.view(torch.uint8))
    assert torch.equal(got.scale, want.scale)
    assert gpu.launches


def test_no_compiler_is_said_clearly(monkeypatch, tmp_path):
    monkeypatch.setenv("PTXSIM_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(ptxsim.HostError, match="needs a C compiler once"):
        shim.build()


def test_translations_are_cached_on_disk(monkeypatch, tmp_path):
    monkeypatch.setenv("PTXSIM_CACHE", str(tmp_path))
    text = ".version 8.8\n.target sm_100a\n.address_size 64\n.visible .entry k() { ret; }\n"
    program.load_program(text, "k")
    files = list((tmp_path / "kernels").iterdir())
    assert len(files) == 1
    program._programs.clear()
    monkeypatch.setattr(program, "_translate", lambda *a: pytest.fail("translated again"))
    program.load_program(text, "k")
    files[0].write_bytes(b"damaged")
    program._programs.clear()
    monkeypatch.undo()
    monkeypatch.setenv("PTXSIM_CACHE", str(tmp_path))
    program.load_program(text, "k")


SCRIPT = """
import torch
from cutlass.cute.runtime import from_dlpack
from cutlass import cute
from emulator.core import dsl_kernels
assert torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
a, b, c = (torch.ones(200, device="cuda") for _ in range(3))
assert a.data_ptr() % 256 == 0
views = [from_dlpack(x) for x in (a, b, c)]
cute.compile(dsl_kernels.scale_add, *views)(*views)
torch.cuda.synchronize()
assert (c.cpu() == 2.5).all()
print("script done")
"""


def test_command_line_run_and_trace(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    out = tmp_path / "trace.json"
    command = [sys.executable, "-m", "ptxsim", "trace", "--arch", "sm_90a", "--out", str(out), str(script)]
    result = subprocess.run(command, capture_output=True, text=True, env=env, timeout=250, check=False)
    assert result.returncode == 0, result.stderr
    assert "script done" in result.stdout
    assert "warp instructions" in result.stdout
    events = json.loads(out.read_text())["traceEvents"]
    assert any(e.get("name") == "run" for e in events)


def test_package_import_is_light():
    code = "import sys, ptxsim; sys.exit(any(m in sys.modules for m in ('torch', 'cutlass', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_numpy_arguments_of_raw_ptx():
    text = ".version 8.8\n.target sm_90a\n.address_size 64\n.visible .entry k(.param .u64 p, .param .f32 x) {\n .reg .b64 a; .reg .f32 v; ld.param.u64 a, [p]; ld.param.f32 v, [x]; st.global.f32 [a], v; ret; }\n"  # fmt: skip
    out = np.zeros(1, np.float32)
    record = ptxsim.run_ptx(text, args=[out, 2.5], block=1)
    assert out[0] == 2.5
    assert record.instructions == 4
    with pytest.raises(ValueError, match="expected 2"):
        ptxsim.run_ptx(text, args=[out])

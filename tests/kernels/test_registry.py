"""Backend choice: reasons, names, environment, emulation, the self-test record; and what importing loads."""

import functools
import importlib.util
import json
import subprocess
import sys
import types

import mx_kernels as mk
import pytest
import torch
from mx_kernels import arch, registry, selftest_record
from mx_kernels.cpu.backend import BACKEND as CPU_BACKEND
from mx_kernels.problem import QuantizeProblem

from kernels.layer import make_layer

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
PROBLEM = QuantizeProblem(torch.float32, "mxfp8_e4m3")
X = torch.ones(4, 32)


class FakeBackend:
    prepares = ()

    def __init__(self, name: str, reason: str | None = None):
        self.name, self.reason = name, reason

    def why_not(self, problem, device):
        return self.reason

    def quantize(self, problem, x, offs):
        return torch.zeros(1), torch.zeros(1, dtype=torch.uint8)


@pytest.fixture(autouse=True)
def fresh_registry(monkeypatch):
    monkeypatch.delenv("MX_BACKEND", raising=False)
    registry.forget()
    yield
    registry.load.cache_clear()
    registry.forget()


@pytest.fixture
def backends(monkeypatch):
    """Install fake GPU backends: backends(sm100=FakeBackend(…), sm90=None)."""

    def install(**fakes: FakeBackend | None) -> None:
        registry.load.cache_clear()
        registry.forget()
        for name, fake in fakes.items():
            module = types.ModuleType(f"mx_kernels.{name}.backend")
            if fake is not None:
                module.BACKEND = fake
            monkeypatch.setitem(sys.modules, f"mx_kernels.{name}", types.ModuleType(f"mx_kernels.{name}"))
            monkeypatch.setitem(sys.modules, f"mx_kernels.{name}.backend", module)

    return install


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that cuda:0 is a GPU of this capability."""

    def pretend(major: int, minor: int) -> None:
        properties = types.SimpleNamespace(
            name="Test GPU", major=major, minor=minor, multi_processor_count=148
        )
        monkeypatch.setattr(arch, "_properties", lambda index: properties)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Test GPU")
        monkeypatch.setattr(torch.version, "cuda", "13.0")

    return pretend


def test_cpu_tensors_take_the_cpu_backend() -> None:
    assert registry.choose("quantize", PROBLEM, CPU).name == "cpu"
    assert registry.choose("quantize", PROBLEM, CPU, "cpu").name == "cpu"


@pytest.mark.parametrize(
    ("capability", "target", "name"),
    [((9, 0), "sm_90a", "sm90"), ((10, 0), "sm_100a", "sm100"), ((10, 3), "sm_103a", "sm100")],
)
def test_a_gpu_takes_its_backend(gpu, backends, monkeypatch, capability, target, name) -> None:
    gpu(*capability)
    backends(sm90=FakeBackend("sm90"), sm100=FakeBackend("sm100"))
    monkeypatch.setattr(selftest_record, "why_not_trusted", functools.cache(lambda device: None))
    assert arch.target_of(CUDA) == target
    assert arch.num_sms(CUDA) == 148
    assert registry.choose("quantize", PROBLEM, CUDA).name == name


def test_blackwell_without_tcgen05_is_refused_in_words(gpu) -> None:
    gpu(12, 0)
    with pytest.raises(mk.NoBackendError, match=r"sm100: needs sm_100a or sm_103a, got .*without tcgen05"):
        registry.choose("quantize", PROBLEM, CUDA)


def test_the_error_lists_every_reason(gpu, backends) -> None:
    gpu(10, 0)
    backends(sm90=FakeBackend("sm90"), sm100=FakeBackend("sm100", reason="only on Sundays"))
    with pytest.raises(mk.NoBackendError) as caught:
        registry.choose("quantize", PROBLEM, CUDA)
    text = str(caught.value)
    assert "sm100: only on Sundays" in text
    assert "sm90: needs sm_90a" in text
    assert "cpu: takes CPU tensors, got cuda:0, Test GPU (capability 10.0)" in text
    assert "QuantizeProblem(dtype=torch.float32" in text


def test_a_backend_that_cannot_be_imported_or_lacks_an_op_is_a_reason(gpu, backends) -> None:
    gpu(9, 0)
    backends(sm90=None)
    with pytest.raises(
        mk.NoBackendError, match=r"mx_kernels.sm90.backend cannot be imported: AttributeError"
    ):
        registry.choose("quantize", PROBLEM, CUDA)
    backends(sm90=FakeBackend("sm90"))
    with pytest.raises(mk.NoBackendError, match="sm90: has no combine"):
        registry.choose("combine", PROBLEM, CUDA)


def test_the_environment_names_a_backend(monkeypatch) -> None:
    monkeypatch.setenv("MX_BACKEND", "sm90")
    with pytest.raises(mk.NoBackendError, match="sm90: needs sm_90a, got cpu"):
        mk.quantize_mx(X)
    assert mk.quantize_mx(X, backend="cpu").shape == X.shape
    registry.forget()
    monkeypatch.setenv("MX_BACKEND", "tpu")
    with pytest.raises(ValueError, match="MX_BACKEND: expected one of auto, sm100, sm90, cpu, got 'tpu'"):
        mk.quantize_mx(X)


def test_in_emulation_cpu_tensors_take_a_gpu_backend(backends) -> None:
    backends(sm90=FakeBackend("sm90"), sm100=FakeBackend("sm100"))
    mk.quantize_mx(X)  # a choice is remembered: it must not leak into the emulation, nor out of it
    with arch.emulated("sm_100a", 4):
        assert arch.target_of(CPU) == "sm_100a"
        assert arch.num_sms(CPU) == 4
        assert registry.choose("quantize", PROBLEM, CPU).name == "sm100"
        assert torch.ops.mx.quantize(X, "mxfp8_e4m3", -1, "rceil", "linear")[0].shape == (1,)
        assert registry.choose("quantize", PROBLEM, CPU, "cpu").name == "cpu"
        with arch.emulated("sm_90a", 2):
            assert registry.choose("quantize", PROBLEM, CPU).name == "sm90"
    assert arch.target_of(CPU) is None
    assert torch.ops.mx.quantize(X, "mxfp8_e4m3", -1, "rceil", "linear")[0].shape == X.shape


def test_in_emulation_a_refusal_does_not_fall_back_to_the_cpu(backends) -> None:
    backends(sm90=FakeBackend("sm90", reason="no"))
    with arch.emulated("sm_90a", 2), pytest.raises(mk.NoBackendError, match="cpu: must be asked for by name"):
        mk.quantize_mx(X)


def test_bad_emulation() -> None:
    with pytest.raises(ValueError, match="target: expected one of sm_90a"), arch.emulated("sm_80", 1):
        pass
    with pytest.raises(ValueError, match="num_sms: expected at least 1"), arch.emulated("sm_90a", 0):
        pass


def test_auto_trusts_sm100_only_after_its_selftest(gpu, backends, monkeypatch, tmp_path) -> None:
    gpu(10, 0)
    backends(sm100=FakeBackend("sm100"))
    monkeypatch.setenv("MX_CACHE_DIR", str(tmp_path))
    with pytest.raises(
        mk.NoBackendError, match=r"self-test has not run on this machine .*mx-doctor --selftest"
    ):
        registry.choose("quantize", PROBLEM, CUDA)
    assert registry.choose("quantize", PROBLEM, CUDA, "sm100").name == "sm100"  # asked for by name

    key = selftest_record.machine_key(CUDA)
    selftest_record.write(key, False, {"checks": []})
    with pytest.raises(mk.NoBackendError, match="self-test failed on this machine"):
        registry.choose("quantize", PROBLEM, CUDA)

    path = selftest_record.write(key, True, {"checks": []})
    assert registry.choose("quantize", PROBLEM, CUDA).name == "sm100"
    assert json.loads(path.read_text())["machine"] == key

    monkeypatch.setattr(selftest_record, "driver_version", lambda: "999.1")  # a new driver: not yet tested
    selftest_record.why_not_trusted.cache_clear()
    with pytest.raises(mk.NoBackendError, match=r"has not run on this machine .*driver 999.1"):
        registry.choose("quantize", PROBLEM, CUDA)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_a_whole_layer_runs_on_the_chosen_backend(backends, recipe) -> None:
    """Forward and backward, every op: the methods of docs/api.md are all that a backend needs."""
    methods = []

    class Recorder(FakeBackend):
        def __getattr__(self, name):
            methods.append(name)
            return getattr(CPU_BACKEND, name)

        quantize = property(lambda self: self.__getattr__("quantize"))

    backends(sm100=Recorder("sm100"))
    layer = make_layer(D=32, H=32)
    want = layer.run(mk.moe_mlp, recipe=recipe)
    with arch.emulated("sm_100a", 4):
        got = layer.run(mk.moe_mlp, recipe=recipe)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    quantisers = {"quantize", "gather_quantize"} if recipe == "mxfp8" else {"gather"}
    assert (
        set(methods) == {"route", "slot_weights", "swiglu", "dswiglu", "combine", "grouped_gemm"} | quantisers
    )


def test_a_choice_is_made_once(monkeypatch) -> None:
    choices = []
    choose = registry.choose
    monkeypatch.setattr(registry, "choose", lambda *args: choices.append(args[0]) or choose(*args))
    registry.forget()
    for shape in ((7, 32), (7, 32), (8, 32), (7, 32), (8, 32)):
        mk.quantize_mx(torch.ones(shape))
    assert choices == ["quantize"] * 2  # once a shape


def test_what_was_checked_once_is_checked_again_if_anything_differs() -> None:
    x, token_of = torch.ones(4, 32), torch.zeros(128, dtype=torch.int32)
    gather = torch.ops.mx.gather
    gather(x, token_of)
    for bad_x, bad_token_of in (
        (x.double(), token_of),
        (torch.ones(32, 4).T, token_of),
        (x[:, :31], token_of),
        (x.to("meta"), token_of),
        (x, token_of.long()),
        (x, token_of[::2]),
        (x, token_of[None]),
    ):
        with pytest.raises((TypeError, ValueError, NotImplementedError)):
            gather(bad_x, bad_token_of)
    gather(x, token_of)


NO_DRIVER = r"""
import ctypes, importlib, pkgutil, sys

real = ctypes.CDLL
class NoDriver(real):
    def __init__(self, name, *args, **kwargs):
        if name and "libcuda.so" in str(name):
            raise OSError(f"{name}: cannot open shared object file")
        super().__init__(name, *args, **kwargs)
ctypes.CDLL = NoDriver
"""

WITHOUT_DSL = r"""
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("cutlass", "cuda", "tvm_ffi", "triton"):
            raise ModuleNotFoundError(f"{name} is not here")
sys.meta_path.insert(0, Refuse())

import torch
import mx_kernels
KERNELS = ("device", "generic", "sm90", "sm100", "jit")  # these are the kernels: they need the DSL
names = [m.name for m in pkgutil.walk_packages(mx_kernels.__path__, "mx_kernels.", onerror=lambda name: None)]
names = [n for n in names if n.split(".")[1] not in KERNELS]
for name in names:
    importlib.import_module(name)
assert len(names) > 15, names
assert not torch.cuda.is_initialized()

x = torch.randn(8, 32)
mx_kernels.quantize_mx(x)
out = mx_kernels.moe_mlp(x, torch.zeros(8, 1, dtype=torch.int64), torch.ones(8, 1), torch.randn(2, 64, 32), torch.randn(2, 32, 32))
assert out.isfinite().all()
try:
    mx_kernels.quantize_mx(x, backend="sm90")
except mx_kernels.NoBackendError as error:
    assert "sm90: needs sm_90a, got cpu" in str(error), error
else:
    raise SystemExit("a GPU entry must refuse CPU tensors")
from mx_kernels import registry
for name in registry.BACKENDS:
    registry.load(name)  # a backend or a reason, never an exception
assert not torch.cuda.is_initialized()
"""


WITH_DSL = r"""
import torch
import mx_kernels
def fail(name):
    raise ImportError(name)
for module in pkgutil.walk_packages(mx_kernels.__path__, "mx_kernels.", onerror=fail):
    importlib.import_module(module.name)
assert not torch.cuda.is_initialized()
"""


def run_without_driver(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_DRIVER + code], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr


def test_what_users_call_imports_without_driver_and_without_the_dsl() -> None:
    """C17."""
    run_without_driver(WITHOUT_DSL)


def test_every_module_imports_without_driver() -> None:
    """C17: the kernels too, where the DSL is installed."""
    if importlib.util.find_spec("cutlass") is None:
        pytest.skip("the CuTe DSL is not installed")
    run_without_driver(WITH_DSL)

"""Hooks into the CuTe DSL, active while a GPU is entered. Written against nvidia-cutlass-dsl 4.8.1.

What is set on the DSL's own settings object: target, kept artefacts, runtime libraries. What is replaced, and restored on
exit, with the reason beside it: four methods and one property.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

from . import runtime
from .dlpack import AsCuda

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..api import GPU

SEEN_VERSION = "4.8.1"

_dump_directory: list[str] = []


def _dumps() -> str:
    """Where the compiler leaves PTX and cubins; one directory per process, removed at exit."""
    if not _dump_directory:
        import atexit

        path = tempfile.mkdtemp(prefix="ptxsim_")
        atexit.register(shutil.rmtree, path, ignore_errors=True)
        _dump_directory.append(path)
    return _dump_directory[0]


def installed() -> bool:
    import importlib.util

    return (
        importlib.util.find_spec("nvidia_cutlass_dsl") is not None
        or importlib.util.find_spec("cutlass") is not None
    )


@contextmanager
def hooked(gpu: GPU) -> Iterator[None]:
    """Compile for the emulated GPU and call through the stand-in runtime inside."""
    from cutlass.base_dsl import jit_executor
    from cutlass.base_dsl.env_manager import get_prefix_dsl_libs
    from cutlass.cutlass_dsl import CuTeDSL, cuda_jit_executor

    shim = str(runtime.library_path())
    with ExitStack() as stack:
        patch = lambda *args, **kw: stack.enter_context(mock.patch.object(*args, **kw))  # noqa: E731
        real = get_prefix_dsl_libs("CUTE_DSL") or ""
        libraries = os.pathsep.join([shim, *(p for p in real.split(os.pathsep) if p and p != shim)])
        # TVM-FFI functions read the library list from the environment when they are built
        stack.enter_context(mock.patch.dict(os.environ, {"CUTE_DSL_LIBS": libraries}))
        settings = CuTeDSL._get_dsl().envar
        for name, value in {
            "_arch": gpu.arch,
            "shared_libs": libraries,
            "keep_ptx": True,
            "keep_cubin": True,
            "dump_dir": _dumps(),
            "no_cache": True,
        }.items():
            patch(settings, name, value)

        # the executor asks the driver how many devices there are
        patch(cuda_jit_executor.CudaDialectJitCompiledFunction, "num_devices", 1)
        # the only place where PTX and cubin of a compilation are seen together
        patch(
            jit_executor.JitFunctionArtifacts,
            "__post_init__",
            _remembering(jit_executor.JitFunctionArtifacts.__post_init__),
        )
        # calls: note the tensors passed, and raise the emulator's own error
        patch(
            jit_executor.JitExecutor,
            "run_compiled_program",
            _called(jit_executor.JitExecutor.run_compiled_program),
        )
        _patch_call(stack, jit_executor.JitCompiledFunction)
        _patch_tensors(stack)
        _patch_ffi(stack)
        _patch_hardware_info(stack, gpu)
        yield


def _remembering(original: Any) -> Any:
    def post_init(self: Any) -> None:
        original(self)
        if isinstance(self.CUBIN, bytes) and isinstance(self.PTX, str):
            runtime.remember_ptx(self.CUBIN, self.PTX.rstrip("\0"))

    return post_init


def _called(original: Any, noted: bool = False, convert: Any = None) -> Any:
    """Wrap a call into compiled code."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        gpu = runtime.active()
        with gpu.call((*args, *kwargs.values()) if noted else ()):
            if convert is not None:
                args = tuple(convert(a) for a in args)
                kwargs = {k: convert(v) for k, v in kwargs.items()}
            return _raising(original, self, *args, **kwargs)

    return call


def _raising(f: Any, *args: Any, **kwargs: Any) -> Any:
    """Call compiled code; an emulator error comes out as itself."""
    runtime.take_error()
    try:
        result = f(*args, **kwargs)
    except Exception:
        error = runtime.take_error()
        if error is not None:
            raise error from None
        raise
    error = runtime.take_error()
    if error is not None:
        raise error
    return result


def _patch_call(stack: ExitStack, cls: Any) -> None:
    stack.enter_context(mock.patch.object(cls, "__call__", _called(cls.__call__, noted=True)))


def _patch_tensors(stack: ExitStack) -> None:
    """CuTe takes a tensor's address space from its DLPack device: CPU torch tensors must look like GPU memory."""
    from cutlass.cute import runtime as cute_runtime

    original = cute_runtime._Tensor.__init__

    def init(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> None:
        original(self, AsCuda.wrap(tensor), *args, **kwargs)
        self._ptxsim_source = tensor

    stack.enter_context(mock.patch.object(cute_runtime._Tensor, "__init__", init))


def _patch_ffi(stack: ExitStack) -> None:
    """TVM-FFI functions check the device of their arguments."""
    try:
        import tvm_ffi
        from cutlass.cutlass_dsl import tvm_ffi_provider as provider
    except ImportError:
        return

    def convert(x: Any) -> Any:
        wrapped = AsCuda.wrap(x)
        if wrapped is not x:
            return tvm_ffi.from_dlpack(wrapped)
        if isinstance(x, (list, tuple)) and type(x) in (list, tuple):
            return type(x)(convert(v) for v in x)
        return x

    for cls in (provider.TVMFFIJitCompiledFunction, provider.TVMFFIJitCompiledFunctionWithKwargs):
        stack.enter_context(
            mock.patch.object(cls, "__call__", _called(cls.__call__, noted=True, convert=convert))
        )


def _patch_hardware_info(stack: ExitStack, gpu: GPU) -> None:
    """cutlass.utils.HardwareInfo asks the driver."""
    try:
        from cutlass.utils import hardware_info
    except ImportError:
        return
    answers = {
        "__init__": lambda self, *a, **k: None,
        "get_max_active_clusters": lambda self, cluster_size, *a, **k: max(
            gpu.machine.sms // cluster_size, 1
        ),
        "get_l2_cache_size_in_bytes": lambda self: 126 << 20,
        "get_device_multiprocessor_count": lambda self: gpu.machine.sms,
    }
    for name, answer in answers.items():
        if hasattr(hardware_info.HardwareInfo, name):
            stack.enter_context(mock.patch.object(hardware_info.HardwareInfo, name, answer))

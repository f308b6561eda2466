"""The CUDA runtime calls that compiled host code makes, answered by the active emulated GPU."""

from __future__ import annotations

import ctypes
import hashlib
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.machine import LaunchConfig
from ..core.tensormap import encode_tiled
from ..errors import HostError
from ..program import cache_directory
from . import shim

if TYPE_CHECKING:
    from ..api import GPU

_M64 = (1 << 64) - 1
_ERROR = 999
_FATBIN_MAGIC = 0xBA55ED50
_CLUSTER_ATTRIBUTE = 4

_active: list[GPU] = []
"""Stack of entered GPUs; the last one runs launches."""
_kernels: dict[int, tuple[str, str]] = {}
"""Kernel handle → (PTX, name)."""
_libraries: dict[int, str] = {}
_ptx_of: dict[str, str] = {}
"""Hash of a cubin → the PTX it was assembled from."""
_next_handle = 0x1000
_errors: list[BaseException] = []


def push(gpu: GPU) -> None:
    _active.append(gpu)


def pop(gpu: GPU) -> None:
    assert _active[-1] is gpu
    _active.pop()


def active() -> GPU:
    if not _active:
        raise HostError("a kernel compiled for the emulator was called outside `with ptxsim.gpu(...)`")
    return _active[-1]


def is_active() -> bool:
    return bool(_active)


def take_error() -> BaseException | None:
    """The first error raised under a runtime call since the last time."""
    if not _errors:
        return None
    error = _errors[0]
    _errors.clear()
    return error


def remember_ptx(cubin: bytes, ptx: str) -> None:
    """Keep the PTX of a cubin, in memory and on disk (compiled host code may be loaded in another process)."""
    key = hashlib.sha256(cubin).hexdigest()
    _ptx_of[key] = ptx
    path = cache_directory() / "ptx" / f"{key}.ptx"
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(ptx)
        except OSError:
            pass


def _find_ptx(cubin: bytes) -> str:
    key = hashlib.sha256(cubin).hexdigest()
    if key not in _ptx_of:
        path: Path = cache_directory() / "ptx" / f"{key}.ptx"
        if not path.exists():
            raise HostError("no PTX is known for this kernel: compile it inside `with ptxsim.gpu(...)`")
        _ptx_of[key] = path.read_text()
    return _ptx_of[key]


def _elf_image(blob: bytes) -> bytes:
    """The ELF file inside a fatbin; its length follows from the ELF header."""
    start = blob.find(b"\x7fELF")
    if start < 0:
        raise HostError("the fatbin holds no uncompressed cubin")
    header = blob[start : start + 64]
    program_offset, section_offset = struct.unpack_from("<QQ", header, 32)
    program_size, programs, section_size, sections = struct.unpack_from("<HHHH", header, 54)
    end = max(program_offset + program_size * programs, section_offset + section_size * sections)
    return blob[start : start + end]


def _read(address: int, size: int) -> bytes:
    return ctypes.string_at(address & _M64, size)


def _write(address: int, data: bytes) -> None:
    ctypes.memmove(address & _M64, data, len(data))


def _handle() -> int:
    global _next_handle
    _next_handle += 16
    return _next_handle


def _load_library(out: int, code: int) -> int:
    magic, _, header, payload = struct.unpack("<IHHQ", _read(code, 16))
    if magic != _FATBIN_MAGIC:
        raise HostError(f"not a fatbin: {_read(code, 16).hex()}")
    handle = _handle()
    _libraries[handle] = _find_ptx(_elf_image(_read(code, header + payload)))
    _write(out, struct.pack("<Q", handle))
    return 0


def _get_kernel(out: int, library: int, name: int) -> int:
    handle = _handle()
    _kernels[handle] = (_libraries[library & _M64], ctypes.string_at(name & _M64).decode())
    _write(out, struct.pack("<Q", handle))
    return 0


def _launch(config_address: int, kernel: int, params: int) -> int:
    fields = struct.unpack_from("<6IQQQI", _read(config_address, 56))
    config = LaunchConfig(fields[0:3], fields[3:6], (1, 1, 1), fields[6])
    for i in range(fields[9]):
        attribute = _read(fields[8] + 72 * i, 72)
        if struct.unpack_from("<I", attribute)[0] == _CLUSTER_ATTRIBUTE:
            x, y, z = struct.unpack_from("<3I", attribute, 8)
            if x and y and z:
                config.cluster = (x, y, z)
    ptx, name = _kernels[kernel & _M64]
    active().launch_from_host(ptx, name, config, params & _M64)
    return 0


def _encode(a: list[int]) -> int:
    rank = a[2] & 0xFFFFFFFF

    def array(address: int, code: str, n: int) -> list[int]:
        size = struct.calcsize(code)
        return list(struct.unpack(f"<{n}{code}", _read(address, size * n)))

    low = [x & 0xFFFFFFFF for x in (a[1], *a[8:12])]
    data = encode_tiled(
        low[0],
        a[3] & _M64,
        array(a[4], "Q", rank),
        array(a[5], "Q", rank - 1),
        array(a[6], "I", rank),
        array(a[7], "I", rank),
        *low[1:],
    )
    _write(a[0], data)
    return 0


_DEVICE_ATTRIBUTES = {97: 232448, 75: 10, 76: 0, 81: 233472}
"""cudaDevAttr numbers: shared memory per block (opt-in), compute capability, shared memory per SM."""
_NOTHING_TO_DO = {
    "_cudaFuncSetAttribute", "_cudaKernelSetAttributeForDevice", "_cudaSetDevice", "_cudaDeviceSynchronize",
    "_cudaStreamSynchronize", "_cudaLibraryUnload", "_cuLibraryUnload", "cuda_dialect_unload_library_once",
    "_cudaProfilerStart", "_cudaProfilerStop", "cuda_dialect_assert_success", "cuda_dialect_print_on_error",
}  # fmt: skip


def _call(name: str, a: list[int]) -> int:
    if name in ("_cudaLibraryLoadData", "_cuLibraryLoadData"):
        return _load_library(a[0], a[1])
    if name in ("_cudaLibraryGetKernel", "_cuLibraryGetKernel"):
        return _get_kernel(a[0], a[1], a[2])
    if name == "_cudaLaunchKernelEx":
        return _launch(a[0], a[1], a[2])
    if name == "_cuTensorMapEncodeTiled":
        return _encode(a)
    if name in ("_cudaGetDevice", "_cuDeviceGet", "_cuKernelGetAttribute"):
        _write(a[0], struct.pack("<i", 0))
        return 0
    if name == "_cudaGetDeviceCount":
        _write(a[0], struct.pack("<i", 1))
        return 0
    if name == "_cudaDeviceGetAttribute":
        attribute = a[1] & 0xFFFFFFFF
        gpu = active()
        values = {**_DEVICE_ATTRIBUTES, 16: gpu.machine.sms, 75: gpu.capability[0], 76: gpu.capability[1]}
        _write(a[0], struct.pack("<i", values.get(attribute, 0)))
        return 0
    if name in ("_cudaMemset", "_cudaMemsetAsync"):
        ctypes.memset(a[0] & _M64, a[1] & 255, a[2])
        return 0
    if name in ("_cudaMemcpy", "_cudaMemcpyAsync"):
        ctypes.memmove(a[0] & _M64, a[1] & _M64, a[2])
        return 0
    if name in _NOTHING_TO_DO:
        return 0
    raise HostError(f"runtime call {name} is not provided by the emulator")


def _callback(index: int, args: Any) -> int:
    try:
        return _call(shim.NAMES[index], [args[i] for i in range(12)])
    except BaseException as e:  # must not cross the C frames; re-raised by the caller's hook
        _errors.append(e)
        if not _active:
            print(f"ptxsim: {e}", file=sys.stderr)
        return _ERROR


def library_path() -> Path:
    """The loaded stand-in library."""
    return shim.load(_callback)[0]

"""A C library with the entry points that compiled CuTe-DSL host code calls; each forwards to one Python callback."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from ..errors import HostError
from ..program import cache_directory

NAMES = [
    "_cuDeviceGet",
    "_cuKernelGetAttribute",
    "_cuLibraryGetGlobal",
    "_cuLibraryGetKernel",
    "_cuLibraryGetKernelCount",
    "_cuLibraryGetManaged",
    "_cuLibraryGetModule",
    "_cuLibraryGetUnifiedFunction",
    "_cuLibraryLoadData",
    "_cuLibraryLoadFromFile",
    "_cuLibraryUnload",
    "_cuTensorMapEncodeTiled",
    "_cudaDeviceGetAttribute",
    "_cudaDeviceSynchronize",
    "_cudaEventCreate",
    "_cudaEventDestroy",
    "_cudaEventElapsedTime",
    "_cudaEventRecord",
    "_cudaFree",
    "_cudaFreeAsync",
    "_cudaFreeHost",
    "_cudaFuncSetAttribute",
    "_cudaGetDevice",
    "_cudaGetDeviceCount",
    "_cudaGetDeviceProperties",
    "_cudaGraphDestroy",
    "_cudaGraphExecDestroy",
    "_cudaGraphInstantiate",
    "_cudaGraphLaunch",
    "_cudaKernelSetAttributeForDevice",
    "_cudaLaunchKernel",
    "_cudaLaunchKernelEx",
    "_cudaLibraryGetGlobal",
    "_cudaLibraryGetKernel",
    "_cudaLibraryGetKernelCount",
    "_cudaLibraryGetManaged",
    "_cudaLibraryGetUnifiedFunction",
    "_cudaLibraryLoadData",
    "_cudaLibraryLoadFromFile",
    "_cudaLibraryUnload",
    "_cudaMalloc",
    "_cudaMallocAsync",
    "_cudaMallocHost",
    "_cudaMallocManaged",
    "_cudaMemcpy",
    "_cudaMemcpyAsync",
    "_cudaMemset",
    "_cudaMemsetAsync",
    "_cudaOccupancyMaxActiveBlocksPerMultiprocessor",
    "_cudaProfilerStart",
    "_cudaProfilerStop",
    "_cudaSetDevice",
    "_cudaStreamAddCallback",
    "_cudaStreamBeginCapture",
    "_cudaStreamCreate",
    "_cudaStreamDestroy",
    "_cudaStreamEndCapture",
    "_cudaStreamSynchronize",
    "_cudaStreamWaitEvent",
    "cuda_dialect_assert_success",
    "cuda_dialect_print_on_error",
    "cuda_dialect_unload_library_once",
]

_HEAD = r"""
#include <stdint.h>
#include <stdio.h>
typedef long (*callback_t)(int index, long *args);
static callback_t callback;
void ptxsim_set_callback(callback_t f) { callback = f; }
/* every entry point takes integers and pointers only: one twelve-word signature serves all of them */
#define ENTRY(INDEX, NAME) \
  long NAME(long a0, long a1, long a2, long a3, long a4, long a5, long a6, long a7, long a8, long a9, long a10, \
            long a11) { \
    long args[12] = {a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11}; \
    return callback ? callback(INDEX, args) : 999; \
  }
const char *cuda_dialect_get_error_name(int e) {
  static char text[32];
  snprintf(text, sizeof text, "ptxsim error %d", e);
  return text;
}
typedef int (*init_t)(void *);
typedef int (*load_t)(void *, int);
int cuda_dialect_init_library_once(void **library, init_t init, load_t load, void *raise) {
  void *made = 0;
  int e;
  (void)raise;
  if (*library) return 0;
  e = init(&made);
  if (e) return e;
  if (load) {
    e = load(&made, 0);
    if (e) return e;
  }
  *library = made;
  return 0;
}
"""

Callback = Callable[[int, "ctypes.Array[ctypes.c_long]"], int]
_PROTOTYPE = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_int, ctypes.POINTER(ctypes.c_long))


def _compiler() -> str:
    if os.environ.get("CC"):
        return os.environ["CC"]
    for name in ("cc", "gcc", "clang"):
        found = shutil.which(name)
        if found:
            return found
    raise HostError(
        "ptxsim needs a C compiler once, to build its stand-in for the CUDA runtime: install gcc or clang, or set CC"
    )


def build() -> Path:
    """Path of the shared library, built on first use in the cache directory."""
    source = _HEAD + "\n".join(f"ENTRY({i}, {name})" for i, name in enumerate(NAMES)) + "\n"
    key = hashlib.sha256((source + platform.machine()).encode()).hexdigest()[:16]
    library = cache_directory() / f"libptxsim_{key}.so"
    if library.exists():
        return library
    compiler = _compiler()
    library.parent.mkdir(parents=True, exist_ok=True)
    c_file = library.with_suffix(f".{os.getpid()}.c")
    c_file.write_text(source)
    temporary = library.with_suffix(f".{os.getpid()}.so")
    command = [compiler, "-O1", "-fPIC", "-shared", "-o", str(temporary), str(c_file)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    c_file.unlink()
    if result.returncode:
        raise HostError(f"building the runtime stand-in failed: {' '.join(command)}\n{result.stderr}")
    temporary.replace(library)
    return library


@lru_cache(maxsize=1)
def load(callback: Callback) -> tuple[Path, ctypes.CDLL, object]:
    """Load the library and register the callback; once per process."""
    path = build()
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    pointer = _PROTOTYPE(callback)
    library.ptxsim_set_callback(pointer)
    return path, library, pointer

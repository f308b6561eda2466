"""Compiled kernels: compiled at first use, kept in memory and on disk.

A kernel is described by a frozen dataclass that holds all it was specialised on, never a size. On disk a compiled kernel
is an object file named by a hash of that description, under a folder named by the DSL's version, the target and a hash of
the kernel sources; so an edit, an upgrade or another GPU never meets a stale one. Files appear by an atomic rename: any
number of processes may compile the same kernel at once.
"""

import functools
import hashlib
import importlib.metadata
import logging
import os
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import cutlass.cute as cute
import mx_core
from cutlass.cute.runtime import load_module

from mx_kernels import arch
from mx_kernels.paths import cache_dir, write_whole

_LOG = logging.getLogger(__name__)
_SYMBOL = "mx_kernel"
_PACKAGE = Path(__file__).parent
_SOURCES = ("jit.py", "device/*.py", "generic/*.py", "sm90/*.py", "sm100/*.py")

#: A compiled kernel: takes pointers and sizes as plain integers, the stream last.
Launch = Callable[..., Any]


def compiled(key: Hashable, target: str, build: Callable[[], tuple[Any, ...]]) -> Launch:
    """The launch function of a kernel, compiled if neither this process nor the disk has it.

    Args:
        key: frozen dataclass (or a tuple of such) whose repr tells the kernel from every other one.
        target: "sm_90a", "sm_100a" or "sm_103a".
        build: returns what goes to `cute.compile`: the jit function and its arguments, fake ones for all tensors,
            pointers and the stream.
    """
    return _compiled(key, target, arch.active_emulation() is not None, build)


_loaded: dict[tuple, Launch] = {}


def _compiled(key: Hashable, target: str, emulated: bool, build: Callable[[], tuple[Any, ...]]) -> Launch:
    found = _loaded.get((key, target, emulated))
    if found is None:
        # The emulator runs PTX, which an object file does not hold.
        path = None if emulated else disk_path("kernels", key, target, ".o")
        found = (_read(path) if path else None) or _compile(key, target, build, path)
        _loaded[key, target, emulated] = found
    return found


def _compile(key: Hashable, target: str, build: Callable[[], tuple[Any, ...]], path: Path | None) -> Launch:
    _LOG.info("compiling for %s: %r", target, key)
    launch = cute.compile(*build(), options=f"--gpu-arch {target} --enable-tvm-ffi")
    # Read back, the function is called without the compiler's wrapper, as in every later process.
    return (_write(launch, path) and _read(path)) or launch if path else launch


def disk_path(kind: str, key: Hashable, target: str, suffix: str) -> Path | None:
    """Where what is kept of a kernel lies on disk, until the DSL or a kernel source changes; None if `$MX_DISK_CACHE` is 0.

    Args:
        kind: "kernels", or what else is kept: a folder of its own.
        key: a value whose repr tells it from every other one.
        target: "sm_90a", "sm_100a" or "sm_103a".
        suffix: of the file's name.
    """
    if os.environ.get("MX_DISK_CACHE") == "0":
        return None
    name = hashlib.sha256(f"{type(key).__module__}.{key!r}".encode()).hexdigest()[:32]
    return cache_dir(kind) / f"{_dsl_version()}-{target}-{_source_hash()}" / f"{name}{suffix}"


@functools.cache
def _dsl_version() -> str:
    return importlib.metadata.version("nvidia-cutlass-dsl")


@functools.cache
def _source_hash() -> str:
    files = [path for pattern in _SOURCES for path in sorted(_PACKAGE.glob(pattern))]
    files += sorted(Path(mx_core.__file__).parent.glob("*.py"))  # the scale rules come from there
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _read(path: Path) -> Launch | None:
    if not path.exists():
        return None
    try:
        return getattr(load_module(str(path), enable_tvm_ffi=True), _SYMBOL)
    except Exception as error:  # a file cut short by a full disk: compile again and replace it
        _LOG.warning("%s cannot be loaded (%s); compiling again", path, error)
        return None


def _write(launch: Any, path: Path) -> bool:
    try:
        write_whole(path, lambda part: launch.export_to_c(object_file_path=str(part), function_name=_SYMBOL))
        return True
    except OSError as error:
        _LOG.warning(
            "%s cannot be written (%s); this kernel is compiled again in the next process", path, error
        )
        return False

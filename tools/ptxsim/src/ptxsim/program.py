"""A translated kernel, ready to run, and its caches in memory and on disk."""

from __future__ import annotations

import hashlib
import marshal
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np

from . import __version__
from .core.machine import lane_special
from .core.namespace import NAMES
from .core.values import UNDEF, UNDEF_PREDICATE
from .errors import Fault
from .parser import WIDTH, Module, parse_body, parse_module
from .translate import TRANSLATOR_VERSION, Translation, Translator

RESERVED_SHARED = 1024
"""The hardware keeps the first KB of shared memory for itself."""


def cache_directory() -> Path:
    """$PTXSIM_CACHE, else $XDG_CACHE_HOME/ptxsim, else ~/.cache/ptxsim."""
    base = os.environ.get("PTXSIM_CACHE")
    if base:
        return Path(base)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ptxsim"


class Program:
    """Block functions and layout of one kernel; independent of launches."""

    def __init__(self, module: Module, name: str, translation: Translation, code: Any):
        kernel = module.kernels[name]
        self.kernel, self.kernel_name, self.translation = kernel, name, translation
        self.module = module
        self.required_cluster = kernel.required_cluster()
        self.dynamic_shared = translation.dynamic_shared
        self.globals: dict[str, np.ndarray] = {}
        namespace = dict(NAMES)
        for variable in module.variables:
            if variable.space != "shared":
                namespace[f"G_{variable.name.replace('$', '_S')}"] = self._allocate(variable)
        exec(code, namespace)
        self.full = [namespace[f"b{i}f"] for i in range(translation.blocks)]
        self.partial = [namespace[f"b{i}p"] for i in range(translation.blocks)]
        self.special_lane = lane_special()
        self._initial = [UNDEF_PREDICATE if p else UNDEF for p in translation.registers]

    def initial_registers(self) -> list:
        return list(self._initial)

    def describe_line(self, line: int) -> str:
        return self.translation.sites.get(line, f"instruction {line}")

    def _allocate(self, variable: Any) -> int:
        """Memory of a module variable; returns its address."""
        raw = np.zeros(variable.size + variable.align + 8, np.uint8)
        start = -raw.ctypes.data % max(variable.align, 1)
        self.globals[variable.name] = raw
        view = raw[start : start + variable.size]
        if variable.init:
            unit = WIDTH[variable.type] // 8
            values = [v.strip() for v in variable.init.strip().strip("{}").split(",") if v.strip()]
            try:
                numbers = [int(v, 0) & ((1 << 8 * unit) - 1) for v in values]
            except ValueError as e:
                raise Fault(f"initialiser of {variable.name}: {e}") from e
            view[: len(numbers) * unit].view(f"<u{unit}")[:] = numbers
        return view.ctypes.data


def _layout(module: Module, name: str) -> tuple[dict[str, str], int, int, int]:
    """Symbol expressions, end of static shared memory, start of dynamic shared memory, local bytes."""
    kernel = module.kernels[name]
    parse_body(kernel, module.files)
    symbols: dict[str, str] = {}
    offset = RESERVED_SHARED
    shared = [v for v in module.variables if v.space == "shared"]
    for array in [*kernel.shared, *(v for v in shared if v.size)]:
        offset = -(-offset // array.align) * array.align
        symbols[array.name] = f"(W.shared_base+{offset})"
        offset += array.size
    dynamic = offset
    for array in (v for v in shared if not v.size):
        dynamic = -(-offset // array.align) * array.align
        symbols[array.name] = f"(W.shared_base+{dynamic})"
    local = 0
    for array in kernel.local:
        local = -(-local // array.align) * array.align
        symbols[array.name] = str(local)
        local += array.size
    for param in kernel.params:
        symbols[param.name] = f"(W.param_base+{param.offset})"
    for variable in module.variables:
        if variable.space != "shared":
            symbols[variable.name] = f"G_{variable.name.replace('$', '_S')}"
    return symbols, offset, dynamic, local


def _translate(module: Module, name: str) -> Translation:
    symbols, static, dynamic, local = _layout(module, name)
    translation = Translator(module, module.kernels[name], symbols).translate()
    translation.static_shared, translation.dynamic_shared, translation.local_bytes = static, dynamic, local
    return translation


_programs: dict[tuple[str, str], Program] = {}
_MEMORY_LIMIT = 512


def _source_stamp() -> str:
    """Changes when any source of the translator does."""
    h = hashlib.sha256()
    root = Path(__file__).parent
    for path in sorted([*root.glob("*.py"), *(root / "isa").glob("*.py")]):
        h.update(path.read_bytes())
    return h.hexdigest()


_stamp: list[str] = []


def load_program(text: str, name: str) -> Program:
    """The program for a kernel of a PTX file: from memory, from disk, or translated now."""
    if not _stamp:
        _stamp.append(f"{__version__}/{TRANSLATOR_VERSION}/{sys.version}/{_source_stamp()}")
    key = hashlib.sha256(f"{_stamp[0]}\0{name}\0{text}".encode()).hexdigest()
    found = _programs.get((key, name))
    if found is not None:
        return found
    module = parse_module(text)
    if name not in module.kernels:
        raise Fault(f"no kernel {name} in the PTX; there are {list(module.kernels)}")
    path = cache_directory() / "kernels" / f"{key}.bin"
    cached = _read(path)
    if cached is None:
        translation = _translate(module, name)
        code = compile(translation.source, f"<ptx {name[:60]}>", "exec")
        _write(path, translation, code)
    else:
        translation, code = cached
    if len(_programs) >= _MEMORY_LIMIT:
        _programs.pop(next(iter(_programs)))
    program = _programs[key, name] = Program(module, name, translation, code)
    return program


def _read(path: Path) -> tuple[Translation, Any] | None:
    try:
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        return pickle.loads(data[8 : 8 + size]), marshal.loads(data[8 + size :])
    except (OSError, EOFError, ValueError, TypeError, pickle.UnpicklingError, AttributeError):
        return None


def _write(path: Path, translation: Translation, code: Any) -> None:
    """Best effort: an unwritable cache only costs time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        body = pickle.dumps(translation)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(len(body).to_bytes(8, "little") + body + marshal.dumps(code))
        temporary.replace(path)
    except OSError:
        pass

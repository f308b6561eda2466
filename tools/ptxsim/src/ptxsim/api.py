"""The emulated GPU as users see it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from .core.hostmem import GlobalMemory
from .core.machine import LaunchConfig, LaunchRecord, Machine
from .errors import HostError
from .host import buffers, dsl, integrations, runtime
from .program import Program, load_program

ARCHITECTURES = {"sm_90a": (9, 0), "sm_100a": (10, 0), "sm_100f": (10, 0), "sm_103a": (10, 3)}


class GPU:
    """An emulated GPU. Enter it (`with gpu("sm_100a") as g`) to run compiled DSL functions on CPU tensors.

    `g.launches` lists what ran; `g.machine` is the scheduler behind it.
    """

    def __init__(self, arch: str, machine: Machine):
        if arch not in ARCHITECTURES:
            raise ValueError(f"arch: expected one of {sorted(ARCHITECTURES)}, got {arch!r}")
        self.arch, self.machine = arch, machine
        self.capability = ARCHITECTURES[arch]
        self._calls: list[tuple[buffers.Buffers, bool]] = []
        self._registered: buffers.Buffers = {}
        self._stack: ExitStack | None = None
        self.on_launch: Callable[[str, str, LaunchConfig, bytes], None] | None = None
        """Called with PTX, kernel name, configuration and parameter bytes before each launch from host code."""

    @property
    def launches(self) -> list[LaunchRecord]:
        return self.machine.launches

    def register(self, *tensors: Any) -> None:
        """Buffers that kernels reach through pointers stored in other tensors."""
        buffers.collect(tensors, self._registered, "registered buffer")

    def __enter__(self) -> GPU:
        if self._stack is not None:
            raise HostError("this GPU is already entered")
        with ExitStack() as stack:
            if dsl.installed():
                stack.enter_context(dsl.hooked(self))
            stack.enter_context(integrations.mx_kernels(self.arch, self.machine.sms))
            runtime.push(self)
            stack.callback(runtime.pop, self)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: Any) -> None:
        assert self._stack is not None
        stack, self._stack = self._stack, None
        stack.close()

    @contextmanager
    def call(self, args: Iterable[Any]) -> Iterator[None]:
        """Tensors passed to the compiled function that is being called, and tensors whose address was passed."""
        found: buffers.Buffers = {}
        complete = buffers.collect(args, found)
        self._calls.append((found, complete))
        try:
            yield
        finally:
            self._calls.pop()

    def launch_from_host(self, ptx: str, name: str, config: LaunchConfig, params: int) -> None:
        """CudaLaunchKernelEx of compiled host code: `params` points at an array of pointers to the arguments."""
        program = load_program(ptx, name)
        pointers = (ctypes.c_void_p * len(program.kernel.params)).from_address(params)
        data = bytearray(program.kernel.param_bytes)
        for p, pointer in zip(program.kernel.params, pointers, strict=True):
            data[p.offset : p.offset + p.size] = ctypes.string_at(pointer, p.size)
        if self.on_launch:
            self.on_launch(ptx, name, config, bytes(data))
        known = {k: v for call, _ in self._calls for k, v in call.items()}
        self.launch(program, config, bytes(data), known)

    def launch(
        self, program: Program, config: LaunchConfig, params: bytes, known: buffers.Buffers
    ) -> LaunchRecord:
        raw = np.zeros(len(params) + 256, np.uint8)
        start = -raw.ctypes.data % 128
        raw[start : start + len(params)] = np.frombuffer(params, np.uint8)
        address = int(raw.ctypes.data + start)
        known = {**known, **self._registered}
        found: buffers.Buffers | None = known
        # A tensor map may be based outside its tensor, so parameters are looked at only if the call does not tell all.
        if not (known and all(complete for _, complete in self._calls)):
            parts = [params[p.offset : p.offset + p.size] for p in program.kernel.params]
            found = buffers.resolve_pointers(parts, known)
        if found is not None:
            found = dict(found)
            found["kernel parameters"] = (address, address + len(params) + 128)
            for name, array in program.globals.items():
                found[f"module variable {name}"] = (array.ctypes.data, array.ctypes.data + array.nbytes)
        return self.machine.launch(program, config, address, params, GlobalMemory(found))


def gpu(
    arch: str = "sm_100a",
    *,
    sms: int = 148,
    schedule: str = "early",
    seed: int = 0,
    checks: bool = True,
    uninitialized: bool = True,
    trace: Any = None,
    max_instructions: int | None = None,
    tmem_fences: bool = False,
    global_races: bool = False,
) -> GPU:
    """An emulated GPU to enter.

    arch: "sm_90a", "sm_100a", …
    sms: multiprocessors; bounds how many CTAs are resident.
    schedule: when asynchronous work takes effect: "early", "late", "random", "tma_late" or "mma_late".
    seed: of the "random" schedule, which also interleaves warps at random.
    checks: race detection, proxy fences, barrier initialisation.
    uninitialized: report reads of shared memory and TMEM that nobody wrote.
    trace: a `ptxsim.trace.Trace` to fill.
    max_instructions: give up after that many warp instructions.
    tmem_fences: every synchronisation that orders accesses to tensor memory must have its tcgen05.fence. Without it a release
        and an acquire do, as the PTX ISA has it and CUTLASS relies on; relaxed ones need the fences in either case.
    global_races: report accesses of different clusters to the same global memory that nothing orders (slower).
    """
    return GPU(
        arch,
        Machine(
            sms, schedule, seed, checks, uninitialized, trace, max_instructions, tmem_fences, global_races
        ),
    )


def _pack(param_size: int, value: Any, known: buffers.Buffers, i: int) -> bytes:
    span = buffers.extent(value)
    if span is not None:
        known[f"argument {i}"] = span
        data_pointer = value.data_ptr() if hasattr(value, "data_ptr") else value.ctypes.data
        return int(data_pointer).to_bytes(8, "little")
    if isinstance(value, (bytes, bytearray)):
        data = bytes(value)
    elif isinstance(value, float):
        data = np.array(value, np.float32 if param_size == 4 else np.float64).tobytes()
    else:
        data = (int(value) & ((1 << 8 * param_size) - 1)).to_bytes(param_size, "little")
    if len(data) != param_size:
        raise ValueError(f"argument {i}: expected {param_size} bytes, got {len(data)}")
    return data


def run_ptx(
    ptx: str,
    kernel: str | None = None,
    *,
    grid: int | Sequence[int] = 1,
    block: int | Sequence[int] = 32,
    cluster: int | Sequence[int] = 1,
    smem: int = 0,
    args: Sequence[Any] = (),
    on: GPU | None = None,
    arch: str | None = None,
    **options: Any,
) -> LaunchRecord:
    """Run a kernel of a PTX text.

    kernel: its name; may be left out if there is one only.
    grid, block, cluster: up to three sizes.
    smem: dynamic shared memory in bytes.
    args: one per parameter: numpy array or CPU tensor (its address), int, float, or bytes of the parameter's size
        (for example a tensor map).
    on: run on this GPU; otherwise a new one with `options` of `gpu()`.
    """
    from .parser import parse_module

    if kernel is None or arch is None:
        module = parse_module(ptx)
        names = list(module.kernels)
        arch = arch or (module.target if module.target in ARCHITECTURES else "sm_100a")
        if kernel is None:
            if len(names) != 1:
                raise ValueError(f"kernel: expected one of {names}")
            kernel = names[0]
    program = load_program(ptx, kernel)
    target = on or gpu(arch, **options)
    params = program.kernel.params
    if len(args) != len(params):
        raise ValueError(f"args: expected {len(params)} for {[p.name for p in params]}, got {len(args)}")
    known: buffers.Buffers = {}
    data = bytearray(program.kernel.param_bytes)
    for i, (p, value) in enumerate(zip(params, args, strict=True)):
        data[p.offset : p.offset + p.size] = _pack(p.size, value, known, i)
    config = LaunchConfig(_triple(grid), _triple(block), _triple(cluster), smem)
    return target.launch(program, config, bytes(data), known)


def _triple(x: int | Sequence[int]) -> tuple[int, int, int]:
    sizes = [x] if isinstance(x, int) else list(x)
    a, b, c = (*sizes, 1, 1)[:3]
    return a, b, c

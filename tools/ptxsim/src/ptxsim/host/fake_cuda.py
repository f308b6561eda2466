"""For scripts that think they have a GPU: torch's "cuda" device becomes CPU memory.

Used by `python -m ptxsim run`; a test suite should pass CPU tensors instead.
"""

from __future__ import annotations

import ctypes
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from ..api import GPU

_ALIGNMENT = 256
"""What cudaMalloc gives; torch's CPU allocator gives 64."""


def _aligned(t: Any, always: bool = False) -> Any:
    """The same tensor in memory aligned as a device allocation would be."""
    import torch

    if not always and t.data_ptr() % _ALIGNMENT == 0:
        return t
    if t.layout != torch.strided or t.numel() == 0:
        return t.clone()
    with torch._C.DisableTorchFunction():
        last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        span = (last + 1) * t.element_size()
        raw = torch.zeros(span + _ALIGNMENT, dtype=torch.uint8)
        start = -raw.data_ptr() % _ALIGNMENT
        ctypes.memmove(raw.data_ptr() + start, t.data_ptr(), span)
        return raw[start : start + span].view(t.dtype).as_strided(t.shape, t.stride())


def _on_cpu(v: Any) -> Any:
    import torch

    if isinstance(v, str) and v.startswith("cuda"):
        return "cpu"
    if isinstance(v, torch.device) and v.type == "cuda":
        return torch.device("cpu")
    return v


def _device_mode() -> Any:
    import torch.overrides

    class CudaIsCpu(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = getattr(func, "__name__", "")
            if name == "cuda":
                return _aligned(args[0], always=True)
            if name == "pin_memory":
                return args[0]
            given = dict(kwargs or {})
            moved_kwargs = {k: _on_cpu(v) for k, v in given.items()}
            moved_args = tuple(_on_cpu(a) for a in args)
            result = func(*moved_args, **moved_kwargs)
            moved = any(a is not b for a, b in zip(args, moved_args, strict=True)) or any(
                given[k] is not moved_kwargs[k] for k in given
            )
            return _aligned(result) if moved and isinstance(result, torch.Tensor) else result

    return CudaIsCpu()


class _Stream:
    cuda_stream = 0

    def synchronize(self) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exc: Any) -> None: ...


class _Event:
    def __init__(self, *args: Any, **kwargs: Any): ...

    def record(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Any) -> float:
        return 1.0


def _answers(gpu: GPU) -> dict[str, Any]:
    nothing = lambda *a, **k: None  # noqa: E731
    properties = types.SimpleNamespace(
        multi_processor_count=gpu.machine.sms,
        name="ptxsim",
        major=gpu.capability[0],
        minor=gpu.capability[1],
        L2_cache_size=126 << 20,
        total_memory=1 << 34,
    )
    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "current_stream": lambda *a, **k: _Stream(),
        "default_stream": lambda *a, **k: _Stream(),
        "Stream": lambda *a, **k: _Stream(),
        "Event": _Event,
        "get_device_capability": lambda *a, **k: gpu.capability,
        "get_device_name": lambda *a, **k: "ptxsim",
        "get_device_properties": lambda *a, **k: properties,
        **dict.fromkeys(
            (
                "synchronize",
                "empty_cache",
                "init",
                "set_device",
                "_lazy_init",
                "manual_seed",
                "manual_seed_all",
            ),
            nothing,
        ),
    }


@contextmanager
def pretending(gpu: GPU) -> Iterator[None]:
    """torch.cuda answers for the emulated GPU; device="cuda" gives CPU tensors."""
    import torch

    with ExitStack() as stack:
        for name, answer in _answers(gpu).items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        try:
            from cutlass import testing

            stack.enter_context(mock.patch.object(testing, "benchmark", return_value=1.0))
        except (ImportError, AttributeError):
            pass
        stack.enter_context(_device_mode())
        yield

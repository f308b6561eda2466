"""Which memory a launch may touch: the tensors of the call, and what its pointer parameters lead to."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..core.hostmem import MAPPINGS

Buffers = dict[str, tuple[int, int]]


def extent(x: Any) -> tuple[int, int] | None:
    """[start, end) of a strided CPU torch tensor or numpy array, or None."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        if x.layout != torch.strided or x.numel() == 0 or x.device.type != "cpu":
            return None
        last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
        if isinstance(x, torch._subclasses.FakeTensor) or torch._is_functional_tensor(x):
            return None  # torch.compile's stand-ins have no memory
        try:
            start = x.data_ptr()
        except RuntimeError:
            return None  # nor have those of its wrappers that say so only when they are asked
        return start, start + (last + 1) * x.element_size()
    interface = getattr(x, "__array_interface__", None)
    if isinstance(interface, Mapping) and hasattr(x, "nbytes") and x.size:
        import numpy as np

        low, high = np.lib.array_utils.byte_bounds(x)
        return int(low), int(high)
    return None


def collect(args: Iterable[Any], into: Buffers, label: str = "argument") -> bool:
    """Tensors anywhere in a call's arguments, and live tensors whose addresses are among them.

    False if an argument may lead to memory of unknown extent (a raw pointer).
    """
    complete = True
    for i, x in enumerate(args):
        name = f"{label} {i}"
        source = getattr(x, "_ptxsim_source", x)
        span = extent(source)
        if span is not None:
            into[f"{name} {tuple(source.shape)}"] = span
        elif isinstance(x, (list, tuple)):
            complete &= collect(x, into, name)
        elif isinstance(x, Mapping):
            complete &= collect(x.values(), into, name)
        elif hasattr(x, "__dataclass_fields__"):
            complete &= collect([getattr(x, f) for f in x.__dataclass_fields__], into, name)
        elif type(x) is int and _FIRST_ADDRESS <= x < 1 << 47 and _mapped(x):
            complete &= _resolve({x}, into)
        elif hasattr(x, "memspace") or hasattr(x, "_dlpack_data"):  # a CuTe pointer, a tensor made elsewhere
            complete = False
    return complete


_FIRST_ADDRESS = 1 << 20


def _pointer_words(data: bytes) -> set[int]:
    """8-byte words of one parameter that may be pointers; of a tensor map only its address counts (its tail is garbage)."""
    if len(data) == 128:
        data = data[:8]
    return {int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data) - 7, 8)}


def resolve_pointers(params: Iterable[bytes], known: Buffers) -> Buffers | None:
    """Add the live tensors that pointer-like words of the parameters lead to; None if some lead to unknown memory."""
    words: set[int] = set().union(*map(_pointer_words, params))
    found = dict(known)
    return found if _resolve({w for w in words if w >= _FIRST_ADDRESS and _mapped(w)}, found) else None


def _resolve(addresses: set[int], into: Buffers) -> bool:
    """Find the live tensors that hold these addresses; False if some are in none."""
    unknown = {a for a in addresses if not any(low <= a < high for low, high in into.values())}
    if not unknown:
        return True
    for tensor in _live_tensors():
        span = extent(tensor)
        hit = {a for a in unknown if span[0] <= a < span[1]} if span else None
        if hit:
            storage = tensor.untyped_storage()
            start = storage.data_ptr()
            into[f"tensor at {start:#x}"] = (start, start + storage.nbytes())
            unknown -= hit
            if not unknown:
                return True
    return False


def _mapped(address: int) -> bool:
    return MAPPINGS.contains(address, address + 1)


def _live_tensors() -> Iterator[Any]:
    """All tensors that Python knows, the youngest first: a call's arguments are rarely old."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    kinds = {torch.Tensor, *torch.Tensor.__subclasses__()}
    for generation in range(3):
        for x in gc.get_objects(generation):
            if type(x) in kinds and x.layout == torch.strided:
                yield x

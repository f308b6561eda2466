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
        return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()
    interface = getattr(x, "__array_interface__", None)
    if isinstance(interface, Mapping) and hasattr(x, "nbytes") and x.size:
        import numpy as np

        low, high = np.lib.array_utils.byte_bounds(x)
        return int(low), int(high)
    return None


def collect(args: Iterable[Any], into: Buffers, label: str = "argument") -> None:
    """Tensors anywhere in a call's arguments."""
    for i, x in enumerate(args):
        name = f"{label} {i}"
        source = getattr(x, "_ptxsim_source", x)
        span = extent(source)
        if span is not None:
            into[f"{name} {tuple(source.shape)}"] = span
        elif isinstance(x, (list, tuple)):
            collect(x, into, name)
        elif isinstance(x, Mapping):
            collect(x.values(), into, name)
        elif hasattr(x, "__dataclass_fields__"):
            collect([getattr(x, f) for f in x.__dataclass_fields__], into, name)


def resolve_pointers(params: bytes, known: Buffers) -> Buffers | None:
    """Add the live tensors that pointer-like words of the parameters lead to; None if some lead to unknown memory."""
    words = {int.from_bytes(params[i : i + 8], "little") for i in range(0, len(params) - 7, 8)}
    unknown = {
        w
        for w in words
        if w >= 1 << 20 and not any(low <= w < high for low, high in known.values()) and _mapped(w)
    }
    if not unknown:
        return known
    found = dict(known)
    for tensor in _live_tensors():
        span = extent(tensor)
        if span is None:
            continue
        hit = {w for w in unknown if span[0] <= w < span[1]}
        if hit:
            storage = tensor.untyped_storage()
            start = storage.data_ptr()
            found[f"tensor at {start:#x}"] = (start, start + storage.nbytes())
            unknown -= hit
    return None if unknown else found


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

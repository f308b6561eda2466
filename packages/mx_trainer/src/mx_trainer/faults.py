"""Deliberate mistakes: the control of a comparison, which must see them."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

FAULTY = {"mxfp8_wrong_scales": "mxfp8"}
"""Precisions that are wrong on purpose, and the recipe that each spoils."""


class _WrongScales(TorchDispatchMode):
    """Every grouped GEMM gets scales that are off by two in a random half of the blocks of both its operands."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func is torch.ops.mx.grouped_gemm.default:
            _, a, a_scale, a_format, b, b_scale, *rest = args
            args = (args[0], a, _halved(a_scale), a_format, b, _halved(b_scale), *rest)
        return func(*args, **(kwargs or {}))


def _halved(scale: Tensor | None) -> Tensor | None:
    """E8M0 bytes, half of them one less; 0 (2^-127) and 255 (NaN) stay."""
    if scale is None:
        return None
    chosen = (torch.rand(scale.shape, device=scale.device) < 0.5) & (scale > 0) & (scale < 255)
    return scale - chosen.to(torch.uint8)


def fault_of(precision: str) -> AbstractContextManager:
    """What goes wrong in this precision while the context lasts: nothing, as a rule. torch.compile is off in a fault."""
    return _WrongScales() if precision in FAULTY else nullcontext()

"""Libraries that need to know they run on an emulated GPU."""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager, nullcontext


def mx_kernels(arch: str, sms: int) -> AbstractContextManager:
    """mx_kernels: CPU tensors count as memory of this GPU inside."""
    if importlib.util.find_spec("mx_kernels") is None:
        return nullcontext()
    try:
        from mx_kernels import arch as mx_arch
    except ImportError:
        return nullcontext()
    emulated = getattr(mx_arch, "emulated", None)
    return emulated(arch, sms) if emulated is not None else nullcontext()

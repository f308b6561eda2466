"""Run compiled CuTe-DSL kernels for Hopper and Blackwell on a CPU, with asynchrony as an adversary.

    with ptxsim.gpu("sm_100a", schedule="random", seed=3):
        compiled = cute.compile(fn, *tensors)
        compiled(*tensors)          # CPU tensors

`run_ptx` runs PTX text directly. See docs/ptxsim.md.
"""

from typing import Any

__version__ = "0.1.0"

from .errors import Deadlock, Fault, HostError, PtxsimError, Race, Uninitialized, Unsupported

__all__ = [
    "GPU",
    "Deadlock",
    "Fault",
    "HostError",
    "PtxsimError",
    "Race",
    "Uninitialized",
    "Unsupported",
    "gpu",
    "run_ptx",
]


def __getattr__(name: str) -> Any:
    """The emulator itself is loaded on first use."""
    if name not in ("GPU", "gpu", "run_ptx"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import api

    return getattr(api, name)

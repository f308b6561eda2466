"""Checks that ops make before anything is launched or written; prepared ops once for all calls alike (ops/library.py).

They guard against what would corrupt memory: rank, dtype, shape, strides, device. They look at no tensor's values, so
none waits for a device. Each tests first and words its error only then: a passing check costs a few hundred ns.
"""

import torch
from mx_core.checks import expected
from mx_core.groups import GROUP_ALIGNMENT
from torch import Tensor

from mx_kernels.problem import FLOAT_DTYPES

MULTIPLE = 32
"""D, H, and wherever a layer is concerned N and K, are multiples of this: whole MX blocks, 16-byte vectors."""


def check_tensor(
    name: str, x: Tensor, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """Refuse anything but a contiguous tensor of this shape (None: any size), one of these dtypes, on this device."""
    if not isinstance(x, Tensor):
        raise TypeError(expected(name, "a torch.Tensor", type(x).__name__))
    have = x.shape
    fits = have == shape or _fits(have, shape)
    if fits and x.dtype in dtypes and x.device == device and x.is_contiguous():
        return
    if x.dtype not in dtypes:
        raise TypeError(expected(name, " or ".join(map(str, dtypes)), x.dtype))
    if x.device != device:
        raise ValueError(expected(name, f"a tensor on {device}", x.device))
    if fits:
        raise ValueError(expected(name, "a contiguous tensor", f"shape {tuple(have)}, strides {x.stride()}"))
    words = ", ".join("any" if n is None else str(n) for n in shape)
    raise ValueError(expected(name, f"shape ({words})", f"shape {tuple(have)}"))


def _fits(have: tuple[int, ...], want: tuple[int | None, ...]) -> bool:
    if len(have) != len(want):
        return False
    for n, w in zip(have, want):  # noqa: B905, SIM110 - strict and a generator cost time on every call
        if w is not None and n != w:
            return False
    return True


def check_matrix(name: str, x: Tensor, multiple_of: int = MULTIPLE) -> None:
    """Refuse anything but a contiguous bf16 or fp32 matrix whose last size is a multiple of `multiple_of`."""
    check_tensor(name, x, (None, None), FLOAT_DTYPES, x.device)
    if x.shape[1] % multiple_of != 0:
        raise ValueError(
            expected(name, f"a last axis that is a multiple of {multiple_of}", f"shape {tuple(x.shape)}")
        )


def check_aligned(name: str, rows: int) -> None:
    """Refuse a row count that no ALIGNED tensor has."""
    if rows < 0 or rows % GROUP_ALIGNMENT != 0:
        raise ValueError(expected(name, f"a multiple of {GROUP_ALIGNMENT} (aligned) rows", f"{rows} rows"))


def check_offs(offs: Tensor, device: torch.device) -> None:
    """Refuse anything but int32 (E,) with E >= 1 on this device."""
    check_tensor("offs", offs, (None,), (torch.int32,), device)
    if offs.shape[0] == 0:
        raise ValueError(expected("offs", "at least one group", "shape (0,)"))

"""Checks of arguments: each raises TypeError or ValueError that says what was expected and what came.

One wording everywhere, `name: expected X, got Y`. Nothing here looks at a tensor's values, so nothing
synchronises with a device, and all of it can run under torch.compile.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from mx_core.formats import FORMATS, ElementFormat

_E = TypeVar("_E", bound=StrEnum)


class HasShape(Protocol):
    """A Tensor, an MXTensor."""

    @property
    def shape(self) -> torch.Size: ...


def expected(name: str, what: object, got: object) -> str:
    """The text of every error: `name: expected what, got got`."""
    return f"{name}: expected {what}, got {got}"


def check_tensor(name: str, x: object) -> Tensor:
    """TypeError unless `x` is a torch.Tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(expected(name, "a torch.Tensor", type(x).__name__))
    return x


def check_dtype(name: str, x: Tensor, *allowed: torch.dtype) -> None:
    """TypeError unless x.dtype is one of `allowed`."""
    check_tensor(name, x)
    if x.dtype not in allowed:
        raise TypeError(expected(name, " or ".join(map(str, allowed)), x.dtype))


def check_ndim(name: str, x: HasShape, *allowed: int) -> None:
    """ValueError unless x.ndim is one of `allowed`."""
    if len(x.shape) not in allowed:
        raise ValueError(expected(name, f"{' or '.join(map(str, allowed))} axes", f"shape {tuple(x.shape)}"))


def check_shape(name: str, x: HasShape, *shape: int | None) -> None:
    """ValueError unless x has this shape; None stands for any size."""
    sizes_fit = len(x.shape) == len(shape) and all(
        want is None or have == want for have, want in zip(x.shape, shape, strict=True)
    )
    if not sizes_fit:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(expected(name, f"shape ({wanted})", f"shape {tuple(x.shape)}"))


def check_multiple(name: str, value: int, of: int) -> None:
    """ValueError unless `value` is a multiple of `of`."""
    if value % of != 0:
        raise ValueError(expected(name, f"a multiple of {of}", value))


def check_same_device(**tensors: Tensor | None) -> None:
    """ValueError unless all the tensors that are not None are on one device."""
    present = {name: x for name, x in tensors.items() if x is not None}
    if len({x.device for x in present.values()}) > 1:
        places = ", ".join(f"{name} on {x.device}" for name, x in present.items())
        raise ValueError(expected(" and ".join(present), "one device", places))


def check_choice(name: str, value: str, choices: type[_E]) -> _E:
    """`value` as a member of the enum `choices`; ValueError lists the members."""
    members = [member.value for member in choices]
    if value not in members:
        raise ValueError(expected(name, f"one of {members}", repr(value)))
    return choices(value)


def check_format(
    name: str, value: str | ElementFormat, allowed: Sequence[ElementFormat] = ()
) -> ElementFormat:
    """`value`, a format or its name, as an ElementFormat; ValueError lists the formats."""
    names = [format.name for format in allowed] or list(FORMATS)
    found = value.name if isinstance(value, ElementFormat) else value
    if found not in names:
        raise ValueError(expected(name, f"one of {names}", repr(found)))
    return FORMATS[found]


def check_axis(name: str, axis: int, ndim: int) -> int:
    """`axis` as a negative index into `ndim` axes; ValueError outside [-ndim, ndim)."""
    if not -ndim <= axis < ndim:
        raise ValueError(expected(name, f"an axis in [{-ndim}, {ndim})", axis))
    return axis if axis < 0 else axis - ndim

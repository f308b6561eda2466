"""MXTensor: element data and their block scales, with what is needed to read them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mx_core.checks import check_choice, check_dtype, check_format, check_same_device, expected
from mx_core.codec import packed_size, storage_dtype
from mx_core.formats import BLOCK_SIZE, ElementFormat, ScaleLayout
from mx_core.scale_layout import blocked_shape


@dataclass(frozen=True, eq=False, repr=False)
class MXTensor:
    """A block-scaled tensor of logical shape `shape`.

    It is plain data: no autograd, no operator overloading. It is a pytree node, works as an argument
    and a result of torch.compile, and is read back by torch.load with its default arguments (in a process
    that has imported mx_core).

    Attributes:
        data: the elements, in `shape` and row-major whatever the axis (FP4 and FP6: packed along the last
            axis); float8_e4m3fn, float8_e5m2, int8 or uint8.
        scale: uint8 E8M0 bytes. With the quantised axis moved last and R, L the last two sizes: (..., R,
            ceil(L/32)) if `layout` is LINEAR, else (..., ceil(R/128), ceil(C/4), 32, 4, 4). Blocked scales of
            grouped rows may have more row tiles: every group then starts on a tile of its own.
        format: the element format.
        axis: the quantised axis, negative.
        layout: the layout of `scale`.
        shape: the logical shape (differs from data.shape for FP4 and FP6).
    """

    data: Tensor
    scale: Tensor
    format: ElementFormat
    axis: int
    layout: ScaleLayout
    shape: torch.Size

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", torch.Size(self.shape))
        object.__setattr__(self, "format", check_format("format", self.format))
        object.__setattr__(self, "layout", check_choice("layout", self.layout, ScaleLayout))
        if not -len(self.shape) <= self.axis < 0:
            raise ValueError(expected("axis", f"a negative axis of shape {tuple(self.shape)}", self.axis))
        check_dtype("data", self.data, storage_dtype(self.format))
        check_dtype("scale", self.scale, torch.uint8)
        check_same_device(data=self.data, scale=self.scale)
        data_shape = (*self.shape[:-1], packed_size(self.shape[-1], self.format))
        if self.data.shape != data_shape:
            raise ValueError(expected("data", f"shape {data_shape}", f"shape {tuple(self.data.shape)}"))
        self._check_scale_shape()

    def _check_scale_shape(self) -> None:
        *batch, length = moved_last(self.shape, self.axis)
        cols = -(-length // BLOCK_SIZE)
        if self.layout is ScaleLayout.LINEAR:
            want, fits = (*batch, cols), self.scale.shape == (*batch, cols)
        else:
            if not batch:
                raise ValueError(expected("shape", "two axes or more with blocked scales", tuple(self.shape)))
            want = (*batch[:-1], *blocked_shape(batch[-1], cols))
            have = self.scale.shape
            rows = len(want) - 5  # position of the row tiles, of which there may be more
            fits = len(have) == len(want) and (*have[:rows], *have[rows + 1 :]) == (
                *want[:rows],
                *want[rows + 1 :],
            )
            fits = fits and have[rows] >= want[rows]
        if not fits:
            raise ValueError(expected("scale", f"shape {want}", f"shape {tuple(self.scale.shape)}"))

    def __repr__(self) -> str:
        where = "" if self.device.type == "cpu" else f", device={self.device}"
        return f"MXTensor({tuple(self.shape)}, {self.format!r}, axis={self.axis}, scale={self.layout}{where})"

    def __getitem__(self, index: int) -> "MXTensor":
        """Matrix `index` of a batch of matrices, as views: (E, R, C) -> (R, C)."""
        if len(self.shape) < 3 or self.axis < -2:
            raise ValueError(expected("MXTensor[i]", "a batch of matrices", repr(self)))
        return MXTensor(
            self.data[index], self.scale[index], self.format, self.axis, self.layout, self.shape[1:]
        )

    def __reduce__(self) -> tuple[Any, ...]:
        state = (self.data, self.scale, self.format.name, self.axis, self.layout.value, tuple(self.shape))
        return _rebuild, state

    @property
    def device(self) -> torch.device:
        """Where data and scale are."""
        return self.data.device

    @property
    def ndim(self) -> int:
        """Logical number of axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of data and scale."""
        return self.data.nbytes + self.scale.nbytes

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> "MXTensor":
        """The same tensor on another device. There is no dtype to change: see `dequantize`."""
        if isinstance(device, torch.dtype):
            raise TypeError(expected("device", "a device (use dequantize(mx, dtype) for values)", device))
        data, scale = (x.to(device, non_blocking=non_blocking) for x in (self.data, self.scale))
        return MXTensor(data, scale, self.format, self.axis, self.layout, self.shape)

    def cpu(self) -> "MXTensor":
        """The same tensor in host memory."""
        return self.to("cpu")

    def cuda(self, device: int | None = None) -> "MXTensor":
        """The same tensor on a CUDA device, the current one by default."""
        return self.to(torch.device("cuda", device) if device is not None else "cuda")


def moved_last(shape: torch.Size, axis: int) -> tuple[int, ...]:
    """`shape` with `axis` (negative) moved to the end."""
    position = len(shape) + axis
    return (*shape[:position], *shape[position + 1 :], shape[position])


def mx_equal(a: MXTensor, b: MXTensor) -> bool:
    """Whether two MXTensors are the same in every bit: codes, scale bytes (padding too) and description."""
    same_kind = (a.format, a.axis, a.layout, a.shape) == (b.format, b.axis, b.layout, b.shape)
    return (
        same_kind
        and torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8))
        and torch.equal(a.scale, b.scale)
    )


def _rebuild(
    data: Tensor, scale: Tensor, format: str, axis: int, layout: str, shape: tuple[int, ...]
) -> MXTensor:
    return MXTensor(data, scale, check_format("format", format), axis, ScaleLayout(layout), torch.Size(shape))


def _flatten(mx: MXTensor) -> tuple[list[Any], tuple[Any, ...]]:
    return [mx.data, mx.scale], (mx.format, mx.axis, mx.layout, mx.shape)


def _unflatten(leaves: Any, context: Any) -> MXTensor:
    # Leaves need not be tensors (pytree maps over anything), so this does not validate.
    mx = object.__new__(MXTensor)
    for name, value in zip(
        ("data", "scale", "format", "axis", "layout", "shape"), (*leaves, *context), strict=True
    ):
        object.__setattr__(mx, name, value)
    return mx


pytree.register_pytree_node(MXTensor, _flatten, _unflatten, serialized_type_name="mx_core.MXTensor")
torch.serialization.add_safe_globals([_rebuild])

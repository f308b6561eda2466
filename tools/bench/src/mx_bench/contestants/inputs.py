"""What the libraries are given: the same random data as this project's kernels, laid out beforehand as each wants it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from mx_core import MXTensor, groups
from torch import Tensor
from torch.nn.functional import pad

LayerCall = tuple[Callable[[], Tensor], tuple[Tensor, ...]]
"""The layer's forward, and the tensors whose gradients its backward computes."""


@dataclass(frozen=True)
class GemmInputs:
    """One mode of a grouped GEMM: a (rows, …) and b, as `grouped_gemm_fprop`, `_dgrad` and `_wgrad` take them.

    `sets` are bf16 pairs with COMPACT rows; `scaled` the same quantised, rows ALIGNED. Each call takes the next of them.
    """

    mode: str
    sets: Sequence[tuple[Tensor, Tensor]]
    scaled: Sequence[tuple[MXTensor, MXTensor]]
    offs: Tensor
    sizes: Sequence[int]
    tuned: bool = False
    """Whether a contestant may tune itself first, which takes minutes in some."""

    @cached_property
    def aligned_sizes(self) -> list[int]:
        """Rows of every group with its padding."""
        return [groups.aligned_rows(size, 1) for size in self.sizes]

    @property
    def aligned_rows(self) -> int:
        """Rows that ALIGNED data use."""
        return sum(self.aligned_sizes)

    @property
    def aligned_offs(self) -> Tensor:
        """int32 (E,): ends of the groups in ALIGNED rows."""
        return self.cu_seqlens_aligned[1:]

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """int32 (E+1,): starts of the COMPACT groups and the end of the last."""
        return pad(self.offs, (1, 0))

    @cached_property
    def cu_seqlens_aligned(self) -> Tensor:
        """int32 (E+1,): the same of the ALIGNED groups."""
        return groups.aligned_offs(self.offs)


@dataclass(frozen=True)
class QuantizeInputs:
    """Matrices (rows, columns) in bf16 to quantise: "row", "column" or "both" orientations."""

    orientation: str
    sets: Sequence[Tensor]


@dataclass(frozen=True)
class LayerInputs:
    """The MoE layer's arguments: x (T, D), ids and weights (T, k), w1 (E, 2H, D), w2 (E, D, H); leaves that require grad."""

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    w1: Tensor
    w2: Tensor

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return self.x, self.topk_weights, self.w1, self.w2


def transposed(codes: Tensor) -> Tensor:
    """The same matrices with the axis before the last contiguous, for libraries that need their reduced axis so."""
    return codes.view(torch.uint8).mT.contiguous().view(codes.dtype).mT

"""What the grouped GEMMs of all GPU backends share on the host: the compile key, sizes, result, alignment.

Nothing here imports the DSL.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

from mx_core import RowMap
from torch import Tensor

from mx_kernels.problem import GemmProblem, plain_format

ALIGN_BYTES = 16  # the copy engine's unit: addresses and row pitches are multiples
ELEMENT_BYTES = {"bf16": 2, "mxfp8_e4m3": 1, "mxfp8_e5m2": 1}
OUT_BYTES = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True)
class GemmVariant(ABC):
    """Everything that a compiled GEMM depends on; sizes are dynamic.

    An architecture's `GemmKey` has the type of its tile, what follows from it, and the tiles that its kernel cannot do.
    """

    chip: ClassVar[str]  # in messages

    mode: str  # "fprop" | "dgrad" | "wgrad"
    a_format: str
    b_format: str
    out_dtype: str  # "bf16" | "fp32"
    aligned: bool  # RowMap.ALIGNED: groups start at multiples of 128 rows
    grouped: bool
    accumulate: bool
    tile: Any  # the architecture's TileConfig

    def __post_init__(self) -> None:
        if (reason := self.why_impossible_variant() or self.why_impossible_tile()) is not None:
            raise ValueError(reason)

    @classmethod
    def of(cls, problem: GemmProblem, tile: Any) -> Self:
        """The key of a problem's kernel with this tile. ValueError with the reason if there is none."""
        return cls(
            problem.mode,
            problem.a_format,
            problem.b_format,
            plain_format(problem.out_dtype),
            problem.grouped and problem.row_map is RowMap.ALIGNED,
            problem.grouped,
            problem.accumulate,
            tile,
        )

    @classmethod
    def possible(cls, problem: GemmProblem, tiles: Iterable[Any]) -> tuple[Any, ...]:
        """Those of the tiles that give a kernel for the problem."""

        def exists(tile: Any) -> bool:
            with contextlib.suppress(ValueError):
                cls.of(problem, tile)
                return True
            return False

        return tuple(filter(exists, tiles))

    @property
    def scaled(self) -> bool:
        return self.a_format != "bf16"

    @property
    def groups_along_k(self) -> bool:
        return self.mode == "wgrad"

    @property
    def has_tail(self) -> bool:
        """Whether rows past the last group must be written as zeros."""
        return self.grouped and not self.aligned and not self.groups_along_k

    @property
    def a_k_major(self) -> bool:
        """Whether the reduced axis of A is the contiguous one (B's is, in fprop only)."""
        return self.mode != "wgrad"

    @property
    def b_k_major(self) -> bool:
        return self.mode == "fprop"

    def why_impossible_variant(self) -> str | None:
        """The reason why no tile gives a kernel, or None."""
        if self.mode not in ("fprop", "dgrad", "wgrad"):
            return f"mode: expected fprop, dgrad or wgrad, got {self.mode!r}"
        for name, fmt in (("a", self.a_format), ("b", self.b_format)):
            if fmt not in ELEMENT_BYTES:
                return f"{name}: the {self.chip} GEMM takes {', '.join(ELEMENT_BYTES)} operands, got {fmt}"
        if (self.a_format == "bf16") != (self.b_format == "bf16"):
            return f"operands: both bf16 or both MXFP8, got {self.a_format} and {self.b_format}"
        if self.out_dtype not in OUT_BYTES:
            return f"out_dtype: expected bf16 or fp32, got {self.out_dtype}"
        if self.accumulate and (self.mode != "wgrad" or self.out_dtype != "fp32"):
            return f"accumulate: only wgrad into an fp32 output accumulates, got {self.mode} into {self.out_dtype}"
        if self.mode == "wgrad" and self.grouped and self.scaled and not self.aligned:
            return "wgrad of MXFP8 operands: expected ALIGNED rows (a scale block must not span two experts), got COMPACT"
        return None

    @abstractmethod
    def why_impossible_tile(self) -> str | None:
        """The reason why this tile gives no kernel, or None."""


class GemmSizes(NamedTuple):
    """Rows over all groups, groups, and the weights' N and K."""

    rows: int
    groups: int
    n: int
    k: int


def gemm_sizes(problem: GemmProblem, a: Tensor, b: Tensor, offs: Tensor | None) -> GemmSizes:
    """Sizes of operands that the op has checked."""
    if problem.mode == "wgrad":
        return GemmSizes(a.shape[0], 1 if offs is None else offs.shape[0], a.shape[1], b.shape[1])
    return GemmSizes(a.shape[0], *b.shape)


def gemm_result(problem: GemmProblem, sizes: GemmSizes, a: Tensor, out: Tensor | None) -> Tensor:
    """`out`, or a new tensor for the result."""
    if out is not None:
        return out
    rows, groups, n, k = sizes
    if problem.mode == "wgrad":
        return a.new_empty((groups, n, k), dtype=problem.out_dtype)
    return a.new_empty((rows, n if problem.mode == "fprop" else k), dtype=problem.out_dtype)


def check_gemm_alignment(
    backend: str, a: Tensor, a_scale: Tensor | None, b: Tensor, b_scale: Tensor | None, out: Tensor
) -> None:
    """ValueError unless every row of a, b and out is a multiple of 16 bytes and starts at one, as the scales do."""
    for name, x in (("a", a), ("b", b), ("out", out)):
        if x.shape[-1] * x.element_size() % ALIGN_BYTES or x.data_ptr() % ALIGN_BYTES:
            raise ValueError(
                f"{name}: expected rows and an address that are multiples of {ALIGN_BYTES} bytes on {backend}, "
                f"got shape {tuple(x.shape)} of {x.dtype} at {x.data_ptr():#x}"
            )
    for name, scale in (("a_scale", a_scale), ("b_scale", b_scale)):
        if scale is not None and scale.data_ptr() % ALIGN_BYTES:
            raise ValueError(
                f"{name}: expected an address that is a multiple of {ALIGN_BYTES} bytes on {backend}, "
                f"got {scale.data_ptr():#x}"
            )

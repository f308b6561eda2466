"""Frozen descriptions of what an op is asked to do: the keys of backend choice and of compilation.

A problem holds dtypes, formats, orders and flags, never sizes: those change from step to step, and a kernel takes
them at run time. A GPU backend derives its compile key from the problem and what else it specialises on.
Building a problem with a name that does not exist, or with a combination that has no meaning, is a ValueError.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from mx_core.checks import check_choice, check_format, expected
from mx_core.formats import FORMATS, RowMap, ScaleLayout, ScaleRounding

FLOAT_DTYPES = (torch.bfloat16, torch.float32)
ID_DTYPES = (torch.int32, torch.int64)
#: Names of GEMM operands that are not MX, and their dtypes.
PLAIN_FORMATS = {"bf16": torch.bfloat16, "fp32": torch.float32}

GEMM_MODES = ("fprop", "dgrad", "wgrad")
ORIENTATIONS = ("row", "col", "dual")


def plain_format(dtype: torch.dtype) -> str:
    """The format name of operands that are not quantised."""
    one_of("dtype", FLOAT_DTYPES, dtype)
    return "bf16" if dtype is torch.bfloat16 else "fp32"


def one_of(name: str, choices: Sequence[Any], value: Any) -> Any:
    """`value` if it is one of `choices`, else a ValueError that lists them."""
    if value not in choices:
        raise ValueError(expected(name, f"one of {', '.join(map(str, choices))}", repr(value)))
    return value


#: Field name → check; a check returns the value to keep.
_CHECKS = {
    "dtype": lambda v: one_of("dtype", FLOAT_DTYPES, v),
    "out_dtype": lambda v: one_of("out_dtype", FLOAT_DTYPES, v),
    "id_dtype": lambda v: one_of("topk_ids dtype", ID_DTYPES, v),
    "format": lambda v: None if v is None else check_format("format", v).name,
    "a_format": lambda v: one_of("a_format", (*PLAIN_FORMATS, *FORMATS), v),
    "b_format": lambda v: one_of("b_format", (*PLAIN_FORMATS, *FORMATS), v),
    "rounding": lambda v: check_choice("rounding", v, ScaleRounding),
    "layout": lambda v: check_choice("layout", v, ScaleLayout),
    "row_map": lambda v: check_choice("row_map", v, RowMap),
    "orientation": lambda v: one_of("orientation", ORIENTATIONS, v),
    "mode": lambda v: one_of("mode", GEMM_MODES, v),
}


class _Checked:
    __slots__ = ()

    def __post_init__(self):
        for field in fields(self):  # type: ignore[arg-type]
            if check := _CHECKS.get(field.name):
                object.__setattr__(self, field.name, check(getattr(self, field.name)))


@dataclass(frozen=True, slots=True)
class QuantizeProblem(_Checked):
    """Quantise x along its last axis ("row"), its rows ("col"), or both from one read ("dual").

    With `grouped`, x is (M, K) with `offs`; `row_map` says where the rows of row-quantised data go. Data quantised
    along the rows are always ALIGNED. `ndim` 3 is expert weights (E, N, K), never grouped.
    """

    dtype: torch.dtype
    format: str
    rounding: ScaleRounding = ScaleRounding.RCEIL
    layout: ScaleLayout = ScaleLayout.BLOCKED_128X4
    orientation: str = "row"
    ndim: int = 2
    grouped: bool = False
    row_map: RowMap = RowMap.ALIGNED


@dataclass(frozen=True, slots=True)
class GatherQuantizeProblem(_Checked):
    """Gather rows of x (T, D) by token_of (P,), quantise them. `weighted`: slot weights scale the column copy only."""

    dtype: torch.dtype
    format: str
    rounding: ScaleRounding = ScaleRounding.RCEIL
    layout: ScaleLayout = ScaleLayout.BLOCKED_128X4
    orientation: str = "row"
    weighted: bool = False


@dataclass(frozen=True, slots=True)
class SwigluProblem(_Checked):
    """silu(gate)·up of h (P, 2H); `format` None leaves the result unquantised."""

    dtype: torch.dtype
    format: str | None = None
    rounding: ScaleRounding = ScaleRounding.RCEIL
    layout: ScaleLayout = ScaleLayout.BLOCKED_128X4


@dataclass(frozen=True, slots=True)
class DSwigluProblem(_Checked):
    """Backward of SwiGLU with the router weight folded in; `columns` False leaves the column copies out.

    `format` None: plain dh, w·a and dw.
    """

    dtype: torch.dtype
    format: str | None = None
    rounding: ScaleRounding = ScaleRounding.RCEIL
    layout: ScaleLayout = ScaleLayout.BLOCKED_128X4
    columns: bool = True


@dataclass(frozen=True, slots=True)
class RouteProblem(_Checked):
    """Slots of topk_ids (T, k) among `num_experts` experts."""

    id_dtype: torch.dtype
    k: int
    num_experts: int


@dataclass(frozen=True, slots=True)
class SlotWeightsProblem(_Checked):
    """Router weights (T, k) moved to their slots (P,)."""

    k: int


@dataclass(frozen=True, slots=True)
class GatherProblem(_Checked):
    """Rows of x (T, D) by token_of (P,), unquantised."""

    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class CombineProblem(_Checked):
    """Sum over a token's k slots, weighted or not; `backward`: its two gradients."""

    dtype: torch.dtype
    k: int
    weighted: bool = True
    backward: bool = False


@dataclass(frozen=True, slots=True)
class GemmProblem(_Checked):
    """One grouped GEMM. Formats are names of mx_core.FORMATS, "bf16" or "fp32"."""

    mode: str
    a_format: str
    b_format: str
    out_dtype: torch.dtype
    row_map: RowMap = RowMap.ALIGNED
    grouped: bool = True
    accumulate: bool = False

    def __post_init__(self):
        # Not super(): a slots dataclass is a new class, which zero-argument super() does not know.
        _Checked.__post_init__(self)
        if (
            self.a_format in PLAIN_FORMATS or self.b_format in PLAIN_FORMATS
        ) and self.a_format != self.b_format:
            raise ValueError(
                f"a_format, b_format: expected both MX or the same plain dtype, got {self.a_format} and {self.b_format}"
            )
        if self.mode == "wgrad" and self.is_mx and self.grouped and self.row_map is not RowMap.ALIGNED:
            raise ValueError(
                "row_map: an MX wgrad takes aligned rows only (a scale block must not span two experts), got compact"
            )
        if self.accumulate and (self.mode != "wgrad" or self.out_dtype is not torch.float32):
            raise ValueError(
                f"accumulate: expected mode wgrad and out torch.float32, got {self.mode} and {self.out_dtype}"
            )

    @property
    def is_mx(self) -> bool:
        """Whether the operands carry scales."""
        return self.a_format not in PLAIN_FORMATS


Problem = (
    QuantizeProblem
    | GatherQuantizeProblem
    | SwigluProblem
    | DSwigluProblem
    | RouteProblem
    | SlotWeightsProblem
    | GatherProblem
    | CombineProblem
    | GemmProblem
)

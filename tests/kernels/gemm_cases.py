"""One grouped GEMM as a test runs it: exact or random operands, the op, the float64 reference."""

from dataclasses import dataclass

import torch
from mx_core import FORMATS, MXTensor, RowMap, dequantize, reference
from mx_core.groups import aligned_offs
from mx_kernels import grouped_gemm_dgrad, grouped_gemm_fprop, grouped_gemm_wgrad
from support.bounds import SAMPLE, assert_sum_error
from support.gemm_data import (
    compact_with_aligned_scales,
    exact_matrix,
    exact_operand,
    grouped_rows,
    offs_of,
    poison,
    random_matrix,
    random_operand,
    zero_padding_rows,
)
from torch import Tensor

OPS = {"fprop": grouped_gemm_fprop, "dgrad": grouped_gemm_dgrad, "wgrad": grouped_gemm_wgrad}
REFERENCES = {
    "fprop": reference.grouped_fprop,
    "dgrad": reference.grouped_dgrad,
    "wgrad": reference.grouped_wgrad,
}


@dataclass(frozen=True)
class Gemm:
    """A problem by its sizes. `formats`: of a and b, "bf16" or names of MX formats."""

    mode: str
    sizes: tuple[int, ...]
    n: int
    k: int
    formats: tuple[str, str] = ("bf16", "bf16")
    row_map: RowMap = RowMap.ALIGNED
    out_dtype: torch.dtype = torch.bfloat16
    spare_rows: int = 0  # rows past offs[-1] in COMPACT, which hold NaN
    backend: str = "sm90"

    @property
    def rows(self) -> int:
        return grouped_rows(sum(self.sizes), len(self.sizes), self.row_map) + self.spare_rows

    @property
    def offs(self) -> Tensor:
        return offs_of(list(self.sizes))

    def operands(self, *, exact: bool = True, seed: int = 0) -> tuple[Tensor | MXTensor, Tensor | MXTensor]:
        """a and b as the reference takes them: linear scales, padding zero, NaN past the groups."""
        reduction = {"fprop": self.k, "dgrad": self.n, "wgrad": max(self.sizes)}[self.mode]
        a_shape = (self.rows, self.k if self.mode == "fprop" else self.n)
        b_shape = (self.rows, self.k) if self.mode == "wgrad" else (len(self.sizes), self.n, self.k)
        a_axis, b_axis = (-2, -2) if self.mode == "wgrad" else (-1, -1 if self.mode == "fprop" else -2)
        operands = []
        for shape, axis, name in ((a_shape, a_axis, self.formats[0]), (b_shape, b_axis, self.formats[1])):
            seed += 1
            if name == "bf16":
                x = (
                    exact_matrix(*shape, reduction=reduction, seed=seed)
                    if exact
                    else random_matrix(*shape, seed=seed)
                )
            elif exact:
                x = exact_operand(*shape, reduction=reduction, axis=axis, format=FORMATS[name], seed=seed)
            else:
                x = random_operand(*shape, axis=axis, format=FORMATS[name], seed=seed)
            operands.append(self.with_padding(x) if len(shape) == 2 else x)
        return operands[0], operands[1]

    def with_padding(self, x: Tensor | MXTensor) -> Tensor | MXTensor:
        """Zero the ALIGNED padding; put NaN past the groups of COMPACT rows, where nothing may matter."""
        if self.row_map is RowMap.ALIGNED:
            return zero_padding_rows(x, self.offs)
        end = sum(self.sizes)
        if isinstance(x, Tensor):
            x[end:] = torch.nan
        else:
            x.data.view(torch.uint8)[end:] = 0x7F
        return x

    def with_rows(self, x: MXTensor) -> MXTensor:
        """One group's rows with linear scales, padded with zeros to the case's rows."""
        data = torch.zeros(self.rows, x.shape[1], dtype=torch.uint8)
        scale = torch.zeros(self.rows, x.scale.shape[1], dtype=torch.uint8)
        data[: x.shape[0]], scale[: x.shape[0]] = x.data.view(torch.uint8), x.scale
        return MXTensor(data.view(x.data.dtype), scale, x.format, x.axis, x.layout, data.shape)

    def run(
        self, a, b, *, out: Tensor | None = None, accumulate: bool = False, device: str = "cpu"
    ) -> Tensor:
        """The op on `backend`, into poisoned memory."""
        if isinstance(a, MXTensor) and self.row_map is RowMap.COMPACT:
            a = compact_with_aligned_scales(a, self.offs)
        if out is None:
            out = poison(*self.shape, dtype=self.out_dtype)
        out = out.to(device)
        arguments = {"accumulate": True} if accumulate else {}
        OPS[self.mode](
            a.to(device),
            b.to(device),
            self.offs.to(device),
            out=out,
            row_map=self.row_map,
            backend=self.backend,
            **arguments,
        )
        return self.written(out.cpu())

    @property
    def shape(self) -> tuple[int, ...]:
        if self.mode == "wgrad":
            return (len(self.sizes), self.n, self.k)
        return (self.rows, self.n if self.mode == "fprop" else self.k)

    def expected(self, a, b) -> Tensor:
        """The float64 result."""
        return self.written(REFERENCES[self.mode](a, b, self.offs, row_map=self.row_map))

    def written(self, out: Tensor) -> Tensor:
        """The part that the contract specifies: not the rows past the last unit of ALIGNED rows."""
        if self.mode != "wgrad" and self.row_map is RowMap.ALIGNED:
            return out[: aligned_offs(self.offs)[-1]]
        return out

    def products(self, a, b):
        """(a (M, K), b (N, K), the rows of the result or its group) in float64 for every group that has rows."""
        a, b = values(a), values(b)
        start = 0
        starts = aligned_offs(self.offs) if self.row_map is RowMap.ALIGNED else None
        for g, size in enumerate(self.sizes):
            first = int(starts[g]) if starts is not None else start
            rows = slice(first, first + size)
            start += size
            if size == 0:
                continue
            if self.mode == "wgrad":
                yield a[rows].T, b[rows].T, g
            else:
                yield a[rows], b[g] if self.mode == "fprop" else b[g].T, rows


def check_random(case: Gemm, *, device: str) -> None:
    """Random operands, within the measured bound: the yardstick is the largest error of 48 x 48 sums, so it is held against as
    many; exact tests see them all.
    """
    a, b = case.operands(exact=False)
    got = case.run(a, b, device=device)
    for a_MK, b_NK, where in case.products(a, b):
        m, n = (torch.linspace(0, len(x) - 1, min(SAMPLE, len(x))).long() for x in (a_MK, b_NK))
        assert_sum_error(got[where][m][:, n], a_MK[m], b_NK[n])


def values(x: Tensor | MXTensor) -> Tensor:
    """In float64."""
    return dequantize(x, torch.float64) if isinstance(x, MXTensor) else x.double()

"""Section "grouped GEMM": fprop, dgrad and wgrad in BF16 and MXFP8 against torch.bmm and torch._grouped_mm.

torch.bmm multiplies the same number of rows in equal groups, the best case of a batched product; it stands beside the
skewed groups too, which it cannot multiply.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from mx_core import MXFP8_E4M3, MXTensor, RowMap
from mx_core.groups import aligned_row_of, take_rows
from mx_kernels import grouped_gemm_dgrad, grouped_gemm_fprop, grouped_gemm_wgrad, quantize_mx
from torch import Tensor

from mx_bench.cases import Call, Case, relative_error
from mx_bench.contestants import GemmInputs, gemm_contestants
from mx_bench.timing import buffer_sets

SECTION = "grouped GEMM"
MODES = ("fprop", "dgrad", "wgrad")
GEMMS: dict[str, Callable[..., Tensor]] = {
    "fprop": grouped_gemm_fprop,
    "dgrad": grouped_gemm_dgrad,
    "wgrad": grouped_gemm_wgrad,
}


@dataclass(frozen=True)
class GemmShape:
    """Rows over all groups, weights (groups, N, K)."""

    rows: int
    groups: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.rows} rows, {self.groups} groups, {self.n} x {self.k}"

    @property
    def flop(self) -> int:
        return 2 * self.rows * self.n * self.k

    def sizes(self, skew: float, seed: int = 0) -> list[int]:
        """Group sizes: equal for skew 0, else falling like rank^-skew, in a seeded order."""
        weights = torch.arange(1, self.groups + 1, dtype=torch.float64).pow(-skew)
        weights = weights[torch.randperm(self.groups, generator=torch.Generator().manual_seed(seed))]
        sizes = (weights / weights.sum() * self.rows).long()
        sizes[0] += self.rows - sizes.sum()
        return sizes.tolist()

    def case_name(self, mode: str, skew: float) -> str:
        """Names a problem in results: its mode, sizes, smallest and largest group."""
        sizes = self.sizes(skew)
        return f"{mode}, {self} of {min(sizes)} to {max(sizes)}"


SHAPES = (
    GemmShape(32768, 8, 4096, 4096),
    GemmShape(32768, 64, 2048, 1408),
    GemmShape(16384, 128, 2048, 768),
)
SMOKE_SHAPES = (GemmShape(192, 3, 64, 96),)
SKEW = 0.8
BMM = "torch.bmm, equal groups"
WRONG = 0.1
"""A relative error that no rounding explains: 8-bit operands give 0.04."""


def gemm_cases(device: str, *, smoke: bool, tuned: bool = False) -> Iterator[Case]:
    """Every mode of every shape, in equal and in skewed groups."""
    for shape in SMOKE_SHAPES if smoke else SHAPES:
        for skew in (0.0, SKEW):
            for mode in MODES:
                yield gemm_case(shape, mode, skew, device, tuned=tuned)


def gemm_case(shape: GemmShape, mode: str, skew: float, device: str, *, tuned: bool = False) -> Case:
    """One problem with all its contestants; `tuned`: other libraries may tune themselves first."""
    sizes = shape.sizes(skew)
    offs = torch.tensor(sizes).cumsum(0).to(device, torch.int32)
    element = 2
    a_columns = shape.k if mode == "fprop" else shape.n
    weights = shape.groups * shape.n * shape.k
    operands = shape.rows * a_columns + (shape.rows * shape.k if mode == "wgrad" else weights)
    result = weights if mode == "wgrad" else shape.rows * (shape.n if mode == "fprop" else shape.k)
    count = buffer_sets(operands * element) if device == "cuda" else 1
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device=device, dtype=torch.bfloat16, generator=generator)

    sets = [
        (
            normal(shape.rows, a_columns),
            normal(shape.rows, shape.k) if mode == "wgrad" else normal(shape.groups, shape.n, shape.k),
        )
        for _ in range(count)
    ]
    scaled = [quantized(mode, a, b, offs) for a, b in sets]
    gemm = GEMMS[mode]

    def ours_bf16(i: int) -> Tensor:
        return gemm(*sets[i % count], offs, row_map=RowMap.COMPACT)

    def ours_mxfp8(i: int) -> Tensor:
        return gemm(*scaled[i % count], offs, row_map=RowMap.ALIGNED)

    contestants: dict[str, Call | str] = {
        "ours BF16": ours_bf16,
        "ours MXFP8": ours_mxfp8,
        BMM: _bmm(mode, sets, shape),
        "torch._grouped_mm": _grouped_mm(mode, sets, offs) if device == "cuda" else "needs a GPU",
        **gemm_contestants(GemmInputs(mode, sets, scaled, offs, sizes, tuned)),
    }
    return Case(
        shape.case_name(mode, skew),
        contestants,
        bytes=float(element * (operands + result)),
        flop=float(shape.flop),
        check=checker(mode, *sets[0], offs, sizes),
    )


def checker(
    mode: str, a: Tensor, b: Tensor, offs: Tensor, sizes: list[int]
) -> Callable[[str, object], str | None]:
    """Compares a result with plain products, group by group; COMPACT and ALIGNED rows are both right."""
    reference: list[Tensor] = []

    def check(name: str, result: object) -> str | None:
        if (name == BMM and len(set(sizes)) > 1) or not isinstance(result, Tensor):
            return None  # torch.bmm multiplies equal groups
        if not reference:
            reference.append(plain_products(mode, a, b, sizes))
        if mode != "wgrad" and result.ndim == 3:  # a batch of equal groups
            result = result.flatten(0, 1)
        if mode != "wgrad" and result.shape[0] != a.shape[0]:
            result = take_rows(result, aligned_row_of(offs, a.shape[0]))
        error = relative_error(result, reference[0])
        return None if error < WRONG else f"wrong result, relative error {error:.2f}"

    return check


def plain_products(mode: str, a: Tensor, b: Tensor, sizes: list[int]) -> Tensor:
    """One torch.matmul for each group."""
    rows = a.split(sizes)
    if mode == "wgrad":
        return torch.stack([x.mT @ y for x, y in zip(rows, b.split(sizes), strict=True)])
    return torch.cat([x @ (w.mT if mode == "fprop" else w) for x, w in zip(rows, b, strict=True)])


def quantized(mode: str, a: Tensor, b: Tensor, offs: Tensor) -> tuple[MXTensor, MXTensor]:
    """The MX operands of a mode, rows ALIGNED as inside the MoE layer."""
    if mode == "wgrad":
        return quantize_mx(a, MXFP8_E4M3, axis=-2, offs=offs), quantize_mx(b, MXFP8_E4M3, axis=-2, offs=offs)
    weight_axis = -1 if mode == "fprop" else -2
    return quantize_mx(a, MXFP8_E4M3, offs=offs), quantize_mx(b, MXFP8_E4M3, axis=weight_axis)


def _bmm(mode: str, sets, shape: GemmShape) -> Call:
    def batch(x: Tensor) -> Tensor:
        return x.view(shape.groups, shape.rows // shape.groups, -1) if x.ndim == 2 else x

    batched = [(batch(a), batch(b)) for a, b in sets]

    def call(i: int) -> Tensor:
        a, b = batched[i % len(batched)]
        if mode == "wgrad":
            return torch.bmm(a.mT, b)
        return torch.bmm(a, b.mT if mode == "fprop" else b)

    return call


def _grouped_mm(mode: str, sets, offs: Tensor) -> Call:
    def call(i: int) -> Tensor:
        a, b = sets[i % len(sets)]
        if mode == "wgrad":
            return torch._grouped_mm(a.mT, b, offs=offs)
        return torch._grouped_mm(a, b.mT if mode == "fprop" else b, offs=offs)

    return call

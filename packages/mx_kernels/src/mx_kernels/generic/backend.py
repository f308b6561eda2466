"""The memory-bound ops on a GPU: what sm_90 and sm_100 share. Allocates outputs, picks the kernel, launches it.

The methods are called with a problem and tensors that the ops have checked. They never wait for the device. Kernels are
imported at the first call, not with this module: choosing a backend needs no compiler.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from mx_core import RowMap, ScaleLayout
from mx_core.groups import aligned_rows
from torch import Tensor

from mx_kernels import arch
from mx_kernels.generic import config
from mx_kernels.outputs import empty_quantized
from mx_kernels.problem import GatherQuantizeProblem, Problem, QuantizeProblem

FP8_FORMATS = ("mxfp8_e4m3", "mxfp8_e5m2")
#: CUDA's limit for the second grid axis, which counts 128-row tiles.
MAX_ROWS = 65535 * 128


def launch(kernel: Callable[..., Any], device: torch.device, *args: int) -> None:
    """Queue a kernel on the current stream of the device; its pointers and sizes come as integers."""
    if device.type == "cpu":  # an emulated GPU
        kernel(*args, 0)
        return
    index = device.index
    stream = torch._C._cuda_getCurrentRawStream(index)
    if index == torch.cuda.current_device():
        kernel(*args, stream)
    else:
        with torch.cuda.device(index):
            kernel(*args, stream)


def is_vectorizable(x: Tensor) -> bool:
    """Whether rows of x can be read 16 bytes at a time, and rows of its codes written 8."""
    size = x.element_size()
    strides = [s * size for s in x.stride()[:-1]]
    return x.data_ptr() % 16 == 0 and x.shape[-1] % 8 == 0 and all(s % 16 == 0 for s in strides)


def address(x: Tensor | None) -> int:
    """A tensor's data pointer, 0 for None."""
    return 0 if x is None else x.data_ptr()


class MemoryBoundBackend:
    """Quantise, gather, SwiGLU, route, combine. A subclass adds `name`, `targets` and the GEMMs."""

    name: str
    targets: tuple[str, ...]

    def why_not(self, problem: Problem, device: torch.device) -> str | None:
        """Why this backend cannot run the problem on this device."""
        target = arch.target_of(device)
        if target not in self.targets:
            return f"compiled for {' and '.join(self.targets)}, got {arch.describe(device)}"
        format = getattr(problem, "format", None)
        if format is not None and format not in FP8_FORMATS:
            return f"quantises to {' and '.join(FP8_FORMATS)}, got {format}"
        return None

    # quantise --------------------------------------------------------------------------------------------------------

    def quantize(self, problem: QuantizeProblem, x: Tensor, offs: Tensor | None) -> tuple[Tensor, ...]:
        """Codes and scales of each orientation asked for."""
        rows, cols = x.shape[-2:]
        batch = x.shape[0] if x.ndim == 3 else 1
        compact = offs is not None and problem.row_map is RowMap.COMPACT
        out_rows = rows if offs is None else aligned_rows(rows, offs.shape[0])
        shape = (*x.shape[:-2], out_rows, cols)
        if compact:
            scale_rows = rows if problem.layout is ScaleLayout.LINEAR else out_rows
            out = empty_quantized(x, tuple(x.shape), -1, problem.format, problem.layout, scale_rows)
        else:
            out = _empty_outputs(x, shape, problem)
        table = (
            None
            if offs is None
            else self._group_table(problem.row_map, offs, rows, out_rows // 128 + compact)
        )
        kernel = _quantize_kernel(problem, arch.target_of(x.device), is_vectorizable(x))
        self._launch_quantize(kernel, problem, x, table, None, out, out_rows, batch, -(-cols // 128))
        return out

    def gather_quantize(
        self, problem: GatherQuantizeProblem, x: Tensor, token_of: Tensor, slot_weights: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Codes and scales of each orientation of the gathered rows; the weights scale the column copy only."""
        out_rows = token_of.shape[0]
        out = _empty_outputs(x, (out_rows, x.shape[1]), problem)
        kernel = _quantize_kernel(problem, arch.target_of(x.device), is_vectorizable(x))
        band = min(config.GATHER_BAND, -(-x.shape[1] // 128))
        self._launch_quantize(kernel, problem, x, token_of, slot_weights, out, out_rows, 1, band)
        return out

    def _launch_quantize(self, kernel, problem, x, row_index, weights, out, out_rows, batch, band) -> None:
        cols = x.shape[-1]
        if out_rows == 0 or cols == 0 or batch == 0:
            return
        if out_rows > MAX_ROWS:
            raise ValueError(f"rows: expected at most {MAX_ROWS}, got {out_rows}")
        size = x.element_size()
        row = out[:2] if problem.orientation != "col" else (None, None)
        col = out[-2:] if problem.orientation != "row" else (None, None)
        pointers = (address(t) for t in (x, row_index, weights, *row, *col))
        batch_bytes = x.stride(0) * size if x.ndim == 3 else 0
        launch(kernel, x.device, *pointers, out_rows, cols, x.stride(-2) * size, batch_bytes, batch, band)

    def _group_table(self, row_map: RowMap, offs: Tensor, rows: int, tiles: int) -> Tensor:
        table = torch.empty(tiles, 4, dtype=torch.int32, device=offs.device)
        if tiles:
            kernel = _group_table_kernel(row_map, arch.target_of(offs.device))
            launch(kernel, offs.device, offs.data_ptr(), table.data_ptr(), offs.shape[0], rows, tiles)
        return table


def _empty_outputs(x: Tensor, shape: tuple[int, ...], problem) -> tuple[Tensor, ...]:
    row = (
        empty_quantized(x, shape, -1, problem.format, problem.layout) if problem.orientation != "col" else ()
    )
    col = (
        empty_quantized(x, shape, -2, problem.format, problem.layout) if problem.orientation != "row" else ()
    )
    return *row, *col


@functools.cache
def _quantize_kernel(problem: QuantizeProblem | GatherQuantizeProblem, target: str, vector: bool):
    from mx_kernels import jit
    from mx_kernels.device.mx import BlockScaling
    from mx_kernels.generic.quantize import QuantizeKernel

    gather = isinstance(problem, GatherQuantizeProblem)
    element_bits = problem.dtype.itemsize * 8
    kernel = QuantizeKernel(
        scaling=BlockScaling(problem.format, problem.rounding),
        element_bits=element_bits,
        row=problem.orientation != "col",
        col=problem.orientation != "row",
        blocked=problem.layout is ScaleLayout.BLOCKED_128X4,
        source="gather" if gather else "grouped" if problem.grouped else "dense",
        weighted=gather and problem.weighted,
        compact=not gather and problem.grouped and problem.row_map is RowMap.COMPACT,
        vector=vector,
        config=config.quantize_tile(element_bits, problem.orientation, gather and problem.weighted),
    )
    return jit.compiled(kernel, target, kernel.build)


@functools.cache
def _group_table_kernel(row_map: RowMap, target: str):
    from mx_kernels import jit
    from mx_kernels.generic.groups import GroupTable

    kernel = GroupTable(row_map)
    return jit.compiled(kernel, target, kernel.build)

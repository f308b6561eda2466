"""The memory-bound ops on a GPU: what sm_90 and sm_100 share. Allocates outputs, picks the kernel, launches it.

The methods are called with a problem and tensors that the ops have checked. They never wait for the device. Kernels are
imported at the first call, not with this module: choosing a backend needs no compiler.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from mx_core import RowMap, ScaleLayout
from mx_core.groups import aligned_rows
from torch import Tensor

from mx_kernels import arch
from mx_kernels.generic import config
from mx_kernels.generic.config import MAX_EXPERTS, chunk_size
from mx_kernels.outputs import empty_quantized
from mx_kernels.problem import (
    CombineProblem,
    DSwigluProblem,
    GatherProblem,
    GatherQuantizeProblem,
    Problem,
    QuantizeProblem,
    RouteProblem,
    SlotWeightsProblem,
    SwigluProblem,
)

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
        experts = getattr(problem, "num_experts", 0)
        if experts > MAX_EXPERTS:
            return f"routes to at most {MAX_EXPERTS} experts, got {experts}"
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
        kernel = _quantize_kernel(problem, _target(x), is_vectorizable(x))
        self._launch_quantize(kernel, problem, x, table, None, out, out_rows, batch, -(-cols // 128))
        return out

    def gather_quantize(
        self, problem: GatherQuantizeProblem, x: Tensor, token_of: Tensor, slot_weights: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Codes and scales of each orientation of the gathered rows; the weights scale the column copy only."""
        out_rows = token_of.shape[0]
        out = _empty_outputs(x, (out_rows, x.shape[1]), problem)
        kernel = _quantize_kernel(problem, _target(x), is_vectorizable(x))
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

    # rows of tokens --------------------------------------------------------------------------------------------------

    def route(self, problem: RouteProblem, topk_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """slot_of, token_of and offs."""
        tokens, experts, choices = topk_ids.shape[0], problem.num_experts, topk_ids.numel()
        rows = aligned_rows(choices, experts)
        slot_of = torch.empty(tokens, problem.k, dtype=torch.int32, device=topk_ids.device)
        token_of = torch.empty(rows, dtype=torch.int32, device=topk_ids.device)
        if choices == 0:
            return (
                slot_of,
                token_of.fill_(-1),
                torch.zeros(experts, dtype=torch.int32, device=topk_ids.device),
            )
        offs = torch.empty(experts, dtype=torch.int32, device=topk_ids.device)
        chunk = chunk_size(choices)
        counts = torch.empty(-(-choices // chunk), experts, dtype=torch.int32, device=topk_ids.device)
        kernel = _kernel(
            "route", "RouteKernel", _target(topk_ids), problem.id_dtype.itemsize * 8, problem.k, experts
        )
        pointers = (address(t) for t in (topk_ids, slot_of, token_of, offs, counts))
        launch(kernel, topk_ids.device, *pointers, choices, rows, chunk)
        return slot_of, token_of, offs

    def slot_weights(
        self, problem: SlotWeightsProblem, weights: Tensor, slot_of: Tensor, rows: int
    ) -> Tensor:
        """Router weights by row."""
        if weights.numel() == 0:
            return torch.zeros(rows, dtype=torch.float32, device=weights.device)
        out = torch.empty(rows, dtype=torch.float32, device=weights.device)
        kernel = _kernel("route", "SlotWeightsKernel", _target(weights))
        launch(
            kernel, weights.device, address(weights), address(slot_of), address(out), weights.numel(), rows
        )
        return out

    def gather(self, problem: GatherProblem, x: Tensor, token_of: Tensor) -> Tensor:
        """Rows of tokens, unquantised."""
        out = x.new_empty(token_of.shape[0], x.shape[1])
        if out.numel():
            kernel = _kernel("gather", "GatherKernel", _target(x), config.GATHER_TILE)
            width = x.shape[1] * x.element_size() // 2
            band = min(config.GATHER_BAND, -(-width // config.GATHER_TILE.cols))
            launch(kernel, x.device, address(x), address(token_of), address(out), out.shape[0], width, band)
        return out

    def combine(self, problem: CombineProblem, y: Tensor, slot_of: Tensor, weights: Tensor | None) -> Tensor:
        """The weighted sum over a token's slots."""
        out = y.new_empty(slot_of.shape[0], y.shape[1])
        if out.numel():
            bits, weighted = y.element_size() * 8, weights is not None
            kernel = _kernel("combine", "CombineKernel", _target(y), bits, problem.k, weighted)
            pointers = (address(t) for t in (y, slot_of, weights, out))
            launch(kernel, y.device, *pointers, out.shape[0], out.shape[1])
        return out

    def combine_backward(
        self, problem: CombineProblem, dout: Tensor, y: Tensor, slot_of: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Dy by row and dweights."""
        if dout.numel() == 0 or y.numel() == 0:
            return torch.zeros_like(y), torch.zeros_like(weights)
        dy, dweights = torch.empty_like(y), torch.empty_like(weights)
        marks = torch.empty(y.shape[0], dtype=torch.int32, device=y.device)
        kernel = _kernel("combine", "CombineBackwardKernel", _target(y), y.element_size() * 8, problem.k)
        pointers = (address(t) for t in (dout, y, slot_of, weights, dy, dweights, marks))
        launch(kernel, y.device, *pointers, dout.shape[0], *y.shape)
        return dy, dweights

    # SwiGLU ----------------------------------------------------------------------------------------------------------

    def swiglu(self, problem: SwigluProblem, h: Tensor, offs: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """silu(gate)·up: a tensor, or codes and scales."""
        rows, width = h.shape[0], h.shape[1] // 2
        if problem.format is None:
            data, scale = h.new_empty(rows, width), None
        else:
            data, scale = empty_quantized(h, (rows, width), -1, problem.format, problem.layout)
        if data.numel():
            table = self._group_table(RowMap.ALIGNED, offs, rows, rows // 128)
            kernel = _swiglu_kernel(problem, _target(h))
            launch(kernel, h.device, *(address(t) for t in (h, table, data, scale)), rows, width)
        return data if scale is None else (data, scale)

    def dswiglu(
        self, problem: DSwigluProblem, da: Tensor, h: Tensor, slot_weights: Tensor, offs: Tensor
    ) -> tuple[Tensor, ...]:
        """Plain: dh, w·a, dw. Quantised: dh along 2H, with `columns` dh and a down the rows, dw."""
        rows, width = da.shape
        dw = torch.empty_like(slot_weights)
        if problem.format is None:
            dh, wa = torch.empty_like(h), torch.empty_like(da)
            result, outputs = (dh, wa, dw), (dh, None, None, None, wa, None)
        else:
            format, layout = problem.format, problem.layout
            row = empty_quantized(h, tuple(h.shape), -1, format, layout)
            columns: tuple[Tensor, ...] = ()
            if problem.columns:
                columns = (
                    *empty_quantized(h, tuple(h.shape), -2, format, layout),
                    *empty_quantized(da, tuple(da.shape), -2, format, layout),
                )
            if layout is ScaleLayout.BLOCKED_128X4 and width % 128 != 0:
                for scale in (*row, *columns)[1::2]:
                    scale.zero_()  # scale tiles wider than the matrix have bytes that no CTA writes
            result, outputs = (*row, *columns, dw), (*row, *(columns or (None,) * 4))
        if da.numel():
            table = self._group_table(RowMap.ALIGNED, offs, rows, rows // 128)
            tile = config.dswiglu_tile(h.element_size() * 8)
            shares = torch.empty(tile.warps_over(width), rows, dtype=torch.float32, device=h.device)
            kernel = _dswiglu_kernel(problem, _target(h))
            addresses = (address(t) for t in (da, h, slot_weights, table, *outputs, shares, dw))
            launch(kernel, h.device, *addresses, rows, width)
        return result

    def _group_table(self, row_map: RowMap, offs: Tensor, rows: int, tiles: int) -> Tensor:
        table = torch.empty(tiles, 4, dtype=torch.int32, device=offs.device)
        if tiles:
            kernel = _kernel("groups", "GroupTable", _target(offs), row_map)
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


def _target(x: Tensor) -> str | None:
    return arch.target_of(x.device)


@functools.cache
def _kernel(module: str, name: str, target: str, *fields):
    """The compiled kernel `name` of generic/<module>.py with these fields."""
    from mx_kernels import jit

    kernel = getattr(importlib.import_module(f"mx_kernels.generic.{module}"), name)(*fields)
    return jit.compiled(kernel, target, kernel.build)


def _scaling(problem):
    from mx_kernels.device.mx import BlockScaling

    return None if problem.format is None else BlockScaling(problem.format, problem.rounding)


@functools.cache
def _quantize_kernel(problem: QuantizeProblem | GatherQuantizeProblem, target: str, vector: bool):
    gather = isinstance(problem, GatherQuantizeProblem)
    bits = problem.dtype.itemsize * 8
    weighted = gather and problem.weighted
    return _kernel(
        "quantize",
        "QuantizeKernel",
        target,
        _scaling(problem),
        bits,
        problem.orientation != "col",
        problem.orientation != "row",
        problem.layout is ScaleLayout.BLOCKED_128X4,
        "gather" if gather else "grouped" if problem.grouped else "dense",
        weighted,
        not gather and problem.grouped and problem.row_map is RowMap.COMPACT,
        vector,
        config.quantize_tile(bits, problem.orientation, weighted),
    )


@functools.cache
def _swiglu_kernel(problem: SwigluProblem, target: str):
    bits, blocked = problem.dtype.itemsize * 8, problem.layout is ScaleLayout.BLOCKED_128X4
    return _kernel(
        "swiglu", "SwigluKernel", target, _scaling(problem), bits, blocked, config.swiglu_tile(bits)
    )


@functools.cache
def _dswiglu_kernel(problem: DSwigluProblem, target: str):
    bits, blocked = problem.dtype.itemsize * 8, problem.layout is ScaleLayout.BLOCKED_128X4
    columns = problem.columns and problem.format is not None
    tile = config.dswiglu_tile(bits)
    return _kernel("swiglu", "DSwigluKernel", target, _scaling(problem), bits, columns, blocked, tile)

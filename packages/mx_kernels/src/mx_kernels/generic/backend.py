"""The memory-bound ops on a GPU: what sm_90 and sm_100 share. Allocates outputs, picks the kernel, launches it.

`prepare` is called with a problem and tensors that the ops have checked. Nothing waits for the device. What depends on
shapes only (kernel, output shapes, sizes) is worked out once for every shape, as a `Plan`, because host time is what a small
call costs: ops keep what `prepare` returns (`registry.prepared`) and come straight to the call after that. Kernels are
imported at the first call, not with this module: choosing a backend needs no compiler.
"""

import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from mx_core import FORMATS, RowMap, ScaleLayout
from mx_core.codec import storage_dtype
from mx_core.groups import aligned_rows
from torch import Tensor

from mx_kernels import arch
from mx_kernels.generic import config
from mx_kernels.outputs import scale_shape
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

#: Shape and dtype of a tensor to allocate.
Spec = tuple[tuple[int, ...], torch.dtype]

#: Allocates on the current CUDA device, past the dispatcher: a third of torch.empty's host time. Compiled code calls it.
_empty_strided_cuda = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def empty(specs: list[tuple], device: torch.device) -> tuple[Tensor, ...]:
    """Uninitialised tensors of these (shape, strides, dtype) on this device."""
    if device.type == "cuda" and _empty_strided_cuda and device.index == torch._C._cuda_getDevice():
        return tuple([_empty_strided_cuda(*spec) for spec in specs])
    return tuple([torch.empty_strided(s, strides, dtype=d, device=device) for s, strides, d in specs])


def contiguous(specs: tuple[Spec, ...]) -> list[tuple]:
    """(shape, strides, dtype) of dense tensors."""
    found = []
    for shape, dtype in specs:
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        found.append((shape, tuple(max(s, 1) for s in strides), dtype))
    return found


def launch(kernel: Callable[..., Any], device: torch.device, *args: int | None) -> None:
    """Queue a kernel on the current stream of the device; its pointers and sizes come as integers."""
    index = device.index
    if device.type == "cpu":  # an emulated GPU
        kernel(*args, 0)
    elif index == torch._C._cuda_getDevice():
        kernel(*args, torch._C._cuda_getCurrentRawStream(index))
    else:
        with torch.cuda.device(index):
            kernel(*args, torch._C._cuda_getCurrentRawStream(index))


def address(x: Tensor | None) -> int:
    """A tensor's data pointer, 0 for None."""
    return 0 if x is None else x.data_ptr()


@dataclass(frozen=True, slots=True)
class Plan:
    """A call worked out for its shapes. `kernel` None: there is nothing to launch."""

    problem: Problem
    kernel: Callable[..., Any] | None
    outputs: tuple[Spec, ...]
    sizes: tuple[int, ...] = ()
    scratch: tuple[Spec, ...] = ()
    _dense: tuple[list, list] = field(init=False, default=([], []))

    def __post_init__(self):
        object.__setattr__(self, "_dense", (contiguous(self.outputs), contiguous(self.scratch)))

    def allocate(self, device: torch.device) -> tuple[Tensor, ...]:
        """The outputs, uninitialised."""
        return empty(self._dense[0], device)

    def allocate_scratch(self, device: torch.device) -> tuple[Tensor, ...]:
        """What the kernels need beside the outputs."""
        return empty(self._dense[1], device)


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
        if experts > config.MAX_EXPERTS:
            return f"routes to at most {config.MAX_EXPERTS} experts, got {experts}"
        return None

    @property
    def prepares(self) -> frozenset[str]:
        """The ops that `prepare` knows."""
        return frozenset(_OPS)

    def prepare(self, op: str, problem: Problem, *args: Any) -> Callable[..., Any]:
        """A function of tensors like those in `args`, that runs the op (registry.prepare)."""
        make, key_of, run, aligned = _OPS[op]
        x = args[0]
        for tensor in args[:aligned]:
            if tensor.data_ptr() % 16:
                raise ValueError(f"{op}: expected data at a multiple of 16 bytes, got {tensor.data_ptr():#x}")
        call = functools.partial(run, make(problem, arch.target_of(x.device), *key_of(*args)))
        index = x.get_device()
        if index < 0:
            return call

        def on_device(*tensors: Tensor):
            if torch._C._cuda_getDevice() == index:
                return call(*tensors)
            with torch.cuda.device(index):
                return call(*tensors)

        return on_device


# calls: allocate, launch ---------------------------------------------------------------------------------------------


def _quantize(plan: Plan, x: Tensor, offs: Tensor | None = None) -> tuple[Tensor, ...]:
    out = plan.allocate(x.device)
    if plan.kernel is not None:
        # Kept until the launch: an emulated one has no stream to order reuse.
        scratch = plan.allocate_scratch(x.device)
        table = scratch[0].data_ptr() if scratch else 0
        _launch_quantize(plan, x, out, table, address(offs), 0)
    return out


def _gather_quantize(
    plan: Plan, x: Tensor, token_of: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, ...]:
    out = plan.allocate(x.device)
    if plan.kernel is not None:
        _launch_quantize(plan, x, out, token_of.data_ptr(), 0, address(weights))
    return out


def _launch_quantize(
    plan: Plan, x: Tensor, out: tuple[Tensor, ...], row_index: int, offs: int, weights: int
) -> None:
    """`row_index`: where a group table is to be, or token_of."""
    assert plan.kernel is not None
    pointers = [t.data_ptr() for t in out]
    if len(pointers) == 2:
        row = plan.problem.orientation == "row"  # type: ignore[missing-attribute]
        pointers = [*pointers, 0, 0] if row else [0, 0, *pointers]
    launch(plan.kernel, x.device, x.data_ptr(), row_index, offs, weights, *pointers, *plan.sizes)


def _route(plan: Plan, topk_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    device = topk_ids.device
    slot_of, token_of, offs = plan.allocate(device)
    if plan.kernel is None:
        return slot_of, token_of.fill_(-1), offs.zero_()
    (counts,) = plan.allocate_scratch(device)
    tensors = topk_ids, slot_of, token_of, offs, counts
    launch(plan.kernel, device, *[t.data_ptr() for t in tensors], *plan.sizes)
    return slot_of, token_of, offs


def _slot_weights(plan: Plan, weights: Tensor, slot_of: Tensor) -> Tensor:
    (out,) = plan.allocate(weights.device)
    if plan.kernel is None:
        return out.zero_()
    pointers = weights.data_ptr(), slot_of.data_ptr(), out.data_ptr()
    launch(plan.kernel, weights.device, *pointers, *plan.sizes)
    return out


def _gather(plan: Plan, x: Tensor, token_of: Tensor) -> Tensor:
    (out,) = plan.allocate(x.device)
    if plan.kernel is not None:
        launch(plan.kernel, x.device, x.data_ptr(), token_of.data_ptr(), out.data_ptr(), *plan.sizes)
    return out


def _combine(plan: Plan, y: Tensor, slot_of: Tensor, weights: Tensor | None = None) -> Tensor:
    (out,) = plan.allocate(y.device)
    if plan.kernel is not None:
        pointers = y.data_ptr(), slot_of.data_ptr(), address(weights), out.data_ptr()
        launch(plan.kernel, y.device, *pointers, *plan.sizes)
    return out


def _combine_backward(
    plan: Plan, dout: Tensor, y: Tensor, slot_of: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    dy, dweights = plan.allocate(y.device)
    if plan.kernel is None:
        return dy.zero_(), dweights.zero_()
    tensors = dout, y, slot_of, weights, dy, dweights, *plan.allocate_scratch(y.device)
    launch(plan.kernel, y.device, *[t.data_ptr() for t in tensors], *plan.sizes)
    return dy, dweights


def _swiglu(plan: Plan, h: Tensor, offs: Tensor) -> Tensor | tuple[Tensor, ...]:
    out = plan.allocate(h.device)
    if plan.kernel is not None:
        (table,) = plan.allocate_scratch(h.device)  # kept until the launch
        pointers = [t.data_ptr() for t in (h, offs, table, *out)]
        launch(plan.kernel, h.device, *pointers, *[0] * (5 - len(pointers)), *plan.sizes)
    return out[0] if len(out) == 1 else out


def _dswiglu(plan: Plan, da: Tensor, h: Tensor, slot_weights: Tensor, offs: Tensor) -> tuple[Tensor, ...]:
    problem, device = plan.problem, da.device
    assert isinstance(problem, DSwigluProblem)
    out = plan.allocate(device)
    *results, dw = out
    if plan.kernel is None:
        dw.zero_()
        return out
    pointers = [t.data_ptr() for t in results]
    if problem.format is None:
        pointers = [pointers[0], 0, 0, 0, pointers[1], 0]
    elif problem.layout is ScaleLayout.BLOCKED_128X4 and da.shape[1] % 128 != 0:
        for scale in results[1::2]:
            scale.zero_()  # scale tiles wider than the matrix have bytes that no CTA writes
    pointers += [0] * (6 - len(pointers))
    (scratch,) = plan.allocate_scratch(device)  # kept until the launch
    table = scratch.data_ptr()
    shares = table + plan.sizes[0] // 128 * 16
    inputs = [t.data_ptr() for t in (da, h, slot_weights, offs)]
    launch(plan.kernel, device, *inputs, *pointers, table, shares, dw.data_ptr(), *plan.sizes)
    return out


# plans ---------------------------------------------------------------------------------------------------------------


def _kernel(module: str, name: str, target: str | None, *fields) -> Callable[..., Any]:
    """The compiled kernel `name` of generic/<module>.py with these fields."""
    from mx_kernels import jit

    assert target is not None
    kernel = getattr(importlib.import_module(f"mx_kernels.generic.{module}"), name)(*fields)
    return jit.compiled(kernel, target, kernel.build)


def _table(rows: int) -> Spec:
    """Room for the table of generic/groups.py over so many output rows."""
    return (-(-rows // 128), 4), torch.int32


def _scaling(problem):
    from mx_kernels.device.mx import BlockScaling

    return None if problem.format is None else BlockScaling(problem.format, problem.rounding)


def _quantized(
    shape: tuple[int, ...], axis: int, problem, scale_rows: int | None = None
) -> tuple[Spec, Spec]:
    """Codes and scales of a matrix, or of a batch of them, quantised along `axis`."""
    *batch, rows, cols = shape
    other, length = (rows, cols) if axis == -1 else (cols, rows)
    scales = scale_shape(other if scale_rows is None else scale_rows, length, problem.layout)
    return (tuple(shape), storage_dtype(FORMATS[problem.format])), ((*batch, *scales), torch.uint8)


def _orientations(shape: tuple[int, ...], problem) -> tuple[Spec, ...]:
    row = _quantized(shape, -1, problem) if problem.orientation != "col" else ()
    col = _quantized(shape, -2, problem) if problem.orientation != "row" else ()
    return *row, *col


def _quantize_kernel(problem, target, vector: bool, source: str, *, weighted=False, compact=False):
    """The kernel and its tile."""
    bits = problem.dtype.itemsize * 8
    tile = config.quantize_tile(bits, problem.orientation, source == "gather", weighted, vector)
    key = (
        _scaling(problem),
        bits,
        problem.orientation != "col",
        problem.orientation != "row",
        problem.layout is ScaleLayout.BLOCKED_128X4,
        source,
        weighted,
        compact,
        vector,
        tile,
    )
    return _kernel("quantize", "QuantizeKernel", target, *key), tile


def _check_rows(name: str, rows: int) -> None:
    """Refuse more rows than a grid has CTAs for."""
    if rows > MAX_ROWS:
        raise ValueError(f"{name}: expected at most {MAX_ROWS} rows, got {rows}")


def _plan_quantize(problem: QuantizeProblem, target, shape, strides, aligned: bool, groups: int) -> Plan:
    *batch, rows, cols = shape
    compact = groups > 0 and problem.row_map is RowMap.COMPACT
    out_rows = aligned_rows(rows, groups) if groups else rows
    if compact:
        scale_rows = rows if problem.layout is ScaleLayout.LINEAR else out_rows
        outputs = _quantized(tuple(shape), -1, problem, scale_rows)
    else:
        outputs = _orientations((*batch, out_rows, cols), problem)
    if out_rows == 0 or cols == 0 or 0 in batch:
        return Plan(problem, None, outputs)
    _check_rows("x", out_rows + 128 * compact)  # the padding scales of COMPACT rows take a row of CTAs more
    size = problem.dtype.itemsize
    pitches = [s * size for s in strides[:-1]]
    vector = aligned and cols % 8 == 0 and all(p % 16 == 0 for p in pitches)
    source = "grouped" if groups else "dense"
    kernel, _ = _quantize_kernel(problem, target, vector, source, compact=compact)
    pitch = pitches[-1], pitches[0] if batch else 0
    sizes = out_rows, cols, *pitch, batch[0] if batch else 1, -(-cols // 128), rows, groups
    return Plan(problem, kernel, outputs, sizes, (_table(out_rows + 128 * compact),) if groups else ())


def _plan_gather_quantize(problem: GatherQuantizeProblem, target, shape, aligned: bool, rows: int) -> Plan:
    cols = shape[1]
    outputs = _orientations((rows, cols), problem)
    if rows == 0 or cols == 0:
        return Plan(problem, None, outputs)
    _check_rows("token_of", rows)
    kernel, tile = _quantize_kernel(problem, target, aligned, "gather", weighted=problem.weighted)
    band = min(config.gather_quantize_band(tile), -(-cols // (128 * tile.strip)))
    return Plan(problem, kernel, outputs, (rows, cols, cols * problem.dtype.itemsize, 0, 1, band, 0, 0))


def _plan_route(problem: RouteProblem, target, tokens: int) -> Plan:
    choices, experts = tokens * problem.k, problem.num_experts
    rows = aligned_rows(choices, experts)
    shapes = (tokens, problem.k), (rows,), (experts,)
    outputs = tuple((shape, torch.int32) for shape in shapes)
    if choices == 0:
        return Plan(problem, None, outputs)
    chunk = config.chunk_size(choices)
    kernel = _kernel("route", "RouteKernel", target, problem.id_dtype.itemsize * 8, problem.k, experts)
    scratch = (((-(-choices // chunk), experts), torch.int32),)
    return Plan(problem, kernel, outputs, (choices, rows, chunk), scratch)


def _plan_slot_weights(problem: SlotWeightsProblem, target, tokens: int, rows: int) -> Plan:
    outputs = (((rows,), torch.float32),)
    if tokens == 0 or rows == 0:
        return Plan(problem, None, outputs)
    return Plan(problem, _kernel("route", "SlotWeightsKernel", target), outputs, (tokens * problem.k, rows))


def _plan_gather(problem: GatherProblem, target, rows: int, cols: int) -> Plan:
    outputs = (((rows, cols), problem.dtype),)
    if rows == 0 or cols == 0:
        return Plan(problem, None, outputs)
    _check_rows("token_of", rows)
    width = cols * problem.dtype.itemsize // 2
    band = min(config.GATHER_BAND, -(-width // config.GATHER_TILE.cols))
    kernel = _kernel("gather", "GatherKernel", target, config.GATHER_TILE)
    return Plan(problem, kernel, outputs, (rows, width, band))


def _plan_combine(problem: CombineProblem, target, tokens: int, cols: int, weighted: bool) -> Plan:
    outputs = (((tokens, cols), problem.dtype),)
    if tokens == 0 or cols == 0:
        return Plan(problem, None, outputs)
    kernel = _kernel("combine", "CombineKernel", target, problem.dtype.itemsize * 8, problem.k, weighted)
    return Plan(problem, kernel, outputs, (tokens, cols))


def _plan_combine_backward(problem: CombineProblem, target, tokens: int, rows: int, cols: int) -> Plan:
    outputs = ((rows, cols), problem.dtype), ((tokens, problem.k), torch.float32)
    if tokens == 0 or rows == 0 or cols == 0:
        return Plan(problem, None, outputs)
    kernel = _kernel("combine", "CombineBackwardKernel", target, problem.dtype.itemsize * 8, problem.k)
    return Plan(problem, kernel, outputs, (tokens, rows, cols), (((rows,), torch.int32),))


def _plan_swiglu(problem: SwigluProblem, target, rows: int, double_width: int, groups: int) -> Plan:
    width = double_width // 2
    plain = (((rows, width), problem.dtype),)
    outputs = plain if problem.format is None else _quantized((rows, width), -1, problem)
    if rows == 0 or width == 0:
        return Plan(problem, None, outputs)
    bits, blocked = problem.dtype.itemsize * 8, problem.layout is ScaleLayout.BLOCKED_128X4
    _check_rows("h", rows)
    tile = config.swiglu_tile(bits, problem.format is not None)
    kernel = _kernel("swiglu", "SwigluKernel", target, _scaling(problem), bits, blocked, tile)
    return Plan(problem, kernel, outputs, (rows, width, groups), (_table(rows),))


def _plan_dswiglu(problem: DSwigluProblem, target, rows: int, width: int, groups: int) -> Plan:
    quantized = problem.format is not None
    columns = problem.columns and quantized
    h, a, dw = (rows, 2 * width), (rows, width), ((rows,), torch.float32)
    if not quantized:
        outputs = (h, problem.dtype), (a, problem.dtype), dw
    elif columns:
        outputs = *_quantized(h, -1, problem), *_quantized(h, -2, problem), *_quantized(a, -2, problem), dw
    else:
        outputs = *_quantized(h, -1, problem), dw
    if rows == 0 or width == 0:
        return Plan(problem, None, outputs)
    bits, blocked = problem.dtype.itemsize * 8, problem.layout is ScaleLayout.BLOCKED_128X4
    _check_rows("h", rows)
    tile = config.dswiglu_tile(bits, quantized, columns)
    kernel = _kernel("dswiglu", "DSwigluKernel", target, _scaling(problem), bits, blocked, tile, columns)
    # The group table, then the shares of dw, a line for each column of tiles.
    scratch = ((rows // 128 * 4 + -(-width // tile.cols) * rows,), torch.int32)
    return Plan(problem, kernel, outputs, (rows, width, groups), (scratch,))


#: Op → its plan, what of its arguments the plan depends on, the call, and how many tensors are read 16 bytes at a time.
_OPS: dict[str, tuple[Callable[..., Plan], Callable[..., tuple], Callable[..., Any], int]] = {
    "quantize": (
        _plan_quantize,
        lambda x, offs: (x.shape, x.stride(), x.data_ptr() % 16 == 0, 0 if offs is None else offs.shape[0]),
        _quantize,
        0,
    ),
    "gather_quantize": (
        _plan_gather_quantize,
        lambda x, token_of, _: (x.shape, x.data_ptr() % 16 == 0, token_of.shape[0]),
        _gather_quantize,
        0,
    ),
    "route": (_plan_route, lambda ids: (ids.shape[0],), _route, 0),
    "slot_weights": (_plan_slot_weights, lambda w, slot_of, rows: (w.shape[0], rows), _slot_weights, 0),
    "gather": (_plan_gather, lambda x, token_of: (token_of.shape[0], x.shape[1]), _gather, 1),
    "combine": (
        _plan_combine,
        lambda y, slot_of, w: (slot_of.shape[0], y.shape[1], w is not None),
        _combine,
        1,
    ),
    "combine_backward": (
        _plan_combine_backward,
        lambda dout, y, slot_of, w: (slot_of.shape[0], *y.shape),
        _combine_backward,
        2,
    ),
    "swiglu": (_plan_swiglu, lambda h, offs: (*h.shape, offs.shape[0]), _swiglu, 1),
    "dswiglu": (_plan_dswiglu, lambda da, h, w, offs: (*da.shape, offs.shape[0]), _dswiglu, 2),
}

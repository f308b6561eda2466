"""Section "memory-bound": the kernels that should run at the speed of a copy, against a copy of as many bytes.

Bytes count every input once and every output once, scales included. The copy moves the same number (half read, half
written), so a kernel's share of copy speed is the copy's time over its own. `python -m mx_bench.memory_bound` prints the
table of docs/memory_bound.md.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import mx_kernels  # noqa: F401 - registers torch.ops.mx
import torch
from mx_core import MXFP8_E4M3
from mx_core.scaling import amax_to_e8m0, e8m0_to_reciprocal
from mx_kernels.problem import GemmProblem
from torch import Tensor

from mx_bench.cases import Call, Case
from mx_bench.contestants import QuantizeInputs, quantize_contestants
from mx_bench.plan import Plan, run_cases
from mx_bench.results import Measurement
from mx_bench.timing import buffer_sets

SECTION = "memory-bound"
MX = ("mxfp8_e4m3", "rceil", "blocked_128x4")
BF16 = torch.bfloat16
mx = torch.ops.mx


@dataclass(frozen=True)
class Sizes:
    """T tokens, D width, k choices, E experts, P rows, H expert width."""

    rows: int
    cols: int
    moe: tuple[tuple[int, int, int, int], ...]  # (T, D, k, E)
    swiglu: tuple[int, int]  # (P, H)


DESIGN = Sizes(65536, 7168, ((8192, 7168, 8, 256), (16384, 2048, 8, 128)), (65536, 2048))
SMOKE = Sizes(256, 256, ((256, 256, 2, 4),), (256, 128))


def torch_quantize(x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """The reference's arithmetic in plain torch, linear scales: what torch.compile has to fuse."""
    R, C = x.shape
    blocks = x.float().view(R, C // 32, 32) if axis == -1 else x.float().view(R // 32, 32, C)
    scale = amax_to_e8m0(blocks.abs().amax(axis, keepdim=True), MXFP8_E4M3)
    scaled = blocks * e8m0_to_reciprocal(scale)
    codes = scaled.clamp(-MXFP8_E4M3.max_value, MXFP8_E4M3.max_value).to(torch.float8_e4m3fn)
    return codes.view(R, C), scale.squeeze(axis)


def torch_swiglu_quantize(h: Tensor) -> tuple[Tensor, Tensor]:
    """silu(gate)·up, then `torch_quantize` along the rows."""
    g, u = h.float().chunk(2, dim=1)
    return torch_quantize(torch.nn.functional.silu(g) * u, -1)


def memory_bound_cases(device: str, *, smoke: bool) -> Iterator[Case]:
    """All cases, one after the other: each frees its tensors before the next makes its own."""
    sizes = SMOKE if smoke else DESIGN
    yield from _quantize_cases(sizes, device)
    yield from _dequantize_cases(sizes, device)
    yield from _swiglu_cases(sizes, device)
    for shape in sizes.moe:
        yield from _moe_cases(*shape, device)


def _case(name: str, moved: float, contestants: Mapping[str, Call | str], device: str) -> Case:
    """A case with the copy beside it."""
    source = [torch.randint(0, 255, (int(moved) // 2,), dtype=torch.uint8, device=device) for _ in range(2)]
    target = torch.empty_like(source[0])
    return Case(name, {"copy": lambda i: target.copy_(source[i % 2]), **contestants}, bytes=moved)


def random_sets(device: str, *shape: int) -> list[Tensor]:
    """Buffer sets to rotate over."""
    size = 2 * torch.Size(shape).numel()
    n = buffer_sets(size) if device == "cuda" else 2
    return [torch.randn(shape, device=device, dtype=BF16) for _ in range(n)]


def _over(inputs: list[Tensor], function: Callable[[Tensor], object]) -> Call:
    return lambda i: function(inputs[i % len(inputs)])


def _compiled(function: Callable, inputs: list[Tensor], *args: object) -> Call:
    compiled = torch.compile(function, dynamic=False)
    return _over(inputs, lambda x: compiled(x, *args))


def _quantize_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    x = random_sets(device, sizes.rows, sizes.cols)
    n = x[0].numel()
    shape = f"{sizes.rows} x {sizes.cols}"
    for axis, what in ((-1, "row"), (-2, "column")):
        ours = _over(x, lambda t, axis=axis: mx.quantize(t, MX[0], axis, *MX[1:]))
        contestants = {
            "ours": ours,
            "torch.compile, linear scales": _compiled(torch_quantize, x, axis),
            **quantize_contestants(QuantizeInputs(what, x)),
        }
        yield _case(f"quantise, {what}, {shape}", 3 * n + n / 32, contestants, device)
    yield _case(
        f"quantise, both, {shape}",
        4 * n + n / 16,
        {
            "ours": _over(x, lambda t: mx.quantize_dual(t, *MX)),
            **quantize_contestants(QuantizeInputs("both", x)),
        },
        device,
    )


def _dequantize_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    """What the Hopper GEMM does first where that pays: both operands of a wgrad to BF16, one matrix after the other."""
    x = random_sets(device, sizes.rows, sizes.cols)
    problem = GemmProblem("wgrad", MX[0], MX[0], BF16, grouped=False)
    (a, a_scale), (b, b_scale) = (mx.quantize(t, MX[0], -2, *MX[1:]) for t in x[:2])
    n = 2 * x[0].numel()

    def ours(_number: int) -> object:
        from mx_kernels.generic.dequantize import dequantize_operands

        return dequantize_operands(problem, a, a_scale, b, b_scale, None)

    contestants: dict[str, Call | str] = {"ours": ours if device == "cuda" else "needs a GPU"}
    yield _case(
        f"dequantise, two matrices, column, {sizes.rows} x {sizes.cols}", 3 * n + n / 32, contestants, device
    )


def _swiglu_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    P, H = sizes.swiglu
    h, da = random_sets(device, P, 2 * H), random_sets(device, P, H)
    offs = torch.arange(1, 9, device=device, dtype=torch.int32) * (P // 8)
    w = torch.rand(P, device=device)
    n, shape = P * H, f"P {P}, H {H}"
    forward = {
        "ours": _over(h, lambda t: mx.swiglu_quantize(t, offs, *MX)),
        "torch.compile, linear scales": _compiled(torch_swiglu_quantize, h),
    }
    yield _case(f"SwiGLU + quantise, {shape}", 5 * n + n / 32, forward, device)
    yield _case(f"SwiGLU, BF16, {shape}", 6 * n, {"ours": _over(h, lambda t: mx.swiglu(t, offs))}, device)

    def backward(op: Callable, *args: object) -> dict[str, Call | str]:
        return {"ours": lambda i: op(da[i % len(da)], h[i % len(h)], w, offs, *args)}

    yield _case(
        f"SwiGLU backward, dh both ways and a, {shape}",
        11 * n + 5 * n / 32,
        backward(mx.dswiglu_quantize, *MX),
        device,
    )
    yield _case(
        f"SwiGLU backward, dh by row, {shape}", 8 * n + n / 16, backward(mx.dswiglu_quantize_row, *MX), device
    )
    yield _case(f"SwiGLU backward, BF16, {shape}", 12 * n, backward(mx.dswiglu), device)


def _moe_cases(T: int, D: int, k: int, E: int, device: str) -> Iterator[Case]:
    # Equal groups, so that there is no padding and P = T·k.
    ids = (torch.randperm(T * k, device=device) % E).view(T, k)
    slot_of, token_of, _ = mx.route(ids, E)
    P = T * k
    token_of, weights = token_of[:P].contiguous(), torch.rand(T, k, device=device)
    slots = mx.slot_weights(weights, slot_of, P)
    x, y = random_sets(device, T, D), random_sets(device, P, D)
    n, shape = P * D, f"T {T}, D {D}, k {k}, E {E}"
    both = 2 * T * D + 2 * n + n / 16
    yield _case(
        f"gather + quantise, both, {shape}",
        both,
        {
            "ours": _over(x, lambda t: mx.gather_quantize_dual(t, token_of, None, *MX)),
            "ours, column copy weighted": _over(
                x, lambda t: mx.gather_quantize_dual(t, token_of, slots, *MX)
            ),
        },
        device,
    )
    row = {"ours": _over(x, lambda t: mx.gather_quantize(t, token_of, None, MX[0], -1, *MX[1:]))}
    yield _case(f"gather + quantise, row, {shape}", 2 * T * D + n + n / 32, row, device)
    index = token_of.long()
    plain = {
        "ours": _over(x, lambda t: mx.gather(t, token_of)),
        "torch index_select": _over(x, lambda t: t.index_select(0, index)),
    }
    yield _case(f"gather, BF16, {shape}", 2 * T * D + 2 * n, plain, device)
    combine = {"ours": _over(y, lambda t: mx.combine(t, slot_of, weights))}
    yield _case(f"combine, {shape}", 2 * n + 2 * T * D, combine, device)
    grads = {"ours": lambda i: mx.combine_backward(x[i % len(x)], y[i % len(y)], slot_of, weights)}
    yield _case(f"combine backward, {shape}", 4 * n + 2 * T * D, grads, device)


def markdown(measurements: list[Measurement]) -> str:
    """One row a contestant, the copy of its case as the measure."""
    lines = ["| case | contestant | µs | TB/s | of the copy |", "|---|---|---|---|---|"]
    copies = {m.case: m.seconds or 0.0 for m in measurements if m.contestant == "copy"}
    for m in measurements:
        if m.seconds is None:
            lines.append(f"| {m.case} | {m.contestant} | {m.note} | | |")
        elif m.contestant != "copy":
            share, rate = copies[m.case] / m.seconds, (m.bytes or 0.0) / m.seconds / 1e12
            lines.append(f"| {m.case} | {m.contestant} | {m.seconds * 1e6:.1f} | {rate:.2f} | {share:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure everything on this machine and print the table."""
    parser = argparse.ArgumentParser(prog="python -m mx_bench.memory_bound", description=__doc__)
    parser.add_argument("--once", action="store_true", help="only call our ops, each once: for a profiler")
    once = parser.parse_args().once
    plan = Plan("cuda" if torch.cuda.is_available() else "cpu", quick=False)
    if once:
        for case in memory_bound_cases(plan.device, smoke=plan.smoke):
            for name, call in case.contestants.items():
                if name.startswith("ours") and callable(call):
                    call(0)
        return
    measurements = run_cases(SECTION, memory_bound_cases(plan.device, smoke=plan.smoke), plan)
    rates = sorted(
        (m.bytes or 0.0) / m.seconds / 1e12 for m in measurements if m.contestant == "copy" and m.seconds
    )
    name = (
        "No GPU found, smoke sizes that say nothing about speed"
        if plan.smoke
        else torch.cuda.get_device_name()
    )
    print(f"{name}: copies of these sizes ran at {rates[0]:.2f} to {rates[-1]:.2f} TB/s\n")
    print(markdown(measurements))


if __name__ == "__main__":
    main()

"""First contact with a Blackwell GPU: `mx-doctor --selftest` runs these checks, smallest first.

Every check is a process of its own under a timeout, so that a wrong value, a hang and a crash are all just lines of the
report. Operands of the GEMM checks have exact sums, so the results must be bitwise right whatever the order of additions.
The first check that fails ends the run: what comes after it is made of it.
"""

import argparse
import functools
import importlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from mx_core import MXFP8_E4M3, MXFP8_E5M2, MXTensor, RowMap, ScaleLayout, decode, reference
from mx_core.groups import aligned_offs, aligned_rows, is_real_row
from mx_core.scale_layout import to_blocked
from torch import Tensor

from mx_kernels import arch
from mx_kernels.sm100.backend import forced_tile
from mx_kernels.sm100.config import TILES, TileConfig

TIMEOUT_S = 300.0  # of one check: compiling its kernels takes a few seconds, running them far less than one
COMMAND = (sys.executable, "-m", "mx_kernels.sm100.selftest")
SIZES = (130, 0, 1, 257)  # of the groups: an empty one, a single row, more than a tile

Check = Callable[[torch.device], str | None]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    """Add a check. It raises AssertionError with what is wrong, or returns a remark."""
    CHECKS[function.__name__.replace("_", " ")] = function
    return function


# operands ---------------------------------------------------------------------------------------------------------------


def exact_operand(*shape: int, axis: int = -1, format=MXFP8_E4M3, seed: int = 0) -> MXTensor:
    """Codes of small integers, and scale bytes unlike their neighbours: products are multiples of 2^-4 below 2^12."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 4, shape, generator=generator)  # 0, 1, 2, 3 as codes below; odd ones negative
    table = {MXFP8_E4M3: (0x00, 0xB8, 0x40, 0xC4), MXFP8_E5M2: (0x00, 0xBC, 0x40, 0xC2)}[format]
    data = torch.tensor(table, dtype=torch.uint8)[codes]
    *batch, rows, length = data.movedim(axis, -1).shape
    r, c = torch.arange(rows)[:, None], torch.arange(-(-length // 32))
    scale = (125 + (r + 2 * c + seed) % 5).to(torch.uint8).expand(*batch, rows, len(c)).contiguous()
    dtype = torch.float8_e4m3fn if format is MXFP8_E4M3 else torch.float8_e5m2
    return MXTensor(data.view(dtype), scale, format, axis, ScaleLayout.LINEAR, torch.Size(shape))


def zero_padding(x: MXTensor, offs: Tensor) -> MXTensor:
    """ALIGNED rows of no group set to zero, as the quantisers write them."""
    real = is_real_row(offs, x.shape[0], RowMap.ALIGNED)[:, None]
    data = torch.where(real, x.data.view(torch.uint8), 0).view(x.data.dtype)
    scale = torch.where(real, x.scale, 0) if x.axis == -1 else x.scale
    return MXTensor(data, scale, x.format, x.axis, x.layout, x.shape)


def group_ends(sizes: Sequence[int] = SIZES) -> Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


def expect_equal(what: str, got: Tensor, want: Tensor) -> None:
    """Bitwise, as values."""
    got = got.cpu()
    wrong = ~((got == want) | (got.isnan() & want.isnan()))
    if wrong.any():
        where = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} values are wrong; at {where} "
            f"expected {want[where].item()}, got {got[where].item()}"
        )


def gemm(mode: str, device: torch.device, a: MXTensor, b: MXTensor, offs: Tensor | None, **options) -> Tensor:
    import mx_kernels

    function = getattr(mx_kernels, f"grouped_gemm_{mode}")
    offs = offs.to(device) if offs is not None else None
    return function(a.to(device), b.to(device), offs, backend="sm100", **options)


def check_mode(mode: str, device: torch.device, sizes: Sequence[int], n: int, k: int, **formats) -> None:
    """One grouped GEMM against the float64 reference."""
    offs, experts = group_ends(sizes), len(sizes)
    rows = aligned_rows(sum(sizes), experts)
    a_format, b_format = formats.get("a", MXFP8_E4M3), formats.get("b", MXFP8_E4M3)
    if mode == "wgrad":
        a = zero_padding(exact_operand(rows, n, axis=-2, format=a_format, seed=1), offs)
        b = zero_padding(exact_operand(rows, k, axis=-2, format=b_format, seed=2), offs)
    else:
        axis = -1 if mode == "fprop" else -2
        a = zero_padding(exact_operand(rows, k if mode == "fprop" else n, format=a_format, seed=1), offs)
        b = exact_operand(experts, n, k, axis=axis, format=b_format, seed=2)
    want = getattr(reference, f"grouped_{mode}")(a, b, offs, out_dtype=torch.float32)
    got = gemm(mode, device, a, b, offs, out_dtype=torch.float32)
    end = None if mode == "wgrad" else int(aligned_offs(offs)[-1])
    expect_equal(mode, got[:end], want[:end])


# the checks, smallest first ---------------------------------------------------------------------------------------------


@check
def scale_copy(device: torch.device) -> None:
    """Every scale byte arrives: operands are 1.0 where block j of K meets column j, so y[r, j] is x's scale (r, j)."""
    one_hot = torch.zeros(128, 128, dtype=torch.uint8)
    blocks = torch.arange(4)
    one_hot[blocks, 32 * blocks] = 0x38
    ones = torch.zeros(128, 128, dtype=torch.uint8)
    ones[:, 32 * blocks] = 0x38
    scales = torch.randint(1, 255, (128, 4), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    neutral = torch.full((128, 4), 127, dtype=torch.uint8)
    want = torch.exp2(scales.float() - 127)
    with forced_tile(TileConfig(128, 128, 1)):
        y = gemm(
            "fprop", device, matrix(ones, scales), batched(one_hot, neutral), None, out_dtype=torch.float32
        )
        expect_equal("scales of A", y[:, :4], want)
        y = gemm(
            "fprop", device, matrix(one_hot, neutral), batched(ones, scales), None, out_dtype=torch.float32
        )
        expect_equal("scales of B", y[:4], want.T)


def matrix(codes: Tensor, scale: Tensor) -> MXTensor:
    return MXTensor(codes.view(torch.float8_e4m3fn), scale, MXFP8_E4M3, -1, ScaleLayout.LINEAR, codes.shape)


def batched(codes: Tensor, scale: Tensor) -> MXTensor:
    return matrix(codes[None], scale[None])


@check
def one_mma(device: torch.device) -> None:
    """K = 32: a single MMA has anything to add."""
    with forced_tile(TileConfig(128, 128, 1)):
        check_mode("fprop", device, (128,), 128, 32)


@check
def one_tile(device: torch.device) -> None:
    """One output tile of every size, one CTA and two."""
    for tile in TILES:
        with forced_tile(tile):
            check_mode("fprop", device, (tile.tile_m,), tile.tile_n, 256)


@check
def multicast(device: torch.device) -> None:
    """Clusters that share their loads."""
    for tile in (TileConfig(128, 128, 2, 1), TileConfig(256, 256, 2, 2), TileConfig(256, 128, 4, 1)):
        with forced_tile(tile):
            check_mode("fprop", device, (600,), 640, 384)


@check
def groups(device: torch.device) -> None:
    """All modes over ragged groups, with tails in every extent; E5M2."""
    for mode in ("fprop", "dgrad", "wgrad"):
        check_mode(mode, device, SIZES, 272, 400)
        check_mode(mode, device, SIZES, 144, 96, a=MXFP8_E5M2)


@check
def compact_rows_and_bf16(device: torch.device) -> None:
    """Stores that end at a group's last row; rows past the groups become zeros."""
    import mx_kernels

    offs = group_ends()
    rows = sum(SIZES) + 50
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-8, 9, (rows, 136), generator=generator).to(torch.bfloat16)
    w = torch.randint(-8, 9, (len(SIZES), 72, 136), generator=generator).to(torch.bfloat16)
    want = reference.grouped_fprop(x, w, offs, out_dtype=torch.bfloat16, row_map=RowMap.COMPACT)
    out = torch.full((rows, 72), float("nan"), dtype=torch.bfloat16, device=device)
    mx_kernels.grouped_gemm_fprop(
        x.to(device), w.to(device), offs.to(device), out=out, row_map=RowMap.COMPACT, backend="sm100"
    )
    expect_equal("fprop", out, want)


@check
def accumulation(device: torch.device) -> None:
    """Wgrad into a gradient that is there already."""
    offs, rows = group_ends(), aligned_rows(sum(SIZES), len(SIZES))
    dy, x = (zero_padding(exact_operand(rows, c, axis=-2, seed=c), offs) for c in (144, 80))
    out = torch.ones(len(SIZES), 144, 80, device=device)
    gemm("wgrad", device, dy, x, offs, out=out, accumulate=True)
    expect_equal("wgrad", out, reference.grouped_wgrad(dy, x, offs, out_dtype=torch.float32) + 1)


@check
def quantisers(device: torch.device) -> None:
    """The memory-bound kernels write the bytes of the CPU backend."""
    import mx_kernels

    offs = group_ends()
    x = torch.randn(sum(SIZES), 416, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    got = mx_kernels.quantize_mx_dual(x.to(device), offs=offs.to(device), backend="sm100")
    want = mx_kernels.quantize_mx_dual(x, offs=offs, backend="cpu")
    for name, g, w in zip(("rows", "columns"), got, want, strict=True):
        expect_equal(f"codes of the {name}", g.data.cpu().view(torch.uint8), w.data.view(torch.uint8))
        expect_equal(f"scales of the {name}", g.scale, w.scale)


@check
def layer(device: torch.device) -> str:
    """A whole MoE layer, forward and backward, against the CPU backend."""
    from mx_kernels import moe_mlp

    generator = torch.Generator().manual_seed(0)
    tokens, k, width, hidden, experts = 96, 2, 128, 96, 4
    x = torch.randn(tokens, width, generator=generator).to(torch.bfloat16)
    ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :k]
    weights = torch.rand(tokens, k, generator=generator)
    w1 = (torch.randn(experts, 2 * hidden, width, generator=generator) / width**0.5).to(torch.bfloat16)
    w2 = (torch.randn(experts, width, hidden, generator=generator) / hidden**0.5).to(torch.bfloat16)
    results = []
    for where, backend in ((torch.device("cpu"), "cpu"), (device, "sm100")):
        leaves = [t.to(where, copy=True).requires_grad_() for t in (x, weights, w1, w2)]
        out = moe_mlp(leaves[0], ids.to(where), *leaves[1:], backend=backend)
        gradients = torch.autograd.grad(out.float().square().sum(), leaves)
        results.append([t.detach().cpu().double() for t in (out, *gradients)])
    errors = []
    for name, want, got in zip(("out", "dx", "dweights", "dw1", "dw2"), *results, strict=True):
        error = ((got - want).norm() / want.norm()).item()
        errors.append(f"{name} {error:.1e}")
        if not error < 2e-2:  # a flipped rounding moves a code by 6 %; they are rare
            raise AssertionError(f"{name}: relative error {error:.3g} against the CPU backend")
    return "relative errors: " + ", ".join(errors)


@check
def torch_oracle(device: torch.device) -> str:
    """The scaled grouped GEMM of torch on the same operands, where this machine has it."""
    if device.type != "cuda" or not hasattr(torch.nn.functional, "scaled_grouped_mm"):
        return "torch has no scaled grouped GEMM here"
    sizes = (128, 256)
    offs = group_ends(sizes)
    x, w = exact_operand(sum(sizes), 256, seed=1), exact_operand(len(sizes), 384, 256, seed=2)
    try:
        theirs = torch_scaled_gemm(x.to(device), w.to(device), offs.to(device)).cpu()
    except (RuntimeError, TypeError, ValueError) as error:
        return f"torch refused: {str(error).splitlines()[0]}"
    expect_equal("against torch", gemm("fprop", device, x, w, offs, out_dtype=torch.bfloat16), theirs)
    return "equal to torch's, bitwise"


def torch_scaled_gemm(x: MXTensor, w: MXTensor, offs: Tensor) -> Tensor:
    """Torch's fprop in bf16. x: (rows, K), groups of multiples of 128 rows; w: (E, N, K); linear scales along K."""
    functional = importlib.import_module("torch.nn.functional")
    recipe, swizzle = functional.ScalingType.BlockWise1x32, functional.SwizzleType.SWIZZLE_32_4_4
    x_scale, w_scale = (
        to_blocked(t.scale).reshape(t.shape[0], -1).view(torch.float8_e8m0fnu) for t in (x, w)
    )
    return functional.scaled_grouped_mm(
        x.data, w.data.mT, x_scale, recipe, w_scale, recipe, swizzle_a=swizzle, swizzle_b=swizzle,
        offs=offs, output_dtype=torch.bfloat16,
    )  # fmt: skip


@check
def decoding(device: torch.device) -> None:
    """Every finite E4M3 code, times 1: the tensor core's reading of the format."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    x = torch.zeros(256, 128, dtype=torch.uint8)
    x[:, 0] = codes
    w = torch.zeros(128, 128, dtype=torch.uint8)
    w[0, 0] = 0x38
    neutral = torch.full((256, 4), 127, dtype=torch.uint8)
    y = gemm("fprop", device, matrix(x, neutral), batched(w, neutral[:128]), None, out_dtype=torch.float32)
    expect_equal("codes", y[:, 0], decode(codes, MXFP8_E4M3))


# running them -----------------------------------------------------------------------------------------------------------


def run(
    device: torch.device,
    *,
    names: Sequence[str] | None = None,
    timeout: float = TIMEOUT_S,
    command: Sequence[str] = COMMAND,
) -> dict[str, Any]:
    """Run the checks, each in its own process.

    Args:
        device: a GPU of capability 10.0 or 10.3.
        names: of the checks; all if left out.
        timeout: seconds that one may take.
        command: what runs one check, given `--check NAME --device DEVICE`: a remark on stdout and exit code 0,
            or what is wrong and exit code 1.

    Returns:
        {"passed": bool, "device": str, "checks": [{"name", "passed", "seconds", "detail"}, …]}.
    """
    results: list[dict[str, Any]] = []
    for name in names or CHECKS:
        if any(not result["passed"] for result in results):
            results.append(
                {"name": name, "passed": False, "seconds": 0.0, "detail": "not run after a failure"}
            )
            continue
        start = time.monotonic()
        passed, detail = _run_one((*command, "--check", name, "--device", str(device)), timeout)
        results.append(
            {"name": name, "passed": passed, "seconds": time.monotonic() - start, "detail": detail}
        )
    return {"passed": all(r["passed"] for r in results), "device": arch.describe(device), "checks": results}


def _run_one(command: Sequence[str], timeout: float) -> tuple[bool, str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return False, f"hung: killed after {timeout:g} s"
    if done.returncode < 0:
        return False, f"crashed: {signal.Signals(-done.returncode).name}{_last_line(done.stderr)}"
    if done.returncode > 1:
        return False, f"failed: exit code {done.returncode}{_last_line(done.stderr)}"
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
        return answer["passed"], answer["detail"]
    except (IndexError, ValueError, KeyError):
        return False, f"failed: no answer{_last_line(done.stderr)}"


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return f"; {lines[-1].strip()}" if lines else ""


def run_here(name: str, device: torch.device) -> dict[str, Any]:
    """One check in this process: {"passed", "detail"}."""
    try:
        detail = CHECKS[name](device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except AssertionError as error:
        return {"passed": False, "detail": f"wrong value: {error}"}
    except Exception as error:  # whatever happens belongs into the report
        return {"passed": False, "detail": f"{type(error).__name__}: {error}"}
    return {"passed": True, "detail": detail or ""}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one check in this process and print its answer as JSON."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--check", required=True, choices=CHECKS)
    parser.add_argument("--device", required=True, type=functools.partial(torch.device))
    options = parser.parse_args(argv)
    answer = run_here(options.check, options.device)
    print(json.dumps(answer))
    return 0 if answer["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())

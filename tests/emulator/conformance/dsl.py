"""CuTe-DSL kernels, compiled by the DSL for the machine at hand: TMA atoms, tiled wgmma, cp.async, a quantiser, mx_kernels.

Unlike the PTX cases these go through the DSL's host code (tensor maps, launch). Inputs are drawn on the CPU.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import cutlass
import torch
from cutlass import BFloat16, Constexpr, Float8E4M3FN, Float32, Int32, Uint8, Uint32, cute
from cutlass.cute import arch
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import from_dlpack
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

EXAMPLES = Path(__file__).parents[3] / "tools" / "ptxsim" / "examples"


def example(name: str) -> ModuleType:
    """A module of the emulator's examples."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _tensor(
    t: torch.Tensor, dtype: type[cutlass.Numeric] | None = None, *, dynamic: bool = False
) -> cute.Tensor:
    tensor = from_dlpack(t.view(torch.uint8) if t.element_size() == 1 else t, assumed_align=16)
    if dtype is not None:
        tensor.element_type = dtype
    return tensor.mark_layout_dynamic() if dynamic else tensor


# ---- TMA load into swizzled shared memory, transposed, TMA store; partial tiles --------------------------------------

TILE = (64, 32)


@cute.kernel
def transpose_kernel(
    tma_x: cute.CopyAtom, x: cute.Tensor, tma_y: cute.CopyAtom, y: cute.Tensor,
    smem_x: cute.ComposedLayout, smem_y: cute.ComposedLayout,
):  # fmt: skip
    """y = xᵀ, a tile per block."""
    thread, _, _ = arch.thread_idx()
    i, j, _ = arch.block_idx()
    smem = SmemAllocator()
    sX = smem.allocate_tensor(tma_x.value_type, smem_x.outer, 1024, swizzle=smem_x.inner)
    sY = smem.allocate_tensor(tma_y.value_type, smem_y.outer, 1024, swizzle=smem_y.inner)
    full = smem.allocate_array(cutlass.Int64, 1)
    gX, gY = cute.local_tile(x, TILE, (i, j)), cute.local_tile(y, TILE[::-1], (j, i))
    one = cute.make_layout(1)
    tXsX, tXgX = cpasync.tma_partition(tma_x, 0, one, cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2))
    tYsY, tYgY = cpasync.tma_partition(tma_y, 0, one, cute.group_modes(sY, 0, 2), cute.group_modes(gY, 0, 2))
    warp = arch.make_warp_uniform(arch.warp_idx())
    if warp == 0:
        with arch.elect_one():
            arch.mbarrier_init(full, 1)
            arch.mbarrier_init_fence()
            arch.mbarrier_arrive_and_expect_tx(full, TILE[0] * TILE[1] * tma_x.value_type.width // 8)
        cute.copy(tma_x, tXgX[(None,)], tXsX[(None, 0)], tma_bar_ptr=full)
    arch.sync_threads()
    arch.mbarrier_wait(full, 0)
    for e in cutlass.range(thread, TILE[0] * TILE[1], 128, unroll=1):
        row, column = e % TILE[0], e // TILE[0]
        sY[column, row, 0] = sX[row, column, 0]
    arch.fence_proxy("async.shared", space="cta")
    arch.sync_threads()
    if warp == 0:
        cute.copy(tma_y, tYsY[(None, 0)], tYgY[(None,)])
        arch.cp_async_bulk_commit_group()
        arch.cp_async_bulk_wait_group(0)


@cute.jit
def transpose(x: cute.Tensor, y: cute.Tensor):
    """x (M, N) → y (N, M), both row-major."""
    smem_x = sm90.make_smem_layout_epi(x.element_type, LayoutEnum.ROW_MAJOR, TILE, 1)
    smem_y = sm90.make_smem_layout_epi(y.element_type, LayoutEnum.ROW_MAJOR, TILE[::-1], 1)
    one = (None, None, 0)
    tma_x, x_tma = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(), x, cute.slice_(smem_x, one), TILE
    )
    tma_y, y_tma = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileS2GOp(), y, cute.slice_(smem_y, one), TILE[::-1]
    )
    grid = (cute.ceil_div(x.shape[0], TILE[0]), cute.ceil_div(x.shape[1], TILE[1]), 1)
    transpose_kernel(tma_x, x_tma, tma_y, y_tma, smem_x, smem_y).launch(grid=grid, block=(128, 1, 1))


def _run_transpose(dtype: torch.dtype, device: str, rng: torch.Generator) -> torch.Tensor:
    x = torch.randn(200, 104, generator=rng).to(dtype).to(device)
    y = torch.zeros(104, 200, dtype=dtype, device=device)
    arguments = (_tensor(x), _tensor(y))
    cute.compile(transpose, *arguments)(*arguments)
    return y


# ---- cp.async with a predicate, through the DSL's copy atom ----------------------------------------------------------


@cute.kernel
def staged_copy_kernel(x: cute.Tensor, y: cute.Tensor, n: Int32):
    """16 bytes per thread by way of shared memory; threads past n read zeros."""
    thread, _, _ = arch.thread_idx()
    block, _, _ = arch.block_idx()
    i = block * 128 + thread
    atom = cute.make_copy_atom(
        cpasync.CopyG2SOp(cache_mode=cute.nvgpu.LoadCacheMode.GLOBAL), BFloat16, num_bits_per_copy=128
    )
    sX = SmemAllocator().allocate_tensor(BFloat16, cute.make_layout((8, 128)), 16)
    ok = cute.make_rmem_tensor((1,), cutlass.Boolean)
    ok[0] = i < n
    gX, gY = cute.zipped_divide(x, (8,)), cute.zipped_divide(y, (8,))
    cute.copy_atom_call(atom, gX[(None, i)], sX[(None, thread)], pred=ok)
    arch.cp_async_commit_group()
    arch.cp_async_wait_group(0)
    arch.sync_threads()
    cute.autovec_copy(sX[(None, 127 - thread)], gY[(None, i)])


@cute.jit
def staged_copy(x: cute.Tensor, y: cute.Tensor, n: Int32):
    """Every block reverses its 128 groups of 8."""
    staged_copy_kernel(x, y, n).launch(grid=(cute.size(y) // 1024, 1, 1), block=(128, 1, 1))


def _run_staged_copy(device: str, rng: torch.Generator) -> torch.Tensor:
    x = torch.randn(4096, generator=rng).to(torch.bfloat16).to(device)
    y = torch.full_like(x, float("nan"))
    arguments = (_tensor(x), _tensor(y), Int32(300))
    cute.compile(staged_copy, *arguments)(*arguments)
    return y


# ---- an MXFP8 row quantiser: one thread to a block of 32 -------------------------------------------------------------


@cute.kernel
def quantize_kernel(x: cute.Tensor, q: cute.Tensor, s: cute.Tensor, rceil: Constexpr[bool]):
    """q = round(x / 2^e), s = e + 127; finite inputs."""
    i = arch.block_idx()[0] * 128 + arch.thread_idx()[0]
    v = cute.zipped_divide(x, (32,))[(None, i)].load().to(Float32)
    amax = Float32(cute.math.absf(v).reduce(cute.ReductionOp.MAX, Float32(0), 0))
    bits = amax.bitcast(Uint32)
    e = Int32(bits >> Uint32(23)) - Int32(8)
    if cutlass.const_expr(rceil):
        e += Int32((bits & Uint32(0x7FFFFF)) > Uint32(0x600000))
    e = cutlass.min(cutlass.max(e, Int32(0)), Int32(254))
    inverse = (Uint32(Int32(254) - e) << Uint32(23)).bitcast(Float32)
    s[i] = e.to(Uint8)
    cute.zipped_divide(q, (32,))[(None, i)].store((v * inverse).to(Float8E4M3FN))


@cute.jit
def quantize(x: cute.Tensor, q: cute.Tensor, s: cute.Tensor, rceil: Constexpr[bool]):
    """x (n,) bf16 → q (n,) E4M3 codes, s (n / 32,) E8M0 bytes."""
    quantize_kernel(x, q, s, rceil).launch(grid=(cute.size(s) // 128, 1, 1), block=(128, 1, 1))


def _run_quantize(rceil: bool, device: str, rng: torch.Generator) -> torch.Tensor:
    exponents = torch.randint(-40, 41, (512, 1), generator=rng)
    smooth = torch.randn(512, 32, generator=rng) * torch.exp2(exponents.float())
    patterns = (
        torch.randint(0, 0x7F80, (512, 32), generator=rng, dtype=torch.int32)
        .to(torch.int16)
        .view(torch.bfloat16)
    )
    x = torch.cat([smooth.to(torch.bfloat16), patterns]).to(device)
    q = torch.zeros(x.numel(), dtype=torch.uint8, device=device)
    s = torch.zeros(x.numel() // 32, dtype=torch.uint8, device=device)
    arguments = (_tensor(x.view(-1)), _tensor(q, Float8E4M3FN), _tensor(s))
    cute.compile(quantize, *arguments, rceil)(*arguments)
    return torch.cat([q, s])


# ---- the Hopper example GEMM -----------------------------------------------------------------------------------------


def _run_gemm(dtype: torch.dtype, majors: str, device: str, rng: torch.Generator) -> torch.Tensor:
    module = example("hopper_gemm")
    k_tile = 128 // dtype.itemsize
    seed = int(torch.randint(0, 1 << 30, (1,), generator=rng))
    a, b, d = (t.to(device) for t in module.operands(256, 128, 3 * k_tile, dtype, *majors, seed=seed))
    module.gemm(a, b, d, module.HopperGemm((128, 128, k_tile), stages=2))
    return d


# ---- the project's own Hopper kernels --------------------------------------------------------------------------------


def _run_grouped(mode: str, recipe: str, device: str, rng: torch.Generator) -> torch.Tensor:
    """A grouped GEMM of mx_kernels over four groups, one of them empty; the rows of real tokens and their padding."""
    import mx_kernels
    from mx_core import RowMap
    from mx_core.groups import aligned_offs

    offs = torch.tensor([130, 130, 171, 300], dtype=torch.int32)
    x, dy = (torch.randn(300, n, generator=rng).bfloat16() for n in (256, 384))
    w = torch.randn(4, 384, 256, generator=rng).bfloat16()
    end = int(aligned_offs(offs)[-1])
    x, dy, w, offs = (t.to(device) for t in (x, dy, w, offs))
    keywords = {"row_map": RowMap.COMPACT, "backend": "sm90"}
    if recipe == "mxfp8":
        keywords["row_map"] = RowMap.ALIGNED
        x = mx_kernels.quantize_mx(x, offs=offs, row_map=RowMap.ALIGNED, backend="sm90")
        w = mx_kernels.quantize_mx(w, backend="sm90")
    if mode == "fprop":
        y = mx_kernels.grouped_gemm_fprop(x, w, offs, **keywords)
    elif mode == "dgrad":
        y = mx_kernels.grouped_gemm_dgrad(dy, w, offs, **keywords)
    else:
        y = mx_kernels.grouped_gemm_wgrad(dy, x, offs, **keywords)
    return y[:end] if recipe == "mxfp8" else y


RUNS: dict[str, Callable[[str, torch.Generator], torch.Tensor]] = {
    "dsl/transpose.bf16": lambda device, rng: _run_transpose(torch.bfloat16, device, rng),
    "dsl/transpose.f32": lambda device, rng: _run_transpose(torch.float32, device, rng),
    "dsl/staged_copy": _run_staged_copy,
    "dsl/quantize.floor": lambda device, rng: _run_quantize(False, device, rng),
    "dsl/quantize.rceil": lambda device, rng: _run_quantize(True, device, rng),
    "dsl/gemm.bf16.kk": lambda device, rng: _run_gemm(torch.bfloat16, "kk", device, rng),
    "dsl/gemm.bf16.mn": lambda device, rng: _run_gemm(torch.bfloat16, "mn", device, rng),
    "dsl/gemm.f16.kk": lambda device, rng: _run_gemm(torch.float16, "kk", device, rng),
    "dsl/gemm.e4m3.kk": lambda device, rng: _run_gemm(torch.float8_e4m3fn, "kk", device, rng),
    **{
        f"dsl/mx_kernels.{m}.bf16": functools.partial(_run_grouped, m, "bf16")
        for m in ("fprop", "dgrad", "wgrad")
    },
    "dsl/mx_kernels.fprop.mxfp8": functools.partial(_run_grouped, "fprop", "mxfp8"),
}


def run(name: str, device: str) -> torch.Tensor:
    """The bytes that a kernel writes on `device` ("cuda", or "cpu" inside the emulator), on the CPU, uint8."""
    rng = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    result = RUNS[name](device, rng)
    if device == "cuda":
        torch.cuda.synchronize()
    return result.cpu().contiguous().view(torch.uint8).flatten()

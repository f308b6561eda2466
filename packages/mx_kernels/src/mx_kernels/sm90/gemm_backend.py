"""The Hopper backend's grouped GEMM: checks what the kernel adds to the op's rules, picks the tile, launches."""

import dataclasses
import functools

import torch
from torch import Tensor

from mx_kernels import arch
from mx_kernels.generic import autotune
from mx_kernels.generic.backend import address, launch
from mx_kernels.generic.gemm import check_gemm_alignment, gemm_result, gemm_sizes
from mx_kernels.problem import GemmProblem
from mx_kernels.sm90 import config


class GemmBackend:
    """Mixin of the Hopper backend."""

    def why_not_gemm(self, problem: GemmProblem) -> str | None:
        """Why the kernel cannot run this GEMM."""
        try:
            config.GemmKey.of(problem, config.TileConfig())
        except ValueError as error:
            return str(error)
        return None

    def grouped_gemm(
        self,
        problem: GemmProblem,
        a: Tensor,
        a_scale: Tensor | None,
        b: Tensor,
        b_scale: Tensor | None,
        offs: Tensor | None,
        out: Tensor | None,
    ) -> Tensor:
        """See ops/gemm.py. Sizes beyond the op's rules: every row of a, b and out is a multiple of 16 bytes."""
        rows, groups, n, k = sizes = gemm_sizes(problem, a, b, offs)
        out = gemm_result(problem, sizes, a, out)
        check_gemm_alignment("sm90", a, a_scale, b, b_scale, out)
        if out.numel() == 0:
            return out
        if a.numel() == 0:  # nothing to sum
            return out if problem.accumulate else out.zero_()

        likely_rows = config.likely_rows(problem, rows, groups)
        if problem.is_mx and config.dequantize_first(problem.mode, likely_rows, groups, n, k):
            from mx_kernels.generic.dequantize import dequantize_operands

            assert a_scale is not None
            assert b_scale is not None
            a, b = dequantize_operands(problem, a, a_scale, b, b_scale, offs)
            problem, a_scale, b_scale = _of_bf16(problem), None, None

        def start(tile: config.TileConfig, out: Tensor) -> None:
            clusters = arch.num_sms(a.device) // tile.cluster_size
            counter = ticket_counter(a.device)
            pointers = (address(x) for x in (a, a_scale, b, b_scale, offs, out, counter))
            launch(
                _kernel(problem, tile, arch.active_emulation()),
                a.device,
                *pointers,
                rows,
                n,
                k,
                groups,
                clusters,
            )

        columns = n if problem.mode == "fprop" else k
        estimate = config.choose_tile(problem.mode, problem.is_mx, likely_rows, groups, columns)
        start(autotune.tuned_tile(problem, sizes, out, lambda: _candidates(problem), start, estimate), out)
        return out


#: By device and stream: launches of one stream follow each other, so they can share one.
_counters: dict[tuple[int, int], Tensor] = {}


def ticket_counter(device: torch.device) -> Tensor:
    """A zero, int32 (1,), that no launch beside the next one uses; every launch leaves it zero (device/gemm_tickets.py)."""
    if device.type == "cpu" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(
            1, dtype=torch.int32, device=device
        )  # a graph may replay beside the stream that captured it
    key = device.index, torch._C._cuda_getCurrentRawStream(device.index)
    if key not in _counters:
        _counters[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return _counters[key]


@functools.cache
def _of_bf16(problem: GemmProblem) -> GemmProblem:
    """The same problem with BF16 operands."""
    return dataclasses.replace(problem, a_format="bf16", b_format="bf16")


@functools.cache
def _candidates(problem: GemmProblem) -> tuple[config.TileConfig, ...]:
    return config.GemmKey.possible(problem, config.TILES)


@functools.cache
def _kernel(problem: GemmProblem, tile: config.TileConfig, emulation):
    from mx_kernels import jit
    from mx_kernels.sm90.gemm import GroupedGemm

    key = config.GemmKey.of(problem, tile)
    return jit.compiled(key, "sm_90a", GroupedGemm(key).build)

"""The Blackwell backend: the memory-bound ops of generic/, and the grouped GEMM of this folder."""

import contextlib
import functools
from collections.abc import Generator

import torch
from torch import Tensor

from mx_kernels import arch
from mx_kernels.generic import autotune
from mx_kernels.generic.backend import MemoryBoundBackend, address, launch
from mx_kernels.generic.gemm import check_gemm_alignment, gemm_result, gemm_sizes
from mx_kernels.generic.narrow import NarrowFormats
from mx_kernels.problem import GemmProblem, Problem
from mx_kernels.sm100 import config

_forced: config.TileConfig | None = None


@contextlib.contextmanager
def forced_tile(tile: config.TileConfig) -> Generator[None]:
    """Use this tile for every GEMM in the block instead of the estimate's (in a smaller cluster where it does not fit)."""
    global _forced
    before, _forced = _forced, tile
    try:
        yield
    finally:
        _forced = before


class Sm100Backend(MemoryBoundBackend):
    """See the module."""

    name = "sm100"
    targets = ("sm_100a", "sm_103a")

    def why_not(self, problem: Problem, device: torch.device) -> str | None:
        """Why this backend cannot run the problem on this device."""
        if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 12:
            return f"needs tcgen05 tensor cores, which {arch.describe(device)} does not have"
        reason = super().why_not(problem, device)
        if reason is None and isinstance(problem, GemmProblem):
            try:
                config.GemmKey.of(problem, config.TILES[0])
            except ValueError as error:
                return str(error)
        return reason

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
        """See ops/gemm.py. Beyond the op's rules, rows of a, b and out must be multiples of 16 bytes."""
        rows, groups, n, k = sizes = gemm_sizes(problem, a, b, offs)
        out = gemm_result(problem, sizes, a, out)
        check_gemm_alignment("sm100", a, a_scale, b, b_scale, out)
        if out.numel() == 0:
            return out
        if a.numel() == 0:  # nothing to sum
            return out if problem.accumulate else out.zero_()
        device, (columns, other) = a.device, (n, k) if problem.mode == "fprop" else (k, n)
        extents = (problem.mode, problem.a_format, rows, groups, columns, other, arch.num_sms(device))

        def start(tile: config.TileConfig, out: Tensor) -> None:
            tile, clusters = _fitting(tile, device)
            pointers = [None if x is None else address(x) for x in (a, a_scale, b, b_scale, offs, out)]
            kernel = _kernel(problem, tile, arch.target_of(device), arch.active_emulation())
            launch(kernel, device, *pointers, rows, n, k, groups, clusters)

        tile = _forced
        if tile is None:
            estimate = config.choose_tile(*extents)
            tile = autotune.tuned_tile(
                problem, sizes, out, lambda: config.candidates(*extents), start, estimate
            )
        start(tile, out)
        return out


def _fitting(tile: config.TileConfig, device: torch.device) -> tuple[config.TileConfig, int]:
    """The tile, in a smaller cluster if the GPU cannot hold this one, and how many clusters it holds at a time."""
    clusters = _resident_clusters(device, tile.cluster_size, arch.num_sms(device))
    while clusters == 0 and (smaller := tile.smaller_cluster()) is not None:
        tile, clusters = smaller, _resident_clusters(device, smaller.cluster_size, arch.num_sms(device))
    return tile, max(clusters, 1)


@functools.cache
def _resident_clusters(device: torch.device, size: int, sms: int) -> int:
    """Clusters of `size` CTAs that run at a time: fewer than SMs / size where a GPC's SMs are no multiple of it.

    Pairs always fit, because SMs come in pairs (TPCs); for more the driver is asked.
    """
    if size <= 2 or device.type == "cpu":
        return sms // size
    from cutlass.utils import HardwareInfo

    with torch.cuda.device(device):
        return HardwareInfo(torch.cuda.current_device()).get_max_active_clusters(size)


@functools.cache
def _kernel(problem: GemmProblem, tile: config.TileConfig, target: str, emulation):
    from mx_kernels import jit
    from mx_kernels.sm100.gemm import GroupedGemm

    key = config.GemmKey.of(problem, tile)
    return jit.compiled(key, target, GroupedGemm(key).build)


class _WithNarrowFormats(NarrowFormats, Sm100Backend):
    pass


BACKEND = _WithNarrowFormats()

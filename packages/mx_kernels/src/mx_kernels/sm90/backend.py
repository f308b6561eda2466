"""The Hopper backend: the memory-bound ops of generic/, and the GEMMs of this folder."""

import torch

from mx_kernels.generic.backend import MemoryBoundBackend
from mx_kernels.generic.narrow import NarrowFormats, with_e4m3
from mx_kernels.problem import GemmProblem, Problem
from mx_kernels.sm90.gemm_backend import GemmBackend


class Sm90Backend(NarrowFormats, GemmBackend, MemoryBoundBackend):
    """See the module."""

    name = "sm90"
    targets = ("sm_90a",)

    def why_not(self, problem: Problem, device: torch.device) -> str | None:
        """Why this backend cannot run the problem on this device."""
        problem = with_e4m3(problem)
        reason = super().why_not(problem, device)
        if reason is None and isinstance(problem, GemmProblem):
            return self.why_not_gemm(problem)
        return reason


BACKEND = Sm90Backend()

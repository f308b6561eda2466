"""The Hopper backend: the memory-bound ops of generic/, and the GEMMs of this folder."""

import torch

from mx_kernels.generic.backend import MemoryBoundBackend
from mx_kernels.generic.narrow import NarrowFormats
from mx_kernels.problem import GemmProblem, Problem
from mx_kernels.sm90.gemm_backend import GemmBackend


class Sm90Backend(GemmBackend, MemoryBoundBackend):
    """See the module."""

    name = "sm90"
    targets = ("sm_90a",)

    def why_not(self, problem: Problem, device: torch.device) -> str | None:
        """Why this backend cannot run the problem on this device."""
        reason = super().why_not(problem, device)
        if reason is None and isinstance(problem, GemmProblem):
            return self.why_not_gemm(problem)
        return reason


class _WithNarrowFormats(NarrowFormats, Sm90Backend):
    pass


BACKEND = _WithNarrowFormats()

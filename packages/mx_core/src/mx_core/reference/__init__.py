"""The definitions that kernels are tested against, and that the CPU backend runs."""

from mx_core.reference.gemm import grouped_dgrad, grouped_fprop, grouped_wgrad
from mx_core.reference.routing import combine, combine_backward, gather, route, slot_weights
from mx_core.reference.swiglu import dswiglu, swiglu

__all__ = [
    "combine",
    "combine_backward",
    "dswiglu",
    "gather",
    "grouped_dgrad",
    "grouped_fprop",
    "grouped_wgrad",
    "route",
    "slot_weights",
    "swiglu",
]

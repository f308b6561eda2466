"""MXFP8 kernels for mixture-of-experts training on Blackwell, Hopper and CPU.

`moe_mlp` and `MXExperts` are the MoE layer, `mx_grouped_mm` and `mx_linear` its products alone; the other functions are
the steps they are made of. Importing this needs no GPU and no kernel library. See docs/kernels.md.
"""

from mx_kernels.experts import MXExperts, moe_mlp
from mx_kernels.linear import mx_grouped_mm, mx_linear
from mx_kernels.ops import (
    Routing,
    SwigluGrads,
    combine,
    dswiglu_quantize,
    gather,
    gather_quantize,
    gather_quantize_dual,
    grouped_gemm_dgrad,
    grouped_gemm_fprop,
    grouped_gemm_wgrad,
    quantize_mx,
    quantize_mx_dual,
    route,
    swiglu,
    swiglu_quantize,
)
from mx_kernels.recipe import RECIPES, Recipe
from mx_kernels.registry import NoBackendError
from mx_kernels.weights import PreparedWeight, PreparedWeights, prepare_weights

__all__ = [
    "RECIPES",
    "MXExperts",
    "NoBackendError",
    "PreparedWeight",
    "PreparedWeights",
    "Recipe",
    "Routing",
    "SwigluGrads",
    "combine",
    "dswiglu_quantize",
    "gather",
    "gather_quantize",
    "gather_quantize_dual",
    "grouped_gemm_dgrad",
    "grouped_gemm_fprop",
    "grouped_gemm_wgrad",
    "moe_mlp",
    "mx_grouped_mm",
    "mx_linear",
    "prepare_weights",
    "quantize_mx",
    "quantize_mx_dual",
    "route",
    "swiglu",
    "swiglu_quantize",
]

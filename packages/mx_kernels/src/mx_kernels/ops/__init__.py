"""What users call on tensors, and the torch.ops.mx.* ops beneath: check → problem → backend. Never imports the DSL."""

from mx_kernels.ops.gemm import grouped_gemm_dgrad, grouped_gemm_fprop, grouped_gemm_wgrad
from mx_kernels.ops.quantize import quantize_mx, quantize_mx_dual
from mx_kernels.ops.route import Routing, combine, gather, gather_quantize, gather_quantize_dual, route
from mx_kernels.ops.swiglu import SwigluGrads, dswiglu_quantize, swiglu, swiglu_quantize

__all__ = [
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
    "quantize_mx",
    "quantize_mx_dual",
    "route",
    "swiglu",
    "swiglu_quantize",
]

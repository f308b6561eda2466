"""The same formats in outside libraries."""

import gfloat.formats
import ml_dtypes

ML_DTYPES = {
    "mxfp8_e4m3": ml_dtypes.float8_e4m3fn,
    "mxfp8_e5m2": ml_dtypes.float8_e5m2,
    "mxfp6_e3m2": ml_dtypes.float6_e3m2fn,
    "mxfp6_e2m3": ml_dtypes.float6_e2m3fn,
    "mxfp4_e2m1": ml_dtypes.float4_e2m1fn,
}
GFLOAT = {
    "mxfp8_e4m3": gfloat.formats.format_info_ocp_e4m3,
    "mxfp8_e5m2": gfloat.formats.format_info_ocp_e5m2,
    "mxfp6_e3m2": gfloat.formats.format_info_ocp_e3m2,
    "mxfp6_e2m3": gfloat.formats.format_info_ocp_e2m3,
    "mxfp4_e2m1": gfloat.formats.format_info_ocp_e2m1,
    "mxint8": gfloat.formats.format_info_ocp_int8,
}

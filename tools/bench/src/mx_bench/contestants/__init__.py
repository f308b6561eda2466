"""Other libraries' kernels beside this project's: each optional, and never able to stop a run.

A module here is one library: `NAME` for tables, `PACKAGE` to import, and any of the functions `gemm`, `quantize` and `layer`, which import it
and return contestants. Whatever goes wrong in it (not installed, another version's interface, a GPU that it does not
support) becomes that contestant's note. The interfaces are the libraries' public ones; versions they were written against stand
in the modules.
"""

import importlib.util
from types import ModuleType

from mx_bench.cases import Call, reason_of
from mx_bench.contestants import deep_gemm, quack, torch_scaled, torchao, transformer_engine
from mx_bench.contestants.inputs import GemmInputs, LayerCall, LayerInputs, QuantizeInputs

LIBRARIES: tuple[ModuleType, ...] = (torch_scaled, torchao, transformer_engine, deep_gemm, quack)


def gemm_contestants(inputs: GemmInputs) -> dict[str, Call | str]:
    """Grouped GEMMs of all libraries for one mode of one problem."""
    return _collect("gemm", inputs)


def quantize_contestants(inputs: QuantizeInputs) -> dict[str, Call | str]:
    """MXFP8 quantisers of all libraries for one orientation."""
    return _collect("quantize", inputs)


def layer_contestants(inputs: LayerInputs) -> dict[str, LayerCall | str]:
    """MoE layers made of each library's parts."""
    return _collect("layer", inputs)


def _collect(kind: str, inputs: object) -> dict:
    found: dict = {}
    for library in LIBRARIES:
        make = getattr(library, kind, None)
        if make is None:
            continue
        try:
            installed = importlib.util.find_spec(library.PACKAGE) is not None
            found |= make(inputs) if installed else {library.NAME: "not installed"}
        except Exception as error:  # somebody else's code: whatever it raises, the rest goes on
            found[library.NAME] = reason_of(error)
    return found


__all__ = [
    "LIBRARIES",
    "GemmInputs",
    "LayerCall",
    "LayerInputs",
    "QuantizeInputs",
    "gemm_contestants",
    "layer_contestants",
    "quantize_contestants",
]

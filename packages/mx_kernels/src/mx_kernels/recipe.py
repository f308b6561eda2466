"""Which format and scale rule a layer's GEMM operands take."""

from dataclasses import dataclass

from mx_core.checks import check_choice, check_format
from mx_core.formats import ScaleRounding

from mx_kernels.problem import one_of


@dataclass(frozen=True, slots=True)
class Recipe:
    """Element format and scale rounding of all three GEMMs of a layer. `format` None: no quantisation."""

    format: str | None
    rounding: ScaleRounding = ScaleRounding.RCEIL

    def __post_init__(self):
        if self.format is not None:
            check_format("format", self.format)
        object.__setattr__(self, "rounding", check_choice("rounding", self.rounding, ScaleRounding))

    @property
    def is_mx(self) -> bool:
        """Whether operands are quantised."""
        return self.format is not None


#: "mxfp8" is the default everywhere (arXiv 2506.08027); "bf16" runs the same kernels on unquantised operands; the
#: others are controls and studies (FP6 and FP4 are slow on GPUs, see generic/narrow.py; mxint8 is for the CPU backend only).
RECIPES = {
    "bf16": Recipe(None),
    "mxfp8": Recipe("mxfp8_e4m3"),
    "mxfp8_floor": Recipe("mxfp8_e4m3", ScaleRounding.FLOOR),
    "mxfp8_e5m2": Recipe("mxfp8_e5m2"),
    "mxfp6_e2m3": Recipe("mxfp6_e2m3"),
    "mxfp6_e3m2": Recipe("mxfp6_e3m2"),
    "mxfp4": Recipe("mxfp4_e2m1"),
    "mxint8": Recipe("mxint8"),
}


def as_recipe(recipe: str | Recipe) -> Recipe:
    """A recipe by name or as it is."""
    return recipe if isinstance(recipe, Recipe) else RECIPES[one_of("recipe", tuple(RECIPES), recipe)]

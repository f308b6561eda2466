"""The one switch: which precision names exist, and what each means for the model."""

from dataclasses import dataclass

import torch
from mx_kernels import RECIPES
from mx_kernels.arch import target_of

from mx_trainer.errors import ConfigError
from mx_trainer.faults import FAULTY

PRECISIONS = ("fp32", *RECIPES, *FAULTY)
LINEAR_PRECISIONS = ("high", *(name for name, recipe in RECIPES.items() if recipe.is_mx))


@dataclass(frozen=True)
class Precision:
    """Dtypes and recipes as the model's modules use them."""

    activations: torch.dtype
    """Residual stream, attention, head."""
    expert_dtype: torch.dtype
    """Operands of the expert GEMMs before any quantisation."""
    expert_recipe: str
    """A name in `mx_kernels.recipe.RECIPES`, or "bf16": no quantisation."""
    linear_recipe: str | None
    """Recipe of the dense linears; None keeps them in the activations' dtype."""


def resolve_precision(name: str, linear: str, activations: str, device: torch.device) -> Precision:
    """Map the command line's words to a `Precision`.

    `fp32` is a check on the rest: unquantised experts with FP32 operands, FP32 activations.
    """
    if activations == "auto":
        activations = "bfloat16" if device.type == "cuda" and name != "fp32" else "float32"
    return Precision(
        activations=getattr(torch, activations),
        expert_dtype=torch.float32 if name == "fp32" else torch.bfloat16,
        expert_recipe="bf16" if name == "fp32" else FAULTY.get(name, name),
        linear_recipe=None if linear == "high" else linear,
    )


def resolve_device(name: str) -> torch.device:
    """`auto` is the GPU if mx_kernels has kernels for it, else the CPU.

    Raises:
        ConfigError: for a device that is not there.
    """
    if name == "auto":
        usable = torch.cuda.is_available() and target_of(torch.device("cuda")) is not None
        return torch.device("cuda" if usable else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"--device must be auto, cpu or cuda, got {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device must be auto, cpu or cuda, got {name!r}")
    if device.type == "cuda" and (
        not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()
    ):
        raise ConfigError(
            f"--device {name}: not on this machine ({torch.cuda.device_count()} CUDA devices found)"
        )
    return device

"""Differentiable grouped and dense matrix products: mx_grouped_mm, mx_linear."""

import math
from typing import Any

import torch
from mx_core.checks import expected
from torch import Tensor

from mx_kernels.autograd import GroupedLinear, GroupedOuter
from mx_kernels.ops.checks import MULTIPLE, check_offs
from mx_kernels.ops.library import define_composite
from mx_kernels.problem import FLOAT_DTYPES
from mx_kernels.recipe import Recipe, as_recipe
from mx_kernels.weights import PreparedWeight


def in_autocast_dtype(x: Tensor) -> Tensor:
    """x, cast as torch's own matrix products cast it inside torch.autocast."""
    if torch.is_autocast_enabled(x.device.type):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


def check_float(**tensors: Tensor) -> None:
    """TypeError unless all are bf16 or fp32 tensors; ValueError unless they are on one device."""
    first_name, first = next(iter(tensors.items()))
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(expected(name, "a torch.Tensor", type(x).__name__))
        if x.dtype not in FLOAT_DTYPES:
            raise TypeError(expected(name, "torch.bfloat16 or torch.float32", x.dtype))
        if x.device != first.device:
            raise ValueError(expected(name, f"{first_name}'s device, {first.device}", x.device))


def prepared_parts(
    name: str, wq: PreparedWeight | None, w: Tensor, recipe: Recipe
) -> tuple[tuple[Tensor, Tensor], ...]:
    """(data, scale) of w's prepared orientations; ValueError if they are not those of w and of the recipe."""
    if wq is None:
        return ()
    if not isinstance(wq, PreparedWeight):
        raise TypeError(expected(name, "one weight of prepare_weights(…), wq[i]", type(wq).__name__))
    if wq.row.shape != w.shape or wq.row.format.name != recipe.format or wq.row.device != w.device:
        raise ValueError(
            expected(
                name,
                f"prepared {tuple(w.shape)} in {recipe.format} on {w.device}",
                f"{wq.row} on {wq.row.device}",
            )
        )
    return wq.parts()


def mx_grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    *,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    recipe: str | Recipe = "mxfp8",
    wq: PreparedWeight | None = None,
    backend: str = "auto",
) -> Tensor:
    """torch.nn.functional.grouped_mm with quantised operands, forward and backward.

    | mat_a | mat_b | groups along | result |
    |---|---|---|---|
    | (M, K) | (E, K, N) | M | (M, N); rows at and past offs[-1] are 0 |
    | (M, K) | (K, N) | K | (E, M, N); exact 0 for an empty group |
    | (E, M, K) | (K, N) | N | (M, N); columns at and past offs[-1] are 0 |
    | (E, M, K) | (E, K, N) | none: offs is None | (E, M, N) |

    Fast without a copy where weights are stored as (E, N, K) and passed transposed, as torch recommends; other strides
    are copied first.

    Args:
        mat_a: bf16 or fp32.
        mat_b: bf16 or fp32.
        offs: int32 (E,), ascending ends of the groups; needed where an operand is 2-D.
        bias: refused unless None (torch refuses it too).
        out_dtype: torch.bfloat16 or torch.float32; default mat_a's.
        recipe: name or Recipe; "bf16" multiplies in mat_a's dtype.
        wq: `prepare_weights(w)[0]` of w = mat_b.transpose(1, 2), in the first case.
        backend: "auto", "cpu", "sm90" or "sm100".

    Raises:
        TypeError, ValueError: with what was expected and what came. The two sizes of every weight-like operand must be
            multiples of 32 (bf16 recipe: of 16 bytes); a size that is split into groups may be anything.
        NoBackendError: no backend can run it; with each one's reason.
    """
    recipe = as_recipe(recipe)
    check_float(mat_a=mat_a, mat_b=mat_b)
    mat_a, mat_b = in_autocast_dtype(mat_a), in_autocast_dtype(mat_b)
    out_dtype = mat_a.dtype if out_dtype is None else out_dtype
    ranks = (mat_a.ndim, mat_b.ndim)
    if ranks not in ((2, 3), (2, 2), (3, 2), (3, 3)):
        raise ValueError(
            expected(
                "mat_a, mat_b", "2 or 3 axes each", f"shapes {tuple(mat_a.shape)} and {tuple(mat_b.shape)}"
            )
        )
    if mat_a.shape[-1] != mat_b.shape[-2]:
        raise ValueError(
            expected("mat_a and mat_b", "the same K", f"shapes {tuple(mat_a.shape)} and {tuple(mat_b.shape)}")
        )
    if bias is not None:
        raise ValueError(
            expected("bias", "None (torch.nn.functional.grouped_mm does not take one either)", "a tensor")
        )
    if out_dtype not in FLOAT_DTYPES:
        raise TypeError(expected("out_dtype", "torch.bfloat16 or torch.float32", out_dtype))
    if wq is not None and ranks != (2, 3):
        raise ValueError(expected("wq", "None unless mat_a is 2-D and mat_b is 3-D", "a prepared weight"))
    if (offs is None) != (ranks == (3, 3)):
        raise ValueError(
            expected(
                "offs",
                "a tensor where an operand is 2-D, None where both are 3-D",
                "None" if offs is None else "a tensor",
            )
        )
    if offs is not None:
        check_offs(offs, mat_a.device)

    multiple = MULTIPLE if recipe.is_mx else 16 // mat_a.element_size()
    rest: tuple[Any, ...] = (out_dtype, recipe, backend)
    if ranks == (2, 2):
        _check_sizes(multiple, M=mat_a.shape[0], N=mat_b.shape[1])
        return GroupedOuter.apply(mat_a.t().contiguous(), mat_b.contiguous(), offs, *rest)

    if ranks == (3, 2):  # the transposed product: rows of mat_b.T, weights mat_a
        x, w = mat_b.t(), mat_a
    else:
        x, w = mat_a.flatten(0, -2), mat_b.transpose(1, 2)
    E, N, K = w.shape
    _check_sizes(multiple, **{"M" if ranks == (3, 2) else "N": N, "K": K})
    if ranks == (3, 3):
        M = mat_a.shape[1]
        if mat_a.shape[0] != E or E < 1:
            raise ValueError(
                expected("mat_a and mat_b", "the same first size, at least 1", f"{mat_a.shape[0]} and {E}")
            )
        offs = torch.arange(1, E + 1, dtype=torch.int32, device=x.device) * M
    elif offs is not None and offs.shape[0] != E:
        raise ValueError(expected("offs", f"{E} groups, one for each weight", f"{offs.shape[0]} groups"))
    prepared = prepared_parts("wq", wq, w, recipe)
    y = GroupedLinear.apply(
        x.contiguous(), w.contiguous(), offs, *rest, *(t for pair in prepared for t in pair)
    )
    if ranks == (3, 2):
        return y.t()
    return torch.ops.aten._unsafe_view(y, (E, mat_a.shape[1], N)) if ranks == (3, 3) else y


def mx_linear(
    x: Tensor,
    w: Tensor,
    *,
    recipe: str | Recipe = "mxfp8",
    wq: PreparedWeight | None = None,
    backend: str = "auto",
) -> Tensor:
    """X @ w.T with quantised operands, forward and backward.

    Args:
        x: (…, K), bf16 or fp32.
        w: (N, K), bf16 or fp32; N and K multiples of 32.
        recipe: name or Recipe; "bf16" multiplies in x's dtype.
        wq: `prepare_weights(w)[0]`.
        backend: "auto", "cpu", "sm90" or "sm100".

    Returns:
        (…, N) in x's dtype.
    """
    recipe = as_recipe(recipe)
    check_float(x=x, w=w)
    x = in_autocast_dtype(x)
    if w.ndim != 2 or x.ndim < 1 or x.shape[-1] != w.shape[-1]:
        raise ValueError(
            expected("x, w", "(…, K) and (N, K)", f"shapes {tuple(x.shape)} and {tuple(w.shape)}")
        )
    N, K = w.shape
    _check_sizes(MULTIPLE if recipe.is_mx else 16 // x.element_size(), N=N, K=K)
    # The one group of a grouped product: E = 1.
    prepared = prepared_parts("wq", wq, w, recipe)
    parts = (t.unsqueeze(0) for pair in prepared for t in pair)
    y = GroupedLinear.apply(
        x.reshape(math.prod(x.shape[:-1]), K).contiguous(),
        w.contiguous().unsqueeze(0),
        None,
        x.dtype,
        recipe,
        backend,
        *parts,
    )
    return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], N))  # not a view for autograd: `y` is nowhere else


def _check_sizes(multiple: int, **sizes: int) -> None:
    for name, size in sizes.items():
        if size % multiple != 0:
            raise ValueError(expected(name, f"a multiple of {multiple}", size))


define_composite(
    "mx_grouped_mm(Tensor mat_a, Tensor mat_b, *, Tensor? offs=None, Tensor? bias=None, ScalarType? out_dtype=None, "
    "str recipe='mxfp8', str backend='auto') -> Tensor",
    mx_grouped_mm,
)
define_composite(
    "mx_linear(Tensor x, Tensor w, *, str recipe='mxfp8', str backend='auto') -> Tensor", mx_linear
)

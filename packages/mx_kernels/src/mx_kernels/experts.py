"""The experts of an MoE layer: `moe_mlp`, and `MXExperts`, the module around it."""

import torch
from mx_core.checks import expected
from torch import Tensor, nn

from mx_kernels.autograd import MoeMlp
from mx_kernels.linear import check_float, in_autocast_dtype, prepared_parts
from mx_kernels.ops.checks import MULTIPLE
from mx_kernels.ops.library import define_composite
from mx_kernels.problem import FLOAT_DTYPES, ID_DTYPES
from mx_kernels.recipe import Recipe, as_recipe
from mx_kernels.weights import PreparedWeights, prepare_weights


def moe_mlp(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w1: Tensor,
    w2: Tensor,
    *,
    wq: PreparedWeights | None = None,
    recipe: str | Recipe = "mxfp8",
    backend: str = "auto",
) -> Tensor:
    """out[t] = Σ_j weights[t, j] · W2[e] @ (silu(gate) · up), (gate, up) = W1[e] @ x[t], e = ids[t, j].

    Differentiable with respect to x, topk_weights, w1 and w2; work for inputs that need no gradient is left out.
    Nothing waits for the device, and no shape depends on the routing.

    Args:
        x: (…, D), bf16 or fp32.
        topk_ids: int32 or int64 (…, k), the experts of every token; ids outside [0, E) are dropped.
        topk_weights: (…, k), router weights, used in float32.
        w1: (E, 2H, D), gate in rows [0, H), up in [H, 2H); bf16 or fp32.
        w2: (E, D, H), bf16 or fp32.
        wq: `prepare_weights(w1, w2, recipe=recipe)`: quantised once per step instead of at every call.
        recipe: name or Recipe; "bf16" runs the same flow without quantisation, in x's dtype.
        backend: "auto", "cpu", "sm90" or "sm100".

    Returns:
        x's shape, x's dtype (inside torch.autocast: its dtype).

    Raises:
        TypeError, ValueError: with what was expected and what came; D and H must be multiples of 32.
        NoBackendError: no backend can run it; with each one's reason.
    """
    recipe = as_recipe(recipe)
    check_float(x=x, w1=w1, w2=w2)
    x = in_autocast_dtype(x)
    E, D, _ = _check_shapes(x, topk_ids, topk_weights, w1, w2)
    prepared = ()
    if wq is not None:
        if not isinstance(wq, PreparedWeights) or len(wq) != 2:
            raise TypeError(expected("wq", "prepare_weights(w1, w2)", wq))
        if wq.recipe != recipe:
            raise ValueError(expected("wq", f"weights prepared for {recipe}", wq.recipe))
        for i, w in enumerate((w1, w2)):
            prepared_parts(f"wq[{i}]", wq[i], w, recipe)  # refuses those of other weights
        prepared = wq.tensors()

    k = topk_ids.shape[-1]
    weights_Tk = topk_weights.to(torch.float32).reshape(-1, k).contiguous()
    slot_of, token_of, offs = torch.ops.mx.route(topk_ids.reshape(-1, k).contiguous(), E, backend)  # F0
    out = MoeMlp.apply(
        x.reshape(-1, D).contiguous(), weights_Tk, w1.contiguous(), w2.contiguous(),
        slot_of, token_of, offs, recipe, backend, *prepared,
    )  # fmt: skip
    return torch.ops.aten._unsafe_view(out, x.shape)  # not a view for autograd: `out` is nowhere else


def _check_shapes(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w1: Tensor, w2: Tensor
) -> tuple[int, int, int]:
    """E, D, H of arguments that fit together."""
    for name, t in {"topk_ids": topk_ids, "topk_weights": topk_weights}.items():
        if not isinstance(t, Tensor):
            raise TypeError(expected(name, "a torch.Tensor", type(t).__name__))
    if topk_ids.dtype not in ID_DTYPES:
        raise TypeError(expected("topk_ids", "torch.int32 or torch.int64", topk_ids.dtype))
    if not topk_weights.is_floating_point():
        raise TypeError(expected("topk_weights", "a floating-point tensor", topk_weights.dtype))
    for name, t in {"topk_ids": topk_ids, "topk_weights": topk_weights}.items():
        if t.device != x.device:
            raise ValueError(expected(name, f"x's device, {x.device}", t.device))
    if w1.ndim != 3 or w2.ndim != 3:
        raise ValueError(
            expected("w1, w2", "(E, 2H, D) and (E, D, H)", f"shapes {tuple(w1.shape)} and {tuple(w2.shape)}")
        )
    E, D, H = w2.shape
    if w1.shape != (E, 2 * H, D):
        raise ValueError(
            expected("w1", f"shape ({E}, {2 * H}, {D}) for w2 {tuple(w2.shape)}", f"shape {tuple(w1.shape)}")
        )
    if E < 1 or D < 1 or D % MULTIPLE != 0 or H % MULTIPLE != 0:
        raise ValueError(
            expected("E, D, H", f"E and D >= 1, D and H multiples of {MULTIPLE}", f"{E}, {D}, {H}")
        )
    if x.ndim < 2 or x.shape[-1] != D:
        raise ValueError(expected("x", f"shape (…, {D})", f"shape {tuple(x.shape)}"))
    if topk_ids.ndim != x.ndim or topk_ids.shape[:-1] != x.shape[:-1] or topk_ids.shape[-1] < 1:
        raise ValueError(
            expected(
                "topk_ids",
                f"shape ({', '.join(map(str, x.shape[:-1]))}, k)",
                f"shape {tuple(topk_ids.shape)}",
            )
        )
    if topk_weights.shape != topk_ids.shape:
        raise ValueError(
            expected(
                "topk_weights",
                f"topk_ids' shape {tuple(topk_ids.shape)}",
                f"shape {tuple(topk_weights.shape)}",
            )
        )
    return E, D, H


define_composite(
    "moe_mlp(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w1, Tensor w2, *, str recipe='mxfp8', "
    "str backend='auto') -> Tensor",
    moe_mlp,
)


class MXExperts(nn.Module):
    """The experts of one MoE layer: w1 (E, 2H, D), w2 (E, D, H), forward by `moe_mlp`.

    Args:
        num_experts: E.
        dim: D, a multiple of 32.
        hidden: H, a multiple of 32.
        recipe: name or Recipe.
        backend: "auto", "cpu", "sm90" or "sm100".
        device: of the parameters.
        dtype: of the parameters.
    """

    def __init__(
        self,
        num_experts: int,
        dim: int,
        hidden: int,
        *,
        recipe: str | Recipe = "mxfp8",
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if num_experts < 1 or dim % MULTIPLE != 0 or hidden % MULTIPLE != 0 or min(dim, hidden) < 1:
            raise ValueError(
                expected(
                    "num_experts, dim, hidden",
                    f"E >= 1, D and H positive multiples of {MULTIPLE}",
                    f"{num_experts}, {dim}, {hidden}",
                )
            )
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if dtype not in FLOAT_DTYPES:
            raise TypeError(expected("dtype", "torch.bfloat16 or torch.float32", dtype))
        self.recipe, self.backend = as_recipe(recipe), backend
        self.w1 = nn.Parameter(torch.empty(num_experts, 2 * hidden, dim, device=device, dtype=dtype))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden, device=device, dtype=dtype))
        self.prepared: PreparedWeights | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in ±1/sqrt(fan-in), as torch.nn.Linear."""
        for w in (self.w1, self.w2):
            nn.init.uniform_(w, -(w.shape[-1] ** -0.5), w.shape[-1] ** -0.5)
        if self.prepared is not None:
            self.prepared.refresh()

    def prepare(
        self, optimizer: torch.optim.Optimizer | None = None, *, orientations: str = "both"
    ) -> PreparedWeights:
        """Quantise the weights once per step from now on; refreshed after load_state_dict and `optimizer.step()`.

        See mx_kernels.weights for what changes weights unseen, and then needs `prepared.refresh()`.
        """
        if self.prepared is not None:
            self.prepared.detach()
        self.prepared = prepare_weights(
            self.w1, self.w2, orientations=orientations, recipe=self.recipe, backend=self.backend
        ).attach(self)
        if optimizer is not None:
            self.prepared.attach(optimizer)
        return self.prepared

    def _apply(self, fn, recurse=True):
        """`.to`, `.cuda`, `.bfloat16`, …: the prepared weights follow."""
        super()._apply(fn, recurse)
        if self.prepared is not None:
            self.prepared.follow(self.w1, self.w2)
        return self

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """X (…, D), topk_ids and topk_weights (…, k) → (…, D)."""
        return moe_mlp(
            x,
            topk_ids,
            topk_weights,
            self.w1,
            self.w2,
            wq=self.prepared,
            recipe=self.recipe,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        """Sizes and recipe."""
        E, D, H = self.w2.shape
        return f"experts={E}, dim={D}, hidden={H}, recipe={self.recipe.format or 'bf16'}"

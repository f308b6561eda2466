"""Weights quantised once per optimiser step, kept in fixed buffers.

`prepare_weights(w1, w2)` quantises; `PreparedWeights.refresh()` does it again in place, so that CUDA-graph replays see
the new values. `attach` calls it after every optimiser step or load_state_dict. Nothing looks at a parameter's version
counter: fused optimisers, graph replays and `.data` edits do not move it. Whoever changes weights in another way calls
`refresh` himself:

- after `w.data.copy_(…)` or any other edit outside the optimiser: `wq.refresh()`;
- under FSDP, whose parameters are shards, after every all-gather: `wq.refresh(full_w1, full_w2)`. With FSDP2 that is a forward
  pre-hook: `wq = experts.prepare(); fully_shard(experts); wq.detach()`, then
  `experts.register_forward_pre_hook(lambda m, _: wq.refresh(m.w1, m.w2))`.
"""

from typing import Any, NamedTuple

import torch
from mx_core import FORMATS, MXTensor, ScaleLayout
from mx_core.checks import expected
from torch import Tensor, nn

from mx_kernels.ops.quantize import quantize_mx, quantize_mx_dual
from mx_kernels.problem import FLOAT_DTYPES, one_of
from mx_kernels.recipe import Recipe, as_recipe

ORIENTATIONS = ("both", "row_only")


class PreparedWeight(NamedTuple):
    """One weight (E, N, K), quantised along K for fprop and along N for dgrad (None with "row_only")."""

    row: MXTensor
    col: MXTensor | None

    def parts(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """(data, scale) of each orientation there is."""
        return tuple((mx.data, mx.scale) for mx in self if mx is not None)


class PreparedWeights:
    """Quantised copies of weights, in the order given to `prepare_weights`; `wq[i]` is a PreparedWeight."""

    def __init__(self, weights: tuple[Tensor, ...], orientations: str, recipe: Recipe, backend: str):
        self.recipe, self.orientations, self.backend = recipe, orientations, backend
        self._sources: tuple[Tensor, ...] | None = weights
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._prepared = [self._quantize(w) for w in weights]

    def __len__(self) -> int:
        return len(self._prepared)

    def __getitem__(self, index: int) -> PreparedWeight:
        return self._prepared[index]

    def __repr__(self) -> str:
        shapes = ", ".join(str(tuple(p.row.shape)) for p in self._prepared)
        return f"PreparedWeights({shapes}, {self.recipe.format}, {self.orientations})"

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(mx.nbytes for prepared in self._prepared for mx in prepared if mx is not None)

    def tensors(self) -> tuple[Tensor, ...]:
        """(data, scale) of each weight for fprop, then of each for dgrad, one after the other (as autograd.py has them)."""
        pairs = zip(*(prepared.parts() for prepared in self._prepared), strict=True)
        return tuple(t for pair in pairs for data_scale in pair for t in data_scale)

    @torch.no_grad()
    def _quantize(self, w: Tensor) -> PreparedWeight:
        if hasattr(w, "to_local"):
            raise TypeError(
                expected(
                    "weight", "a whole tensor (with FSDP, refresh with the gathered ones)", type(w).__name__
                )
            )
        how: dict[str, Any] = {"rounding": self.recipe.rounding, "backend": self.backend}
        format = FORMATS[self.recipe.format or ""]
        if self.orientations == "both":
            return PreparedWeight(*quantize_mx_dual(w, format, layout=ScaleLayout.BLOCKED_128X4, **how))
        return PreparedWeight(quantize_mx(w, format, layout=ScaleLayout.BLOCKED_128X4, **how), None)

    @torch.no_grad()
    def refresh(self, *weights: Tensor) -> None:
        """Quantise again into the same buffers (new ones only if the weights have moved to another device).

        Args:
            weights: what to quantise, of the same shapes; default the tensors given to `prepare_weights`. Those are let
                go once others are passed, as under FSDP.
        """
        if weights:
            self._sources = None
        elif self._sources is None:
            raise ValueError(expected("weights", "tensors, as in the refresh before", "none"))
        else:
            weights = self._sources
        if len(weights) != len(self):
            raise ValueError(expected("weights", f"{len(self)} tensors", len(weights)))
        for i, (w, old) in enumerate(zip(weights, self._prepared, strict=True)):
            if not isinstance(w, Tensor):
                raise TypeError(expected("weight", "a torch.Tensor", type(w).__name__))
            if w.shape != old.row.shape:
                raise ValueError(
                    expected("weight", f"shape {tuple(old.row.shape)}", f"shape {tuple(w.shape)}")
                )
            new = self._quantize(w)
            if new.row.device != old.row.device:
                self._prepared[i] = new
                continue
            for (data, scale), (new_data, new_scale) in zip(old.parts(), new.parts(), strict=True):
                data.copy_(new_data)
                scale.copy_(new_scale)

    def follow(self, *weights: Tensor) -> None:
        """Quantise these weights from now on (their parameters were replaced), beginning now."""
        self.refresh(*weights)
        self._sources = weights

    def attach(self, target: torch.optim.Optimizer | nn.Module) -> "PreparedWeights":
        """Refresh after every `step()` of an optimiser, or after every load_state_dict of a module.

        Args:
            target: an optimiser; or a module that has the weights among its parameters (they are looked up again by
                name at each load, so `assign=True` works).

        Returns:
            Itself, so that `wq = prepare_weights(w1, w2).attach(optimizer).attach(model)` can be written.
        """
        if isinstance(target, torch.optim.Optimizer):
            self._hooks.append(target.register_step_post_hook(self._after_step))
            return self
        if not isinstance(target, nn.Module):
            raise TypeError(expected("target", "an optimiser or a module", type(target).__name__))
        names = {id(p): name for name, p in target.named_parameters(remove_duplicate=False)}
        sources = self._sources or ()
        missing = [i for i, w in enumerate(sources) if id(w) not in names]
        if missing:
            raise ValueError(
                expected(
                    "target", "a module with the prepared weights among its parameters", f"none for {missing}"
                )
            )
        hook = _AfterLoad(self, tuple(names[id(w)] for w in sources))
        self._hooks.append(target.register_load_state_dict_post_hook(hook))
        return self

    def detach(self) -> None:
        """Undo every `attach`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _after_step(self, *_: Any) -> None:
        self.refresh()


class _AfterLoad:
    """load_state_dict hook: the weights are looked up by name. A class, so that a module with it can be copied."""

    def __init__(self, prepared: PreparedWeights, names: tuple[str, ...]):
        self.prepared, self.names = prepared, names

    def __call__(self, module: nn.Module, _incompatible_keys: Any) -> None:
        self.prepared.follow(*(module.get_parameter(name) for name in self.names))


def prepare_weights(
    *weights: Tensor, orientations: str = "both", recipe: str | Recipe = "mxfp8", backend: str = "auto"
) -> PreparedWeights:
    """Quantise weights for `moe_mlp(…, wq=)` (w1, w2), `mx_grouped_mm(…, wq=wq[i])` and `mx_linear(…, wq=wq[i])`.

    Args:
        weights: each (E, N, K), or (N, K) for mx_linear; bf16 or fp32, N and K multiples of 32.
        orientations: "both", or "row_only": for inference, or to save half the memory, where backward passes then
            quantise along N each time.
        recipe: an MX recipe, or its name.
        backend: "auto", "cpu", "sm90" or "sm100".

    Returns:
        PreparedWeights, 2.06 bytes per parameter with "both", 1.03 with "row_only" (8-bit formats).
    """
    recipe = as_recipe(recipe)
    one_of("orientations", ORIENTATIONS, orientations)
    if not recipe.is_mx:
        raise ValueError(expected("recipe", "an MX recipe (bf16 quantises nothing)", recipe))
    if not weights:
        raise ValueError(expected("weights", "at least one tensor", "none"))
    for i, w in enumerate(weights):
        if not isinstance(w, Tensor) or w.dtype not in FLOAT_DTYPES:
            raise TypeError(
                expected(f"weights[{i}]", "a bf16 or fp32 tensor", getattr(w, "dtype", type(w).__name__))
            )
        if w.ndim not in (2, 3) or w.shape[-1] % 32 != 0 or w.shape[-2] % 32 != 0:
            raise ValueError(
                expected(
                    f"weights[{i}]", "(E, N, K) or (N, K), N and K multiples of 32", f"shape {tuple(w.shape)}"
                )
            )
    return PreparedWeights(weights, orientations, recipe, backend)

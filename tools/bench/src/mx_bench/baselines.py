"""The MoE layer as one writes it in plain PyTorch: what this project's layer is compared with."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import silu


def torch_grouped_mm(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """Torch's own grouped GEMM: a (M, K), b (E, K, N), ends of the groups."""
    return torch._grouped_mm(a, b, offs=offs)


def torch_moe(
    x_TD: Tensor,
    topk_ids_Tk: Tensor,
    topk_weights_Tk: Tensor,
    w1: Tensor,
    w2: Tensor,
    *,
    grouped_mm: Callable[[Tensor, Tensor, Tensor], Tensor] = torch_grouped_mm,
) -> Tensor:
    """MoE layer on a grouped GEMM of torch's form: sort by expert, two grouped products, weighted sum.

    The same function as `mx_kernels.moe_mlp`: w1 (E, 2H, D) with gate first, w2 (E, D, H); returns (T, D).
    """
    experts, k = w1.shape[0], topk_ids_Tk.shape[1]
    order = topk_ids_Tk.flatten().argsort(stable=True)
    counts = torch.bincount(topk_ids_Tk.flatten(), minlength=experts)
    offs = counts.cumsum(0, dtype=torch.int32)
    token = order // k
    gate, up = grouped_mm(x_TD[token], w1.transpose(-2, -1), offs).chunk(2, dim=-1)
    y = grouped_mm(silu(gate) * up, w2.transpose(-2, -1), offs)
    y = y * topk_weights_Tk.flatten()[order, None].to(y.dtype)
    return torch.zeros_like(x_TD).index_add(0, token, y)

"""The MoE layer as one writes it in plain PyTorch: what this project's layer is compared with."""

import torch
from torch import Tensor
from torch.nn.functional import silu


def torch_moe(x_TD: Tensor, topk_ids_Tk: Tensor, topk_weights_Tk: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """BF16 MoE layer on torch's grouped GEMM: sort by expert, two grouped products, weighted sum.

    The same function as `mx_kernels.moe_mlp`: w1 (E, 2H, D) with gate first, w2 (E, D, H); returns (T, D).
    """
    experts, k = w1.shape[0], topk_ids_Tk.shape[1]
    order = topk_ids_Tk.flatten().argsort(stable=True)
    counts = torch.bincount(topk_ids_Tk.flatten(), minlength=experts)
    offs = counts.cumsum(0, dtype=torch.int32)
    token = order // k
    gate, up = torch._grouped_mm(x_TD[token], w1.transpose(-2, -1), offs=offs).chunk(2, dim=-1)
    y = torch._grouped_mm(silu(gate) * up, w2.transpose(-2, -1), offs=offs)
    y = y * topk_weights_Tk.flatten()[order, None].to(y.dtype)
    return torch.zeros_like(x_TD).index_add(0, token, y)

"""The experts as one writes them in plain PyTorch: what a run with this project's kernels is measured against."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TorchExperts(nn.Module):
    """The parameters and the function of `mx_kernels.MXExperts` in BF16: sort by expert, torch's grouped GEMM twice,
    SwiGLU between them, weighted sum by `index_add`. Under torch.compile what lies between the GEMMs is fused.

    Args:
        num_experts: E.
        dim: D.
        hidden: H.
    """

    def __init__(self, num_experts: int, dim: int, hidden: int):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(num_experts, 2 * hidden, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden))
        for w in (self.w1, self.w2):  # as MXExperts draws, so that a seed gives both the same model
            nn.init.uniform_(w)

    def forward(self, x_TD: Tensor, ids_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        """X (T, D) bf16, ids and weights (T, k) → (T, D) bf16."""
        experts, k = self.w1.shape[0], ids_Tk.shape[1]
        ids, order = ids_Tk.flatten().sort(stable=True)
        ends = torch.searchsorted(ids, torch.arange(experts, device=ids.device), right=True)
        offs, token = ends.to(torch.int32), order // k
        w1, w2 = (w.to(x_TD.dtype).transpose(-2, -1) for w in (self.w1, self.w2))
        gate, up = F.grouped_mm(x_TD[token], w1, offs=offs).chunk(2, dim=-1)
        y = F.grouped_mm(F.silu(gate) * up, w2, offs=offs)
        y = y * weights_Tk.flatten()[order, None].to(y.dtype)
        return torch.zeros_like(x_TD).index_add(0, token, y)

"""The MoE layer shapes that are measured and projected: the design's own and those of well-known models."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MoEShape:
    """One MoE layer: T tokens, model width D, expert width H, E experts, k choices per token."""

    name: str
    tokens: int
    width: int
    expert_width: int
    experts: int
    top_k: int
    source: str

    @property
    def rows(self) -> int:
        """Rows over all experts, without padding: T·k."""
        return self.tokens * self.top_k

    @property
    def case_name(self) -> str:
        """Names the layer in results."""
        return f"{self.name} T{self.tokens} D{self.width} H{self.expert_width} E{self.experts} k{self.top_k}"

    @property
    def forward_flop(self) -> int:
        """Multiply-adds of the two forward GEMMs counted as two operations each (gate, up and down)."""
        return 2 * self.rows * 3 * self.width * self.expert_width


DESIGN_SHAPES = (
    MoEShape("fine-grained", 16384, 2048, 768, 128, 8, "budget row of docs/performance.md"),
    MoEShape("wide", 16384, 4096, 1536, 64, 6, "budget row of docs/performance.md"),
)

MODEL_SHAPES = (
    MoEShape("Mixtral-8x7B", 16384, 4096, 14336, 8, 2, "published model configuration"),
    MoEShape("DeepSeek-V3", 8192, 7168, 2048, 256, 8, "published model configuration"),
    MoEShape("Qwen3-30B-A3B", 16384, 2048, 768, 128, 8, "published model configuration"),
    MoEShape("OLMoE", 16384, 2048, 1024, 64, 8, "published model configuration"),
    MoEShape("gpt-oss-120b", 16384, 2880, 2880, 128, 4, "published model configuration"),
    MoEShape("Llama-4-Scout", 16384, 5120, 8192, 16, 1, "published model configuration; routed experts only"),
)

SMOKE_SHAPES = (MoEShape("smoke", 64, 64, 32, 4, 2, "sizes that a CPU finishes in seconds"),)

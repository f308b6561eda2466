"""Text from a trained model."""

import torch
from torch import Tensor

from mx_trainer.data import SEPARATOR
from mx_trainer.model import GPT


@torch.no_grad()
def generate(
    model: GPT, prompt: list[int], tokens: int, *, vocab: int, temperature: float, top_k: int, seed: int
) -> list[int]:
    """Continue `prompt` by `tokens` ids below `vocab`; an empty prompt starts a new document.

    `temperature` 0 takes the likeliest id; `top_k` 0 samples from all of them. The same seed gives the same text.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    ids = torch.tensor([prompt or [SEPARATOR]], device=device)
    training = model.training
    model.eval()
    for _ in range(tokens):
        logits = model(ids[:, -model.block_size :]).logits[0, -1, :vocab]
        ids = torch.cat((ids, _draw(logits, temperature, top_k, generator).view(1, 1)), dim=1)
    model.train(training)
    return ids[0, len(prompt or [SEPARATOR]) :].tolist()


def _draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits.argmax()
    if 0 < top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)


if __name__ == "__main__":  # `python -m mx_trainer.sample` is `mx-sample`
    import sys

    from mx_trainer.cli import sample

    sys.exit(sample())

"""Text written by the model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

TEMPERATURE = 0.8
"""Below 1 the likely tokens get likelier; small models ramble less."""


@torch.no_grad()
def generate(
    model: nn.Module, *, start: int, count: int, window: int, seed: int, device: torch.device
) -> list[int]:
    """Draw ``count`` tokens after the token ``start``, seeing at most ``window`` of them.

    With FSDP every rank has to call this, since each forward gathers the parameters.
    """
    random = torch.Generator().manual_seed(seed)
    tokens = [start]
    for _ in range(count):
        context = torch.tensor([tokens[-window:]], device=device)  # [1, at most window]
        logits: Tensor = model(context).logits[0, -1].float().cpu()  # [V]
        probability = (logits / TEMPERATURE).softmax(dim=-1)
        tokens.append(int(torch.multinomial(probability, 1, generator=random)))
    return tokens[1:]

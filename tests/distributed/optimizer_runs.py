"""A small model, its data and its loop, for the tests of LoCoOptimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

WIDTH = 24


class Net(nn.Module):
    """A residual network of some linear blocks: 10 numbers in, 3 out."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.inp = nn.Linear(10, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.out = nn.Linear(WIDTH, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        result: Tensor = self.out(h)
        return result


def plain_net(depth: int = 2) -> Net:
    """The same weights on every rank and in every run."""
    torch.manual_seed(1)
    return Net(depth)


def shard(model: Net, **settings: Any) -> Net:
    """Each block a unit, the rest the root's."""
    for block in model.blocks:
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    return model


def set_sync(model: nn.Module, on: bool) -> None:
    """Whether the next backward reduces the gradients."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(on)


def batch(step: int, rank: int | None = None) -> tuple[Tensor, Tensor]:
    """This rank's input and target of one step."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, 10, generator=generator)
    return x, torch.stack([x[:, 0] * x[:, 1], x[:, 2:5].sum(1), x[:, 5].abs()], 1)


def loss_of(model: nn.Module, step: int) -> Tensor:
    x, y = batch(step)
    loss: Tensor = (model(x) - y).square().mean()
    return loss


def train(model: nn.Module, optimizer: Optimizer, steps: Iterable[int]) -> list[float]:
    """Run the usual loop; returns this rank's losses."""
    losses = []
    for step in steps:
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def validation_loss(model: nn.Module) -> float:
    """Loss on data that no rank trains on, equal on all ranks."""
    with torch.no_grad():
        x, y = batch(77, rank=900)
        return float((model(x) - y).square().mean())


def full(value: Tensor) -> Tensor:
    """The whole of a parameter, on every rank, detached from it."""
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value.clone()


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(parameter) for name, parameter in model.named_parameters()}

"""Compiled models give the gradients of eager ones, and are not compiled again and again."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from distributed.models import gradient, local_gradients, residuals, same, shard
from loco_fsdp import LoCoConfig, attach
from rank_pool import RankPool

WIDTH = 16
CONFIG = LoCoConfig(min_numel=0, warmup_steps=1)
BACKEND = "aot_eager"  # traces and partitions as the default does, but needs no C++ compiler


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))
        return result


class Model(nn.Module):
    """An embedding of the root's own and two blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x


def build(how: str, policy: MixedPrecisionPolicy) -> Any:
    model = Model()
    if how == "each block, wrapped":
        for index, block in enumerate(model.blocks):
            wrapped: Any = torch.compile(block, backend=BACKEND, fullgraph=True)
            model.blocks[index] = wrapped
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    sharded = shard(model, mp_policy=policy)
    if how == "each block":
        for block in model.blocks:
            block.compile(backend=BACKEND)
    if how == "model":
        sharded.compile(backend=BACKEND)
    return sharded


def clean(name: str) -> str:
    return name.replace("_orig_mod.", "")


def train(how: str, policy: MixedPrecisionPolicy) -> tuple[Any, Any, list[int]]:
    """Gradients of six steps, residuals at the end, and graphs compiled after each step."""
    torch._dynamo.reset()
    counters.clear()
    model = build(how, policy)
    handle = attach(model, CONFIG)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    history, graphs = [], []
    for step in range(6):
        optimizer.zero_grad()
        with warnings.catch_warnings():  # the compiler itself looks at .grad of all inputs
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            loss = model(gradient("x", (8, 6), dist.get_rank(), step)).square().mean()
        loss.backward()
        history.append({clean(name): g for name, g in local_gradients(model).items()})
        optimizer.step()
        handle.step()
        graphs.append(counters["stats"]["unique_graphs"])
    assert [stats.calls for stats in handle.stats()] == [6, 6, 6]
    return history, residuals(handle), graphs


@pytest.mark.parametrize(
    "policy",
    [MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)],
    ids=["float32", "bfloat16"],
)
def test_compiled_equals_eager(ranks: RankPool, policy: MixedPrecisionPolicy) -> None:
    """Field case 45: whole model, each block, each block as a wrapper; all equal eager's bits."""
    eager = ranks.run(train, 2, "eager", policy)
    for how in ("model", "each block", "each block, wrapped"):
        for (history, kept, graphs), (wanted, wanted_kept, none) in zip(
            ranks.run(train, 2, how, policy), eager, strict=True
        ):
            assert none[-1] == 0
            assert graphs[1] > 0
            assert graphs[1:] == graphs[1:2] * 5  # no recompile after step 2
            for found, expected in zip(history, wanted, strict=True):
                assert same(found, expected)
            assert same(kept, wanted_kept)

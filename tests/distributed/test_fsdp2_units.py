"""Every FSDP state is found once, and what cannot be compressed is left out by name."""

from __future__ import annotations

import re
import unittest
from collections import Counter
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from distributed.models import (
    TINY,
    Chain,
    Definition,
    Probe,
    Shapes,
    full_gradients,
    gradient,
    gradients,
    local_gradients,
    residuals,
    shard,
    uncompressed,
)
from loco_fsdp import LoCoHandle, attach
from rank_pool import RankPool

MATRIX = (6, 5)


def check(model: nn.Module, handle: LoCoHandle, shapes: Shapes, plain: set[str]) -> None:
    """One backward: each compressed parameter is in one unit and reduced once."""
    world_size, found = dist.get_world_size(), full_gradients(model)
    counts = Counter(name for unit in handle.units for name in unit.parameters)
    for name, shape in shapes.items():
        fulls = [gradient(name, shape, r, 0) for r in range(world_size)]
        if name in plain:
            assert counts[name] == 0
            torch.testing.assert_close(found[name], torch.cat(uncompressed(fulls)))
        else:
            assert counts[name] == 1
            assert torch.equal(found[name], torch.cat(Definition(world_size).reduce(fulls)))
    assert all(stats.calls == 1 for stats in handle.stats())


class Decoder(nn.Module):
    """An embedding of the root's own, four blocks, and a norm and a head sharded together."""

    names = ("embedding", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "norm", "head")

    def __init__(self) -> None:
        super().__init__()
        own = {"w": MATRIX}
        self.embedding = Probe(own)
        self.blocks = nn.ModuleList(Probe(own) for _ in range(4))
        self.norm, self.head = Probe(own), Probe(own)

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        x = torch.zeros((), requires_grad=True)
        for name in self.names:
            x = self.get_submodule(name)({"w": given[f"{name}.w"]}, x)
        return x


def train_decoder() -> list[str]:
    model = Decoder()
    for block in model.blocks:
        fully_shard(block)
    fully_shard([model.norm, model.head])
    fully_shard(model)
    handle = attach(model, TINY)
    shapes = {f"{name}.w": MATRIX for name in model.names}
    model(gradients(shapes, 0)).backward()
    check(model, handle, shapes, set())
    return [unit.name for unit in handle.units]


def test_blocks_and_a_group_and_the_root(ranks: RankPool) -> None:
    """Field case 31: 4 blocks, [norm, head] and the root with its own embedding: 6 of 6."""
    names = ranks.run(train_decoder, 2)[0]
    blocks = {f"blocks.{index}" for index in range(4)}
    assert len(names) == 6
    assert set(names) == {"root", "norm+head"} | blocks


class Nested(nn.Module):
    """A unit inside a unit inside a root that has nothing of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = Outer()

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        result: Tensor = self.outer(given)
        return result


class Outer(Probe):
    """A probe with a probe in it."""

    def __init__(self) -> None:
        super().__init__({"w": MATRIX})
        self.inner = Probe({"w": MATRIX})

    def forward(self, gradients: Mapping[str, Tensor], x: Tensor | None = None) -> Tensor:
        start = torch.zeros((), requires_grad=True)
        middle = super().forward({"w": gradients["outer.w"]}, start)
        result: Tensor = self.inner({"w": gradients["outer.inner.w"]}, middle)
        return result


def train_nested() -> list[str]:
    model = Nested()
    fully_shard(model.outer.inner)
    fully_shard(model.outer)
    fully_shard(model)
    handle = attach(model, TINY)
    shapes = {"outer.w": MATRIX, "outer.inner.w": MATRIX}
    model(gradients(shapes, 0)).backward()
    check(model, handle, shapes, set())
    return [unit.name for unit in handle.units]


def test_nested_units_below_an_empty_root(ranks: RankPool) -> None:
    """Field case 31: a root without own parameters does not fail."""
    assert set(ranks.run(train_nested, 2)[0]) == {"outer", "outer.inner"}


def train_on_two_meshes() -> tuple[list[str], list[str], str]:
    """Unit a keeps its matrices on two meshes; b is as usual."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    model = Chain({"a": {"w": MATRIX, "v": MATRIX}, "b": {"w": MATRIX}})
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
    other = FSDPMeshInfo(mesh, shard_mesh_dim=0)
    a, special = model.get_submodule("a"), model.get_parameter("a.v")

    def place(parameter: nn.Parameter) -> ShardPlacementResult | None:
        return ShardPlacementResult(Shard(0), other) if parameter is special else None

    fully_shard(a, shard_placement_fn=place)
    fully_shard(model.get_submodule("b"))
    fully_shard(model)
    with unittest.TestCase().assertLogs("loco_fsdp", "WARNING") as logs:
        handle = attach(model, TINY)
    shapes = {"a.w": MATRIX, "a.v": MATRIX, "b.w": MATRIX}
    model(gradients(shapes, 0)).backward()
    check(model, handle, shapes, {"a.w", "a.v"})
    return [unit.name for unit in handle.units], logs.output, handle.describe()


def test_unit_with_several_parameter_groups(ranks: RankPool) -> None:
    """Field case 31: it is skipped by name, with one warning; the rest still works."""
    names, logs, table = ranks.run(train_on_two_meshes, 2)[0]
    assert names == ["b"]
    assert len(logs) == 1
    assert "FSDP unit 'a' is not compressed: it has 2 parameter groups" in logs[0]
    [row] = [line for line in table.splitlines() if line.startswith("a ")]
    assert "no: it has 2 parameter groups" in row
    before, after, residual = re.split(r"\s{2,}", row)[4:]
    assert before == after != "0 B", "the totals count what is not compressed"
    assert residual == "0 B"


def train_with_replicate() -> tuple[list[str], list[str]]:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    model = Chain({"a": {"w": MATRIX}, "b": {"w": MATRIX}})
    replicate(model.get_submodule("a"))
    fully_shard(model.get_submodule("b"))
    fully_shard(model)
    with unittest.TestCase().assertLogs("loco_fsdp", "WARNING") as logs:
        handle = attach(model, TINY)
    shapes = {"a.w": MATRIX, "b.w": MATRIX}
    model(gradients(shapes, 0)).backward()
    check(model, handle, shapes, {"a.w"})
    return [unit.name for unit in handle.units], logs.output


def test_replicated_unit(ranks: RankPool) -> None:
    names, logs = ranks.run(train_with_replicate, 2)[0]
    assert names == ["b"]
    assert len(logs) == 1
    assert "FSDP unit 'a' is not compressed: it is replicated" in logs[0]


def train_on_other_dim() -> None:
    """Sharded on dim 1: row r holds the r-th columns."""
    shape, rank = (5, 6), dist.get_rank()
    model = shard(Probe({"w": shape, "v": shape}), shard_placement_fn=lambda _: Shard(1))
    handle = attach(model, TINY)
    definition = Definition(2)
    for step in range(3):
        model.zero_grad()
        model(gradients({"w": shape}, step)).backward()
        fulls = [torch.cat(gradient("w", shape, r, step).chunk(2, 1)) for r in range(2)]
        expected = definition.reduce(fulls)[rank]
        assert torch.equal(local_gradients(model)["w"], expected)
    stacked = definition.residual(rank, (10, 3))
    assert torch.equal(handle.residual("w"), torch.cat(stacked.chunk(2), 1))
    assert not residuals(handle)["v"].any()


def test_sharded_on_another_dim(ranks: RankPool) -> None:
    ranks.run(train_on_other_dim, 2)

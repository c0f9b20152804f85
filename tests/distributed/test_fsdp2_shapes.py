"""Shapes that trip others: one rank, empty shards, untouched rows, odd strides."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from distributed.models import (
    TINY,
    Chain,
    Definition,
    Probe,
    full_gradients,
    gradient,
    gradients,
    local_gradients,
    residuals,
    same,
    shard,
    shard_probes,
)
from loco_fsdp import attach
from rank_pool import RankPool


def train_alone() -> None:
    shapes = {"one": (1,), "row": (1, 1), "matrix": (5, 3), "large": (130, 7)}
    model = shard(Probe(shapes))
    handle = attach(model, TINY)
    for step in range(3):
        model.zero_grad()
        given = gradients(shapes, step)
        model(given).backward()
        handle.step()
        assert same(local_gradients(model), given)
    assert handle.memory_bytes() == 0
    assert residuals(handle) == {}
    with pytest.raises(ValueError, match="world size 1"):
        handle.residual("matrix")
    assert handle.stats()[0].bytes_sent == 0


def test_one_rank_is_plain(ranks: RankPool) -> None:
    """Field case 38: at W = 1 exactly the plain gradient, and no residual."""
    ranks.run(train_alone, 1)


def shard_scalar() -> str:
    with pytest.raises(ValueError) as caught:
        fully_shard(Probe({"scale": (), "matrix": (5, 3)}))
    return str(caught.value)


@pytest.mark.parametrize("world_size", [1, 2])
def test_scalars_are_refused_by_fsdp(ranks: RankPool, world_size: int) -> None:
    """Field case 38, shape (): FSDP2 does not shard it, so it cannot get to us."""
    assert "scalar" in ranks.run(shard_scalar, world_size)[0]


def train_with_empty_shards() -> None:
    """Linear(4, 5) over 4 ranks: rows 2, 2, 1, 0; saved and loaded in each of three steps."""
    rank = dist.get_rank()
    plain, model = nn.Linear(4, 5), nn.Linear(4, 5)
    model.load_state_dict(plain.state_dict())
    model = shard(model)
    handle = attach(model, TINY)
    definition = Definition(4)
    for step in range(3):
        model.zero_grad()
        fulls = []
        for r in range(4):
            plain.zero_grad()
            plain(gradient("x", (3, 4), r, step)).square().sum().backward()
            assert plain.weight.grad is not None
            fulls.append(plain.weight.grad.clone())
        model(gradient("x", (3, 4), rank, step)).square().sum().backward()
        found = local_gradients(model)
        assert found["weight"].shape == ((2, 2, 1, 0)[rank], 4)
        assert found["bias"].shape == ((2, 2, 1, 0)[rank],)
        assert torch.equal(found["weight"], definition.reduce(fulls)[rank])
        kept = handle.residual("weight")
        assert torch.equal(kept, definition.residual(rank, (5, 4)))
        assert kept.any()  # of this rank's own gradient, also where the shard is empty
        model.load_state_dict(model.state_dict())


def test_empty_shards(ranks: RankPool) -> None:
    """Field case 39: a rank without rows takes part, and has a residual of its own gradient."""
    ranks.run(train_with_empty_shards, 4)


def train_one_row() -> None:
    """Field case 39, harder: one row over five ranks, and one rank's share of 1 element."""
    shapes = {"row": (1, 9), "column": (4, 1), "one": (1, 1)}
    model = shard(Probe(shapes))
    attach(model, TINY)
    definitions = {name: Definition(5) for name in shapes}
    for step in range(2):
        model.zero_grad()
        model(gradients(shapes, step)).backward()
        for name, shape in shapes.items():
            fulls = [gradient(name, shape, r, step) for r in range(5)]
            expected = definitions[name].reduce(fulls)[dist.get_rank()]
            assert torch.equal(local_gradients(model)[name], expected)


def test_fewer_rows_than_ranks(ranks: RankPool) -> None:
    ranks.run(train_one_row, 5)


def train_embedding() -> None:
    """Each rank touches 3 of 1000 rows."""
    torch.manual_seed(0)
    model = shard(nn.Embedding(1000, 64))
    handle = attach(model, TINY)
    touched = set()
    for step in range(5):
        model.zero_grad()
        tokens = {r: torch.tensor([7 * step + r, 500 + r, 900]) for r in range(2)}
        touched |= {int(token) for batch in tokens.values() for token in batch}
        model(tokens[dist.get_rank()]).square().sum().backward()
        found, kept = full_gradients(model)["weight"], handle.residual("weight")
        assert found.isfinite().all()
        rows = torch.zeros(1000, dtype=torch.bool)
        rows[list(touched)] = True
        assert found[rows].any()
        assert not found[~rows].any()  # exact zeros
        assert not kept[~rows].any()


def test_embedding_with_untouched_rows(ranks: RankPool) -> None:
    """Field case 70: exact zeros for rows that no rank has touched, and no NaN."""
    ranks.run(train_embedding, 2)


def reduce_zeros() -> None:
    """A zero gradient meets a residual; then all is zero on rank 0 only."""
    rank, shape = dist.get_rank(), (12, 40)
    model = shard(Probe({"w": shape}))
    handle = attach(model, TINY)
    definition = Definition(2)
    zeros = torch.zeros(shape)
    for step in range(6):
        both = [gradient("w", shape, r, step) for r in range(2)]
        fulls = [both, [zeros, zeros], [zeros, both[1]]][step % 3]
        model.zero_grad()
        model({"w": fulls[rank]}).backward()
        assert torch.equal(local_gradients(model)["w"], definition.reduce(fulls)[rank])
        assert torch.equal(handle.residual("w"), definition.residual(rank, shape))
        assert handle.residual("w").any()
    handle.reset()
    model.zero_grad()
    model({"w": zeros}).backward()
    assert same(full_gradients(model), {"w": zeros})
    assert not handle.residual("w").any()


def test_zero_gradients(ranks: RankPool) -> None:
    """Field case 70: a zero gradient sends out the residual; zero on one rank is no trouble."""
    ranks.run(reduce_zeros, 2)


class Transposed(nn.Module):
    """The gradient of the parameter arrives with the strides of its transpose."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(shape))

    def forward(self, g: Tensor, expanded: bool) -> Tensor:
        product = self.w.sum(1) * g[:, 0] if expanded else self.w.t() * g.t()
        return product.sum()


def reduce_odd_strides() -> None:
    shape = (6, 10)
    model = shard(Transposed(shape))
    attach(model, TINY)
    definition = Definition(2)
    for step, expanded in enumerate((False, True)):
        model.zero_grad()
        model(gradient("w", shape, dist.get_rank(), step), expanded).backward()
        fulls = [gradient("w", shape, r, step) for r in range(2)]
        if expanded:
            fulls = [full[:, :1].expand(shape).contiguous() for full in fulls]
        expected = definition.reduce(fulls)[dist.get_rank()]
        assert torch.equal(local_gradients(model)["w"], expected)


def test_gradients_with_odd_strides(ranks: RankPool) -> None:
    """Field case 69: transposed and expanded gradients equal the contiguous ones."""
    ranks.run(reduce_odd_strides, 2)


def train_frozen_unit() -> None:
    """Unit b is frozen in the second of three steps."""
    shapes = {"a.w": (6, 5), "b.w": (6, 5)}
    model = shard_probes(Chain({"a": {"w": (6, 5)}, "b": {"w": (6, 5)}}))
    handle = attach(model, TINY)
    for step in range(3):
        model.zero_grad()
        model.b.requires_grad_(step != 1)
        before = handle.residual("b.w")
        model(gradients(shapes, step)).backward()
        assert torch.equal(handle.residual("b.w"), before) == (step == 1)
    assert {stats.unit: stats.calls for stats in handle.stats()} == {"a": 3, "b": 2}


def test_frozen_unit(ranks: RankPool) -> None:
    """Field case 76: nothing to reduce is no call, and the residual stays."""
    ranks.run(train_frozen_unit, 2)

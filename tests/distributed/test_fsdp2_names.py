"""Residuals belong to parameter names: not to positions, sizes or the order of calls."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method

from distributed.models import (
    TINY,
    Chain,
    Definition,
    Probe,
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

SHAPE = (9, 8)
SHAPES = {"a": SHAPE, "b": SHAPE, "c": (4, 3)}

History = list[tuple[dict[str, Tensor], dict[str, Tensor]]]  # gradients and residuals per step


def use_in_turn(used: Sequence[str], frozen: Sequence[str]) -> History:
    """Step i uses the parameters ``used[i]`` and freezes ``frozen[i]``: one letter each."""
    model = shard(Probe(SHAPES))
    handle = attach(model, TINY)
    history = []
    for step, (names, fixed) in enumerate(zip(used, frozen, strict=True)):
        model.zero_grad()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in fixed)
        model(gradients({n: SHAPES[n] for n in names}, step)).backward()
        history.append((local_gradients(model), residuals(handle)))
    return history


def check(
    results: list[History], used: Sequence[str], frozen: Sequence[str], world_size: int
) -> None:
    for name, shape in SHAPES.items():
        definition = Definition(world_size)
        for step, (names, fixed) in enumerate(zip(used, frozen, strict=True)):
            trained = name in names and name not in fixed
            if trained:
                fulls = [gradient(name, shape, rank, step) for rank in range(world_size)]
                shards = definition.reduce(fulls)
            for rank in range(world_size):
                found, kept = results[rank][step]
                assert torch.equal(kept[name], definition.residual(rank, shape)), (name, step)
                if trained:
                    assert torch.equal(found[name], shards[rank]), (name, step)
                else:
                    assert name not in found


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("used", "frozen"),
    [
        # Two equal parameters in turn: the buffer has the same size whichever it is.
        (["a", "b", "a", "b", "a", "b"], [""] * 6),
        (["b", "abc", "ac", "b", "c", "ab", "abc"], [""] * 7),
        # Frozen for some steps, from the start too, in use all the while.
        (["abc"] * 6, ["", "b", "b", "", "a", ""]),
        (["abc"] * 4, ["ac", "b", "", "c"]),
        # Unused for some steps and frozen for others.
        (["ab", "bc", "a", "abc", "b"], ["", "c", "b", "a", "ac"]),
    ],
)
def test_others_keep_their_residual(
    ranks: RankPool, world_size: int, used: Sequence[str], frozen: Sequence[str]
) -> None:
    check(ranks.run(use_in_turn, world_size, used, frozen), used, frozen, world_size)


class Either(nn.Module):
    """Two equal layers, one of which is used."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(8, 8, bias=False)
        self.right = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor, name: str) -> Tensor:
        result: Tensor = self.get_submodule(name)(x)
        return result


def alternate_linears() -> None:
    model = shard(Either())
    handle = attach(model, TINY)
    before = {f"{side}.weight": torch.zeros(8, 8) for side in ("left", "right")}
    for step in range(6):
        used, other = ("left", "right") if step % 2 else ("right", "left")
        model(gradient("x", (4, 8), 0, step), used).square().sum().backward()
        after = residuals(handle)
        assert not torch.equal(after[f"{used}.weight"], before[f"{used}.weight"])
        assert torch.equal(after[f"{other}.weight"], before[f"{other}.weight"])
        before = after


def test_two_equal_linears_used_in_turn(ranks: RankPool) -> None:
    ranks.run(alternate_linears, 2)


def alternate_order() -> History:
    model = shard_probes(Chain({"a": {"w": SHAPE}, "b": {"w": SHAPE}}))
    handle = attach(model, TINY)
    history = []
    for step in range(10):
        model.zero_grad()
        given = {"a.w": 1e4 * gradients({"a.w": SHAPE}, step)["a.w"], "b.w": torch.zeros(SHAPE)}
        model(given, "ab" if step % 2 else "ba").backward()
        history.append((local_gradients(model), residuals(handle)))
    return history


def test_units_in_alternating_order(ranks: RankPool) -> None:
    """Field case 16: A gets large gradients and B zeros, in either order; B's residual stays 0."""
    results = ranks.run(alternate_order, 2)
    definition = Definition(2)
    for step in range(10):
        shards = definition.reduce([1e4 * gradient("a.w", SHAPE, r, step) for r in range(2)])
        for rank in range(2):
            found, kept = results[rank][step]
            assert torch.equal(found["a.w"], shards[rank])
            assert torch.equal(kept["a.w"], definition.residual(rank, SHAPE))
            assert torch.equal(found["b.w"], torch.zeros_like(found["b.w"]))
            assert torch.equal(kept["b.w"], torch.zeros(SHAPE))


class Encoder(Probe):
    """A module that is run by another method than forward."""

    def encode(self, given: dict[str, Tensor]) -> Tensor:
        return self.forward(given)


def run_by_other_method() -> History:
    model = shard(Encoder(SHAPES))
    register_fsdp_forward_method(model, "encode")
    handle = attach(model, TINY)
    history = []
    for step, names in enumerate(["abc", "b", "a", "c"]):
        model.zero_grad()
        model.encode(gradients({n: SHAPES[n] for n in names}, step)).backward()
        history.append((local_gradients(model), residuals(handle)))
    return history


def test_unit_run_by_another_method_than_forward(ranks: RankPool) -> None:
    """FSDP runs registered methods without the module's forward hooks."""
    check(ranks.run(run_by_other_method, 2), ["abc", "b", "a", "c"], [""] * 4, 2)


class Tied(nn.Module):
    """Input and output embedding are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.head(self.embedding(tokens))
        return result


def train_tied() -> None:
    torch.manual_seed(0)
    plain, model = Tied(), Tied()
    model.load_state_dict(plain.state_dict())
    shard(model)
    handle = attach(model, TINY)
    definition = Definition(2)
    for step in range(3):
        fulls = []
        model.zero_grad()
        for rank in range(2):
            plain.zero_grad()
            tokens = torch.arange(step + rank, step + rank + 5) % 11
            plain(tokens).square().sum().backward()
            assert plain.embedding.weight.grad is not None
            fulls.append(plain.embedding.weight.grad.clone())  # the sum of both uses
            if rank == dist.get_rank():
                model(tokens).square().sum().backward()
        expected = definition.reduce(fulls)[dist.get_rank()]
        assert same(local_gradients(model), {"embedding.weight": expected})
    assert residuals(handle).keys() == {"embedding.weight"}


def test_tied_embeddings_are_one_parameter(ranks: RankPool) -> None:
    """Field case 41: one residual, and the gradient is the sum of both uses."""
    ranks.run(train_tied, 2)

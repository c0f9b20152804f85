"""Several backwards or several uses of a module before one optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from distributed.models import (
    TINY,
    Definition,
    Probe,
    gradient,
    gradients,
    local_gradients,
    residuals,
    same,
    shard,
)
from loco_fsdp import attach
from loco_fsdp.unit import Unit
from rank_pool import RankPool

SHAPE = (9, 5)
SHAPES = {"w": SHAPE}


def total(rank: int, micro_batches: Sequence[int]) -> Tensor:
    result = gradient("w", SHAPE, rank, micro_batches[0])
    for index in micro_batches[1:]:
        result = result + gradient("w", SHAPE, rank, index)
    return result


def accumulate(count: int, sync_each: bool) -> None:
    """Three optimizer steps of ``count`` micro-batches each."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = shard(Probe(SHAPES))
    handle = attach(model, TINY)
    definition = Definition(world_size)
    row_bytes = 0
    for step in range(3):
        model.zero_grad()
        indices = range(step * count, (step + 1) * count)
        for index in indices:
            model.set_requires_gradient_sync(sync_each or index == indices[-1])
            model(gradients(SHAPES, index)).backward()
        groups = [[index] for index in indices] if sync_each else [list(indices)]
        expected = torch.zeros_like(local_gradients(model)["w"])
        for group in groups:
            fulls = [total(r, group) for r in range(world_size)]
            expected += definition.reduce(fulls)[rank]
        assert torch.equal(local_gradients(model)["w"], expected)
        assert torch.equal(handle.residual("w"), definition.residual(rank, SHAPE))
        [stats] = handle.stats()
        assert stats.calls == (step + 1) * len(groups)
        row_bytes = row_bytes or stats.bytes_sent // stats.calls
        assert stats.bytes_sent == stats.calls * row_bytes


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("sync_each", [False, True])
def test_accumulation(ranks: RankPool, count: int, sync_each: bool) -> None:
    """Field cases 24 and 26: one exchange if sync is off but for the last, else one each."""
    ranks.run(accumulate, 2, count, sync_each)


def leave_a_cycle_incomplete() -> None:
    """5 micro-batches at accumulation 2, then two more: the fifth is in the third reduction."""
    model = shard(Probe(SHAPES))
    attach(model, TINY)
    definition = Definition(2)
    for index in range(5):
        model.set_requires_gradient_sync(index % 2 == 1)
        model(gradients(SHAPES, index)).backward()
        if index % 2:
            shards = definition.reduce([total(r, [index - 1, index]) for r in range(2)])
            assert torch.equal(local_gradients(model)["w"], shards[dist.get_rank()])
            model.zero_grad()
    for index in (5, 6):
        model.set_requires_gradient_sync(index == 6)
        model(gradients(SHAPES, index)).backward()
    shards = definition.reduce([total(r, [4, 5, 6]) for r in range(2)])
    assert torch.equal(local_gradients(model)["w"], shards[dist.get_rank()])


def test_incomplete_cycle(ranks: RankPool) -> None:
    """Field case 26: what is left over at the end of an epoch is reduced with the next batch."""
    ranks.run(leave_a_cycle_incomplete, 2)


def fill_in_place() -> None:
    model = shard(Probe(SHAPES))
    attach(model, TINY)
    definition = Definition(2)
    places = []

    def reduce(self: Unit, output: Tensor, *args: Any, **kwargs: Any) -> None:
        output.fill_(torch.nan)
        places.append(output.data_ptr())
        original(self, output, *args, **kwargs)

    original = Unit.reduce
    with patch.object(Unit, "reduce", reduce):
        for step in range(5):
            model.zero_grad()
            for last in (False, True):
                model.set_requires_gradient_sync(last)
                model(gradients(SHAPES, 2 * step + last)).backward()
            shards = definition.reduce([total(r, [2 * step, 2 * step + 1]) for r in range(2)])
            assert torch.equal(local_gradients(model)["w"], shards[dist.get_rank()])
            assert model.w.grad is not None
            assert model.w.grad.to_local().data_ptr() == places[-1]
    assert len(places) == 5


def test_output_is_filled_in_place(ranks: RankPool) -> None:
    """Field case 19: five steps with a micro-batch without sync in each."""
    ranks.run(fill_in_place, 2)


def use_late(attached: bool) -> str:
    """``b`` gets a gradient in the second micro-batch only; returns the error, if any."""
    shapes = {"a": SHAPE, "b": SHAPE}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(Probe(shapes), mp_policy=policy)
    handle = attach(model, TINY) if attached else None
    model(gradients(shapes, 0)).backward()
    before = residuals(handle) if handle else {}
    model.zero_grad()
    model.set_requires_gradient_sync(False)
    model(gradients({"a": SHAPE}, 1)).backward()
    model.set_requires_gradient_sync(True)
    error = ""
    try:
        model(gradients(shapes, 2)).backward()
    except AssertionError as caught:
        error = str(caught)
        model.reset_iter_state()
    if handle is not None:
        assert not error or same(residuals(handle), before)
        # What FSDP has dropped must not confuse the next backward, of one parameter only.
        model.zero_grad()
        model(gradients({"b": SHAPE}, 3)).backward()
        assert local_gradients(model).keys() == {"b"}
    return error


def test_parameter_used_in_the_last_micro_batch_only(ranks: RankPool) -> None:
    """Field case 37: where FSDP itself raises, its message comes through; no residual moves."""
    native = ranks.run(use_late, 2, False)
    assert ranks.run(use_late, 2, True) == native


def use_late_in_float32() -> None:
    shapes = {"a": SHAPE, "b": SHAPE}
    model = shard(Probe(shapes))
    attach(model, TINY)
    model.set_requires_gradient_sync(False)
    model(gradients({"a": SHAPE}, 1)).backward()
    model.set_requires_gradient_sync(True)
    model(gradients({"b": SHAPE}, 2)).backward()
    for name, step in (("a", 1), ("b", 2)):
        shards = Definition(2).reduce([gradient(name, SHAPE, r, step) for r in range(2)])
        assert torch.equal(local_gradients(model)[name], shards[dist.get_rank()])


def freeze_between_micro_batches(with_zeros: bool) -> None:
    """``b`` is frozen once its first micro-batch is in: that gradient is still reduced."""
    shapes = {"a": SHAPE, "b": SHAPE}
    model = shard(Probe(shapes))
    if with_zeros:
        model.set_reduce_scatter_unused_params(True)
    attach(model, TINY)
    model.set_requires_gradient_sync(False)
    model(gradients(shapes, 0)).backward()
    model.set_requires_gradient_sync(True)
    model.b.requires_grad_(False)
    model(gradients({"a": SHAPE}, 1)).backward()
    sums = {
        "a": [gradient("a", SHAPE, r, 0) + gradient("a", SHAPE, r, 1) for r in range(2)],
        "b": [gradient("b", SHAPE, r, 0) for r in range(2)],
    }
    for name, fulls in sums.items():
        expected = Definition(2).reduce(fulls)[dist.get_rank()]
        assert torch.equal(local_gradients(model)[name], expected)


def test_sets_of_parameters_differ_between_micro_batches(ranks: RankPool) -> None:
    ranks.run(use_late_in_float32, 2)
    ranks.run(freeze_between_micro_batches, 2, False)
    ranks.run(freeze_between_micro_batches, 2, True)


class Twice(nn.Module):
    """Units A and B run in the order A, B, A, B."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.a, self.b = wrap(Probe(SHAPES)), wrap(Probe(SHAPES))

    def forward(self, given: Mapping[str, Mapping[str, Tensor]], recompute: bool) -> Tensor:
        x = torch.zeros((), requires_grad=True)
        for name in ("a1", "b1", "a2", "b2"):
            unit = self.get_submodule(name[0])
            if recompute:
                x = checkpoint(unit, given[name], x, use_reentrant=False)
            else:
                x = unit(given[name], x)
        return x


def use_twice(wrapped: bool, recompute: bool, retain_graph: bool) -> None:
    model = Twice(checkpoint_wrapper if wrapped else lambda module: module)
    for unit in (model.a, model.b):
        fully_shard(unit)
    fully_shard(model)
    handle = attach(model, TINY)
    definitions = {"a": Definition(2), "b": Definition(2)}
    for step in range(3):
        model.zero_grad()
        given = {
            n: {"w": gradient(n, SHAPE, dist.get_rank(), step)} for n in ("a1", "b1", "a2", "b2")
        }
        loss = model(given, recompute)
        loss.backward(retain_graph=retain_graph)
        if retain_graph:
            loss.backward()
        for name, definition in definitions.items():
            fulls = [gradient(f"{name}2", SHAPE, r, step) for r in range(2)]
            fulls = [full + gradient(f"{name}1", SHAPE, r, step) for r, full in enumerate(fulls)]
            expected = definition.reduce(fulls)[dist.get_rank()]
            if retain_graph:
                expected = expected + definition.reduce(fulls)[dist.get_rank()]
            [found] = [g for n, g in local_gradients(model).items() if n.startswith(name)]
            assert torch.equal(found, expected)
            kept = handle.residual(f"{name}.w")  # without the wrapper in its name
            assert torch.equal(kept, definition.residual(dist.get_rank(), SHAPE))
    for stats in handle.stats():
        assert stats.calls == 3 * (1 + retain_graph)


@pytest.mark.parametrize(
    ("wrapped", "recompute", "retain_graph"),
    [(False, False, False), (False, True, False), (True, False, False), (False, False, True)],
)
def test_module_used_twice(
    ranks: RankPool, wrapped: bool, recompute: bool, retain_graph: bool
) -> None:
    """Field case 42: A, B, A, B, plain, checkpointed, and with a retained graph."""
    ranks.run(use_twice, 2, wrapped, recompute, retain_graph)

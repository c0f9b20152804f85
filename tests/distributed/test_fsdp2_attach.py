"""Attaching, attaching again, detaching; and what cannot be attached."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

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
from loco_fsdp import LoCoConfig, attach
from loco_fsdp._torch import fsdp_state, param_groups, reduce_scatter_comm
from rank_pool import RankPool

PROBES: dict[str, dict[str, tuple[int, ...]]] = {
    "a": {"w": (9, 5), "bias": (3,)},
    "b": {"w": (4, 6)},
}
SHAPES = {f"{unit}.{name}": shape for unit, own in PROBES.items() for name, shape in own.items()}


def build() -> Any:
    return shard_probes(Chain(PROBES))


def backward(model: nn.Module, step: int) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(gradients(SHAPES, step)).backward()
    return local_gradients(model)


def detach_after_three_steps() -> None:
    plain, model = build(), build()
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    handle = attach(model, TINY)
    for step in range(3):
        assert not same(backward(model, step), backward(plain, step))
    kept = residuals(handle)
    handle.detach()
    handle.detach()  # a second time does nothing
    for step in range(3, 6):
        assert same(backward(model, step), backward(plain, step))
    assert not handle.attached
    assert same(residuals(handle), kept)
    assert [stats.calls for stats in handle.stats()] == [3, 3]
    # Nothing of ours is left behind.
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks
    for unit, other in ((model.a, plain.a), (model.b, plain.b)):
        for group, its in zip(*(param_groups(fsdp_state(m)) for m in (unit, other)), strict=True):
            assert type(reduce_scatter_comm(group)) is type(reduce_scatter_comm(its))
            for param in group.fsdp_params:
                assert not param.unsharded_param._post_accumulate_grad_hooks


def test_detach_restores_the_plain_collective(ranks: RankPool) -> None:
    """Field case 17, its end: after detach everything is native, bit for bit."""
    ranks.run(detach_after_three_steps, 2)


def attach_again() -> None:
    """A second attach replaces the first; residuals begin anew."""
    model = build()
    first = attach(model, LoCoConfig(min_numel=0, bits=8))
    backward(model, 0)
    old = residuals(first)
    second = attach(model, TINY)
    assert (first.attached, second.attached) == (False, True)
    definitions = {name: Definition(2) for name in residuals(second)}
    for step in range(1, 4):
        if step == 2:
            first.detach()  # of no effect: it is detached already
        found = backward(model, step)
        for name, definition in definitions.items():
            fulls = [gradient(name, SHAPES[name], r, step) for r in range(2)]
            assert torch.equal(found[name], definition.reduce(fulls)[dist.get_rank()])
            kept = definition.residual(dist.get_rank(), SHAPES[name])
            assert torch.equal(second.residual(name), kept)
    assert [stats.calls for stats in first.stats()] == [1, 1]
    assert [stats.calls for stats in second.stats()] == [3, 3]
    assert same(residuals(first), old)
    second.detach()
    assert same(backward(model, 5), backward(build(), 5))


def test_second_attach_replaces_the_first(ranks: RankPool) -> None:
    """Field case 17: gradients are compressed once, residuals updated once."""
    ranks.run(attach_again, 2)


def attach_parts_and_whole() -> None:
    model = build()
    parts = [attach(model.a, TINY), attach(model.b, TINY)]
    assert residuals(parts[0]).keys() == {"w"}  # names are relative to what was attached
    backward(model, 0)
    whole = attach(model, TINY)
    assert [part.attached for part in parts] == [False, False]
    assert residuals(whole).keys() == {"a.w", "b.w"}
    with pytest.raises(ValueError, match="by a handle on a larger model"):
        attach(model.a, TINY)
    assert whole.attached
    shards = Definition(2).reduce([gradient("a.w", (9, 5), r, 1) for r in range(2)])
    assert torch.equal(backward(model, 1)["a.w"], shards[dist.get_rank()])
    whole.detach()
    attach(model.a, TINY)


def test_parts_after_the_whole_raise(ranks: RankPool) -> None:
    ranks.run(attach_parts_and_whole, 2)


def memory_from_group() -> str:
    model = shard(Probe({"w": (9, 5)}))
    model.set_allocate_memory_from_process_group_for_comm(True)
    handle = attach(model, TINY)
    model(gradients({"w": (9, 5)}, 0)).backward()
    shards = Definition(2).reduce([gradient("w", (9, 5), r, 0) for r in range(2)])
    assert torch.equal(local_gradients(model)["w"], shards[dist.get_rank()])
    with pytest.raises(AssertionError) as caught:
        model.set_allocate_memory_from_process_group_for_comm(False)
    handle.detach()
    model.set_allocate_memory_from_process_group_for_comm(False)
    return str(caught.value)


def test_memory_from_the_process_group(ranks: RankPool) -> None:
    """Field case 30: before attach it is allowed; after it, FSDP's message names LoCo."""
    assert "LoCoReduceScatter" in ranks.run(memory_from_group, 2)[0]


def refuse_others() -> list[str]:
    plain = nn.Sequential(nn.Linear(4, 4))
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    fsdp1 = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    messages = []
    for model in (plain, ddp, fsdp1, nn.Sequential(fsdp1)):
        with pytest.raises(ValueError, match="fully_shard") as caught:
            attach(model, TINY)
        messages.append(str(caught.value))
    return messages


def test_other_wrappers_are_refused(ranks: RankPool) -> None:
    """Field case 10: at construction, with a sentence that names what is supported."""
    plain, ddp, fsdp1, inside = ranks.run(refuse_others, 2)[0]
    assert "no FSDP2 unit" in plain
    assert "DDP" in ddp
    assert "FSDP1" in fsdp1
    assert "FSDP1" in inside


def train_alone() -> None:
    """Field case 10 (d): W = 1 works."""
    model = build()
    handle = attach(model, LoCoConfig())
    assert same(backward(model, 0), gradients(SHAPES, 0))
    assert handle.memory_bytes() == 0


def test_one_rank_is_not_refused(ranks: RankPool) -> None:
    """Field case 10, one rank: plain gradients."""
    ranks.run(train_alone, 1)

"""Every form in which a state is asked for, stored and loaded."""

from __future__ import annotations

import copy
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

from distributed.checkpoint_runs import (
    OPTIMIZERS,
    load_from,
    mean_residuals,
    net,
    odd_model,
    save_to,
)
from distributed.models import TINY, gradients, residuals, same
from distributed.optimizer_runs import full, loss_of, plain_net, shard, train
from loco_fsdp import LoCoConfig, LoCoOptimizer
from loco_fsdp.checkpoint import META, RESIDUAL, ROWS
from rank_pool import RankPool

EXACT = replace(TINY, residual_checkpoint="exact")

FORMS = {
    "plain": StateDictOptions(),
    "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": StateDictOptions(full_state_dict=True),
    "offload": StateDictOptions(cpu_offload=True),
    "flattened-offload": StateDictOptions(flatten_optimizer_state_dict=True, cpu_offload=True),
}


def through_memory(name: str, form: str, config: LoCoConfig) -> Any:
    """One wrapper's state into a fresh one, which may have been trained already; then side by side.

    Returns whether steps and residuals came over, and the losses of both.
    """
    options = FORMS[form]
    model, optimizer = net(OPTIMIZERS[name], config)
    train(model, optimizer, range(3))
    state = get_optimizer_state_dict(model, optimizer, options=options)
    buffer = io.BytesIO()
    torch.save((model.state_dict(), state), buffer)
    straight = train(model, optimizer, range(3, 8))
    outcomes = []
    for steps_before in (0, 2):
        buffer.seek(0)
        weights, state = torch.load(buffer, weights_only=False)
        other, fresh = net(OPTIMIZERS[name], config)
        train(other, fresh, range(20, 20 + steps_before))
        other.load_state_dict(weights)
        set_optimizer_state_dict(other, fresh, state, options=options)
        steps = fresh.loco.steps
        outcomes.append((steps, train(other, fresh, range(3, 8)) == straight))
    return outcomes


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["sgd", "adamw", "adagrad"])
def test_forms(ranks: RankPool, name: str, form: str) -> None:
    """Field cases 59 and 65: no form loses the residuals, and none of them trips over them."""
    for outcomes in ranks.run(through_memory, 2, name, form, EXACT):
        assert outcomes == [(3, True), (3, True)]


def full_on_rank_0(name: str) -> Any:
    """Whole tensors on the CPU of rank 0 alone, and back to all ranks by broadcast."""
    model, optimizer = net(OPTIMIZERS[name], EXACT)
    train(model, optimizer, range(3))
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    # A copy: torch does not copy tensors that are on the CPU already.
    state: Any = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    keys = sorted(state["state"]["inp.weight"]) if state else []
    straight = train(model, optimizer, range(3, 8))
    other, fresh = net(OPTIMIZERS[name], EXACT)
    other.load_state_dict(weights)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(other, fresh, state, options=options)
    return keys, straight == train(other, fresh, range(3, 8))


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_whole_tensors_on_rank_0(ranks: RankPool, name: str) -> None:
    """Field case 59: full, offloaded, rank 0 only; loaded with ``broadcast_from_rank0``."""
    (keys, same_losses), (other_keys, other_same) = ranks.run(full_on_rank_0, 2, name)
    assert {META, RESIDUAL, ROWS} < set(keys) and not other_keys
    assert same_losses and other_same


def uneven_full_state() -> Any:
    """Shards of 2, 2, 1 and no rows; a parameter split along its second dimension."""
    model, optimizer = odd_model(EXACT)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    model(gradients(shapes, 0)).backward()
    optimizer.step()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: Any = get_optimizer_state_dict(model, optimizer, options=options)
    wanted = mean_residuals(optimizer.loco)
    if not state:
        return None
    saved = {name: values for name, values in state["state"].items() if RESIDUAL in values}
    means = {name: values[RESIDUAL] for name, values in saved.items()}
    rows = {name: values[ROWS].double().mean(0) for name, values in saved.items()}
    return means, rows, {name: value.float() for name, value in wanted.items()}


def test_uneven_shards_as_whole_tensors(ranks: RankPool) -> None:
    """Field case 60: dim 0 of 5 on 4 ranks, full state with CPU offload."""
    means, rows, wanted = ranks.run(uneven_full_state, 4)[0]
    assert means.keys() == wanted.keys() and len(wanted) == 4
    for name, value in wanted.items():
        torch.testing.assert_close(rows[name].float(), value, rtol=1e-6, atol=1e-8)
        assert torch.equal(means[name], value.bfloat16())


def different_on_each_rank(folder: str, save_it: bool) -> Any:
    model, optimizer = net(OPTIMIZERS["adamw"], EXACT)
    if save_it:
        train(model, optimizer, [0])
        for p in optimizer.loco.compressible_parameters():
            value = torch.full(p.tensor.shape, 1.0 + dist.get_rank())
            optimizer.loco.load_residual(p.name, value)
        save_to(folder, model, optimizer)
    else:
        load_from(folder, model, optimizer)
    return residuals(optimizer.loco)


def test_each_rank_reads_its_own_back(ranks: RankPool, tmp_path: Path) -> None:
    """Field case 57: rank 0 all 1, rank 1 all 2; bit for bit.

    That the stored form comes back with the values is tested in ``tests/unit/test_checkpoint.py``.
    """
    before = ranks.run(different_on_each_rank, 2, str(tmp_path), True)
    after = ranks.run(different_on_each_rank, 2, str(tmp_path), False)
    for rank, (dense, dense_again) in enumerate(zip(before, after, strict=True)):
        assert same(dense, dense_again) and len(dense) == 4
        assert all((value == rank + 1).all() for value in dense_again.values())


def saved_with_gradients(folder: str) -> Any:
    """The gradients of the last step, or of the next, are there while it is saved."""
    model, optimizer = net(OPTIMIZERS["adamw"], EXACT)
    loss_of(model, 0).backward()
    optimizer.step()
    save_to(folder, model, optimizer)
    optimizer.zero_grad()
    straight = train(model, optimizer, range(1, 6))
    other, fresh = net(OPTIMIZERS["adamw"], EXACT)
    load_from(folder, other, fresh)
    return straight, train(other, fresh, range(1, 6))


def test_saved_while_gradients_are_set(ranks: RankPool, tmp_path: Path) -> None:
    """Field case 55: inner state and residuals are all there."""
    for straight, resumed in ranks.run(saved_with_gradients, 2, str(tmp_path)):
        assert straight == resumed


def asynchronously(folder: str) -> Any:
    model, optimizer = net(OPTIMIZERS["adamw"], EXACT)
    train(model, optimizer, range(4))
    before = residuals(optimizer.loco)
    weights, state = get_state_dict(model, optimizer)
    # A group of its own, so that its collectives and those of training do not mix.
    group = dist.new_group(backend="gloo")
    both = {"model": weights, "optimizer": state}
    writing: Any = async_save(both, checkpoint_id=folder, process_group=group)
    straight = train(model, optimizer, range(4, 9))  # while it is written
    writing.result(timeout=60)
    other, fresh = net(OPTIMIZERS["adamw"], EXACT)
    load_from(folder, other, fresh)
    is_same = same(before, residuals(fresh.loco))
    return fresh.loco.steps, is_same, straight == train(other, fresh, range(4, 9))


def test_async_save_writes_the_moment_of_the_call(ranks: RankPool, tmp_path: Path) -> None:
    """Field case 62: five more steps while it is being written."""
    for outcome in ranks.run(asynchronously, 2, str(tmp_path)):
        assert outcome == (4, True, True)


def copies() -> Any:
    model, optimizer = net(OPTIMIZERS["adamw"], EXACT)
    train(model, optimizer, range(2))
    state = optimizer.state_dict()["state"]
    ours = {
        (i, key): full(v[key]) for i, v in state.items() for key in v if key in (RESIDUAL, ROWS)
    }
    train(model, optimizer, range(2, 4))
    after = {(i, key): full(state[i][key]) for i, key in ours}
    return all(torch.equal(ours[key], after[key]) for key in ours), len(ours)


def test_what_a_state_dict_holds_does_not_change(ranks: RankPool) -> None:
    """Field case 62: residuals in it are copies."""
    assert ranks.run(copies, 2) == [(True, 8)] * 2


def keys_on_disk(folder: str) -> Any:
    """All our keys as DCP has stored them, and a load that uses no planner of its own."""
    model, optimizer = net(OPTIMIZERS["adamw"])
    train(model, optimizer, range(3))
    save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)
    other, fresh = net(OPTIMIZERS["adamw"])
    template = {"optimizer": get_optimizer_state_dict(other, fresh)}
    load(template, checkpoint_id=folder)
    set_optimizer_state_dict(other, fresh, template["optimizer"])
    keys = FileSystemReader(folder).read_metadata().state_dict_metadata.keys()
    return fresh.loco.steps, sorted(key for key in keys if "loco" in key)


def test_keys_are_flat_strings(ranks: RankPool, tmp_path: Path) -> None:
    """Field case 64: names only, no number in them; counters load without a planner."""
    weights = ["blocks.0.weight", "blocks.1.weight", "inp.weight", "out.weight"]
    wanted = [f"optimizer.state.{w}.{key}" for w in weights for key in (META, RESIDUAL)]
    for steps, keys in ranks.run(keys_on_disk, 2, str(tmp_path)):
        assert steps == 3
        assert keys == wanted


def on_a_subgroup() -> Any:
    """Two FSDP jobs of two ranks each; the state goes through ``torch.save``."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = pairs[dist.get_rank() // 2]
    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    model = shard(plain_net(), mesh=mesh)
    optimizer = LoCoOptimizer(AdamW(model.parameters(), lr=1e-2), model, EXACT)
    train(model, optimizer, range(3))
    buffer = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), buffer)
    has_group = b"ProcessGroup" in buffer.getvalue()
    straight = train(model, optimizer, range(3, 6))
    buffer.seek(0)
    weights, state = torch.load(buffer, weights_only=False)
    other = shard(plain_net(), mesh=mesh)
    other.load_state_dict(weights)
    fresh = LoCoOptimizer(AdamW(other.parameters(), lr=1e-2), other, EXACT)
    fresh.load_state_dict(state)
    return has_group, straight == train(other, fresh, range(3, 6))


def test_no_process_group_in_the_state(ranks: RankPool) -> None:
    """Field case 18: after a load the live units' group is used, not the default group."""
    assert ranks.run(on_a_subgroup, 4) == [(False, True)] * 4


class Wide(nn.Module):
    """One large matrix, so that what is written is known to the byte."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(512, 512))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).square().mean()


def sizes(folder: str, config: LoCoConfig) -> list[int]:
    """Bytes on disk of the inner optimizer's state alone, and of the wrapper's."""
    model = Wide()
    fully_shard(model)
    optimizer = LoCoOptimizer(AdamW(model.parameters(), lr=1e-2), model, config)
    model(torch.randn(4, 512)).backward()
    optimizer.step()
    found = []
    for name, one in (("inner", optimizer.inner), ("ours", optimizer)):
        path = Path(folder, name)
        save({"optimizer": get_optimizer_state_dict(model, one)}, checkpoint_id=path)
        found.append(sum(file.stat().st_size for file in path.iterdir()))
    return found


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 2.1), ("float32", 4.1)])
@pytest.mark.parametrize("world_size", [2, 4])
def test_size_on_disk(
    ranks: RankPool, tmp_path: Path, world_size: int, dtype: Any, bound: float
) -> None:
    """Once, not once for each rank: 2 bytes for each compressed parameter, and a little."""
    config = replace(TINY, residual_checkpoint_dtype=dtype)
    inner, ours = ranks.run(sizes, world_size, str(tmp_path), config)[0]
    assert bound - 0.2 < (ours - inner) / 512**2 < bound

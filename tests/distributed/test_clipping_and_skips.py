"""Gradient clipping on any number of ranks, skipped steps around a save, and FSDP's own flags."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import SGD

from distributed.checkpoint_runs import OPTIMIZERS, load_from, mean_residuals, net, save_to
from distributed.models import TINY, residuals, same
from distributed.optimizer_runs import batch, full, loss_of, parameters, plain_net, shard, train
from loco_fsdp import LoCoOptimizer, _torch
from loco_fsdp.checkpoint import RESIDUAL
from rank_pool import RankPool

# Clipping


def clipped_norms(compressed: bool) -> list[float]:
    """Norms before clipping to 0.1, and after it, of one global batch of 64 in three steps."""
    model = shard(plain_net())
    optimizer: Any = SGD(model.parameters(), lr=0.1)
    if compressed:
        optimizer = LoCoOptimizer(optimizer, model, replace(TINY, bits=8))
    world_size, norms = dist.get_world_size(), []
    for step in range(3):
        pieces = [batch(step, rank) for rank in range(4)]
        x, y = (torch.cat([piece[i] for piece in pieces]) for i in (0, 1))
        own = slice(dist.get_rank() * 64 // world_size, (dist.get_rank() + 1) * 64 // world_size)
        (model(x[own]) - y[own]).square().mean().backward()
        before = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        squares = [full(p.grad).square().sum() for p in model.parameters() if p.grad is not None]
        after = torch.stack(squares).sum().sqrt()
        assert isinstance(before, DTensor)
        norms += [float(before.full_tensor()), float(after)]
        optimizer.step()
        optimizer.zero_grad()
    return norms


def test_clipping_on_1_2_and_4_ranks(ranks: RankPool) -> None:
    """Field case 14: ``clip_grad_norm_`` sees the norm over all ranks, the same on any number.

    8 bits an element: the norms of a step agree to 1 %, and after clipping to the limit itself.
    """
    wanted = ranks.run(clipped_norms, 1, False)[0]
    assert min(wanted[::2]) > 0.1
    for world_size in (1, 2, 4):
        for norms in ranks.run(clipped_norms, world_size, True):
            assert norms[::2] == pytest.approx(wanted[::2], rel=1e-2)
            assert norms[1::2] == pytest.approx([0.1] * 3, rel=1e-4)


# Skipped steps


def scaled_step(model: Any, optimizer: Any, scaler: Any, step: int, bomb: bool) -> None:
    loss = loss_of(model, step)
    if bomb and dist.get_rank() == 1:
        loss = loss * torch.inf
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def bombed(folder: str, bad_step: int, save_at: int) -> Any:
    """Eight steps, one of them with inf on rank 1 only; saved after ``save_at`` and resumed."""

    def make() -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        model = shard(plain_net())
        config = replace(TINY, residual_checkpoint="exact")
        inner = OPTIMIZERS["adamw"](model.parameters())
        return model, LoCoOptimizer(inner, model, config, grad_scaler=scaler), scaler

    model, optimizer, scaler = make()
    for step in range(8):
        if step == save_at:
            save_to(folder, model, optimizer)
            scale = scaler.state_dict()
        scaled_step(model, optimizer, scaler, step, bomb=step == bad_step)
    straight = parameters(model), residuals(optimizer.loco), scaler.get_scale()
    other, fresh, scaler = make()
    load_from(folder, other, fresh)
    scaler.load_state_dict(scale)
    for step in range(save_at, 8):
        scaled_step(other, fresh, scaler, step, bomb=step == bad_step)
    resumed = parameters(other), residuals(fresh.loco), scaler.get_scale()
    is_finite = all(e.isfinite().all() for e in straight[1].values())
    return (
        same(straight[0], resumed[0]) and same(straight[1], resumed[1]),
        straight[2] == resumed[2],
        is_finite,
    )


@pytest.mark.parametrize(("bad_step", "save_at"), [(0, 1), (3, 4), (3, 3), (7, 4)], ids=str)
def test_inf_around_a_save(ranks: RankPool, tmp_path: Path, bad_step: int, save_at: int) -> None:
    """Field cases 7 and 53: inf on one rank in the first step, right before and after a save.

    Scales grow, back off and are loaded; the resumed run is the same bit for bit.
    """
    assert ranks.run(bombed, 2, str(tmp_path), bad_step, save_at) == [(True, True, True)] * 2


def nonfinite_then_saved() -> Any:
    """A NaN gradient reaches the optimizer's side, and no checkpoint."""
    model, optimizer = net(OPTIMIZERS["sgd"], replace(TINY, residual_checkpoint="exact"))
    train(model, optimizer, range(2))
    (loss_of(model, 2) * torch.nan).backward()
    is_seen = any(not full(p.grad).isfinite().all() for p in model.parameters())  # type: ignore[arg-type]
    entries = optimizer.loco.state_dict().values()
    kept = [full(value) for entry in entries for value in entry.values()]
    return is_seen, all(bool(value.isfinite().all()) for value in kept)


def test_nothing_that_is_not_finite_is_saved(ranks: RankPool) -> None:
    """Field case 54: the gradient is not finite, the checkpoint is."""
    assert ranks.run(nonfinite_then_saved, 2) == [(True, True)] * 2


def huge_then_saved() -> bool:
    """Each rank holds more than a bfloat16 can, and the sum is more than a float32 can."""
    config = replace(TINY, residual_dtype="float32")
    model, optimizer = net(OPTIMIZERS["sgd"], config)
    train(model, optimizer, range(1))
    for p in optimizer.loco.compressible_parameters():
        optimizer.loco.load_residual(p.name, torch.full(p.tensor.shape, -3.4e38))
    entries = optimizer.loco.state_dict().values()
    return all(bool(full(entry[RESIDUAL]).isfinite().all()) for entry in entries)


def test_the_largest_residuals_are_saved_as_finite(ranks: RankPool) -> None:
    """Field case 54: what could not be loaded again is not written."""
    assert ranks.run(huge_then_saved, 2) == [True, True]


# Storage


def in_half_precision(folder: str) -> Any:
    """bfloat16 parameters, float32 residuals that need more bits than those have."""
    value = 1.0 + 2.0**-12
    config = replace(TINY, residual_dtype="float32", residual_checkpoint_dtype="float32")
    found = []
    for is_new in (False, True):
        model = shard(plain_net().bfloat16())
        optimizer = LoCoOptimizer(OPTIMIZERS["adamw"](model.parameters()), model, config)
        if is_new:
            load_from(folder, model, optimizer)
        else:
            x, y = batch(0)
            (model(x.bfloat16()) - y.bfloat16()).square().mean().backward()
            optimizer.step()
            for p in optimizer.loco.compressible_parameters():
                optimizer.loco.load_residual(p.name, torch.full(p.tensor.shape, value))
            save_to(folder, model, optimizer)
        found.append(mean_residuals(optimizer.loco))
    return all((mean == value).all() for means in found for mean in means.values())


def test_float32_residuals_of_bfloat16_parameters(ranks: RankPool, tmp_path: Path) -> None:
    """Field case 61: no state dict cuts them to the parameter's type."""
    assert ranks.run(in_half_precision, 2, str(tmp_path)) == [True, True]


# Flags


def flags(model: nn.Module) -> list[Any]:
    return [
        (group.reduce_grads, group.all_reduce_grads, group.reshard_after_backward)
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in _torch.param_groups(_torch.fsdp_state(module))
    ]


def flags_run(folder: str) -> Any:
    """What the user has set, after everything that LoCo does, and after it has raised."""
    model = shard(plain_net())
    assert isinstance(model, FSDPModule)
    model.set_requires_all_reduce(False)
    model.set_reshard_after_backward(False)
    before = flags(model)
    optimizer = LoCoOptimizer(OPTIMIZERS["adamw"](model.parameters()), model, TINY)
    train(model, optimizer, range(2))
    save_to(folder, model, optimizer)
    load_from(folder, model, optimizer)
    with pytest.raises(KeyError):
        optimizer.loco.residual("no such parameter")
    after_training = flags(model)
    model.blocks[0].set_requires_gradient_sync(False)  # type: ignore[operator]
    unsynced = flags(model)
    optimizer.loco.reset()
    optimizer.loco.detach()
    return before == after_training and unsynced == flags(model) != before


def test_flags_stay_as_the_user_set_them(ranks: RankPool, tmp_path: Path) -> None:
    """Field case 25: nothing that LoCo does sets FSDP's flags to what they were not."""
    assert ranks.run(flags_run, 2, str(tmp_path)) == [True, True]

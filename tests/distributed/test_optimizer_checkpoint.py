"""torch.distributed.checkpoint and the inner optimizer's state, through LoCoOptimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import SGD, Adagrad, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from distributed.models import TINY, residuals, same
from distributed.optimizer_runs import full, loss_of, parameters, plain_net, shard, train
from loco_fsdp import LoCoOptimizer
from loco_fsdp.checkpoint import KEYS
from rank_pool import RankPool

Build = Callable[[Any], Optimizer]


def sgd(params: Any) -> Optimizer:
    return SGD(params, lr=0.1, weight_decay=0.1)


def momentum(params: Any) -> Optimizer:
    return SGD(params, lr=0.1, momentum=0.9)


def adamw(params: Any) -> Optimizer:
    return AdamW(params, lr=1e-2)


def adagrad(params: Any) -> Optimizer:
    return Adagrad(params, lr=1e-2)


def state_run(build: Build, ask: bool, late: bool) -> Any:
    """Five steps; ``ask``: DCP is asked for the state before each of them and after the last."""
    model = shard(plain_net())
    optimizer = LoCoOptimizer(build(model.parameters()), None if late else model, TINY)
    checked = []
    for step in range(6):
        before = parameters(model)
        if ask:
            get_optimizer_state_dict(model, optimizer)
        if step > 0:
            checked.append((same(parameters(model), before), optimizer.loco.steps))
        if step < 5:
            train(model, optimizer, [step])
    calls = [stats.calls for stats in optimizer.loco.stats()]
    return checked, calls, parameters(model), residuals(optimizer.loco)


@pytest.mark.parametrize("late", [False, True], ids=["attached", "late"])
@pytest.mark.parametrize("build", [sgd, momentum, adamw, adagrad])
def test_asking_for_the_state_changes_nothing(ranks: RankPool, build: Build, late: bool) -> None:
    """Field case 56: DCP steps an optimizer that has no state, each time it is asked for it.

    Not even AdamW's step count moves, which it does when a plain AdamW is asked.
    """
    expected = ranks.run(state_run, 2, build, False, late)
    for result, wanted in zip(ranks.run(state_run, 2, build, True, late), expected, strict=True):
        assert result[0] == [(True, step) for step in range(1, 6)]
        assert result[1] == [5, 5, 5]
        assert same(result[2], wanted[2])
        assert same(result[3], wanted[3])


def asked_between(build: Build, ask: bool) -> Any:
    """Asked while gradients are there, and after they were cleared without a step."""
    model = shard(plain_net())
    optimizer = LoCoOptimizer(build(model.parameters()), model, TINY)
    train(model, optimizer, [0])
    loss_of(model, 1).backward()
    if ask:
        get_optimizer_state_dict(model, optimizer)
    gradients_stay = all(p.grad is not None for p in model.parameters())
    optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, [2])
    return gradients_stay, optimizer.loco.steps, parameters(model), residuals(optimizer.loco)


@pytest.mark.parametrize("build", [sgd, adamw])
def test_asking_between_backward_and_step(ranks: RankPool, build: Build) -> None:
    expected = ranks.run(asked_between, 2, build, False)
    for result, wanted in zip(ranks.run(asked_between, 2, build, True), expected, strict=True):
        assert result[:2] == (True, 3)
        assert same(result[2], wanted[2])
        assert same(result[3], wanted[3])


def mapped(function: Callable[[Tensor], Tensor], state: Any) -> Any:
    if isinstance(state, dict):
        return {name: mapped(function, value) for name, value in state.items()}
    return function(state) if isinstance(state, Tensor) else state


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):  # DCP makes lists of tuples
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(full(one), full(other)) if isinstance(one, Tensor) else bool(one == other)


def without_ours(saved: Any) -> Any:
    """A state dict by DCP without what LoCo has added."""
    states = {
        name: {key: value for key, value in state.items() if key not in KEYS}
        for name, state in saved["state"].items()
    }
    return {**saved, "state": {name: state for name, state in states.items() if state}}


def round_trip(build: Build, full_state: bool) -> Any:
    """A state goes from one wrapper into a fresh one, which then runs beside the first."""
    options = StateDictOptions(full_state_dict=full_state)
    config = replace(TINY, residual_checkpoint="exact")
    model = shard(plain_net())
    optimizer = LoCoOptimizer(build(model.parameters()), model, config)
    train(model, optimizer, range(3))
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    inner = get_optimizer_state_dict(model, optimizer.inner, options=options)
    is_inner = equal(without_ours(saved), inner)
    saved = mapped(torch.clone, saved)
    other = shard(plain_net())
    other.load_state_dict(mapped(torch.clone, model.state_dict()))
    fresh = LoCoOptimizer(build(other.parameters()), other, config)
    set_optimizer_state_dict(other, fresh, mapped(torch.clone, saved), options=options)
    steps = fresh.loco.steps
    is_loaded = equal(saved, get_optimizer_state_dict(other, fresh, options=options))
    for one, its in ((model, optimizer), (other, fresh)):
        train(one, its, range(3, 13))
    return is_inner, is_loaded, steps, same(parameters(model), parameters(other))


@pytest.mark.parametrize(
    ("build", "full_state"),
    [(sgd, False), (momentum, False), (momentum, True), (adamw, False), (adamw, True)],
    ids=["sgd", "momentum", "momentum-full", "adamw", "adamw-full"],
)
def test_round_trip(ranks: RankPool, build: Build, full_state: bool) -> None:
    """Ten steps after loading are as without, and what is saved beside ours is the inner state."""
    for outcome in ranks.run(round_trip, 2, build, full_state):
        assert outcome == (True, True, 3, True)


def saved_with_an_empty_group(folder: str) -> Any:
    """Field case 50: groups [all, []], with different settings, through files and back."""

    def groups(params: Any) -> Any:
        return [{"params": list(params), "lr": 0.01}, {"params": [], "lr": 0.02}]

    def make() -> Any:
        model = shard(plain_net())
        optimizer = LoCoOptimizer(AdamW(groups(model.parameters()), betas=(0.8, 0.9)), model, TINY)
        return model, optimizer, LambdaLR(optimizer, [lambda k: 0.5**k, lambda k: 0.1**k])

    model, optimizer, scheduler = make()
    train(model, optimizer, range(2))
    scheduler.step()
    weights, state = get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    other, fresh, _ = make()
    weights, state = get_state_dict(other, fresh)
    load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    other.load_state_dict(weights)
    set_optimizer_state_dict(other, fresh, state)
    train(other, fresh, [2])
    return [(len(group["params"]), group["lr"], group["betas"]) for group in fresh.param_groups]


def test_empty_group(ranks: RankPool, tmp_path: Path) -> None:
    """Field case 50: two groups before and after, each with its lr and betas."""
    for groups in ranks.run(saved_with_an_empty_group, 2, str(tmp_path)):
        assert [count for count, _, _ in groups] == [7, 0]
        assert [tuple(betas) for _, _, betas in groups] == [(0.8, 0.9)] * 2
        assert [lr for _, lr, _ in groups] == pytest.approx([0.005, 0.002])

"""States that must not be loaded, or saved: a clear error on every rank, and nothing is changed."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from distributed.checkpoint_runs import OPTIMIZERS, net
from distributed.models import TINY, residuals, same
from distributed.optimizer_runs import loss_of, parameters, train
from loco_fsdp.checkpoint import META, RESIDUAL, ROWS
from rank_pool import RankPool

EXACT = replace(TINY, residual_checkpoint="exact")


def of_version(version: int) -> Any:
    model, optimizer = net(OPTIMIZERS["adamw"], TINY)
    train(model, optimizer, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    for values in state["state"].values():
        if META in values:
            values[META][0] = version
    before = parameters(model), residuals(optimizer.loco), optimizer.loco.steps
    inner = {id(p): copy.deepcopy(s) for p, s in optimizer.state.items()}
    with pytest.raises(ValueError, match=rf"format version {version}: wanted 1\..*loco_residual"):
        optimizer.load_state_dict(state)
    after = parameters(model), residuals(optimizer.loco), optimizer.loco.steps
    steps = all(
        torch.equal(optimizer.state[p]["step"], inner[id(p)]["step"]) for p in optimizer.state
    )
    return steps and all(
        torch.equal(one[name], other[name])
        for one, other in zip(before[:2], after[:2], strict=True)
        for name in one
    )


def test_unknown_format_version(ranks: RankPool) -> None:
    """A sentence, and nothing has been loaded."""
    assert ranks.run(of_version, 2, 7) == [True, True]


def of_wrong_shape() -> None:
    model, optimizer = net(OPTIMIZERS["adamw"], TINY)
    train(model, optimizer, range(2))
    state = optimizer.loco.state_dict()
    wrong = {**state, "inp.weight": {**state["inp.weight"], RESIDUAL: torch.zeros(3, 3)}}
    with pytest.raises(ValueError, match=r"'inp.weight' has shape \[3, 3\]: wanted \[24, 10\]"):
        optimizer.loco.load_state_dict(wrong)
    nans = torch.full((24, 10), torch.nan)
    wrong = {**state, "inp.weight": {**state["inp.weight"], RESIDUAL: nans}}
    with pytest.raises(ValueError, match=r"'inp.weight' holds a NaN or an infinity"):
        optimizer.loco.load_state_dict(wrong)


def test_wrong_tensors_are_named(ranks: RankPool) -> None:
    ranks.run(of_wrong_shape, 2)


def refused(key: str, value: float) -> bool:
    """What is not finite on the last rank only is refused by all, before anything is loaded."""
    model, optimizer = net(OPTIMIZERS["adamw"], EXACT)
    train(model, optimizer, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, range(2, 4))
    if dist.get_rank() == dist.get_world_size() - 1:
        state["state"][0][key].to_local().flatten()[-1] = value
    before = (
        parameters(model),
        residuals(optimizer.loco),
        copy.deepcopy(optimizer.inner.state_dict()),
    )
    with pytest.raises(ValueError, match=r"'inp.weight' holds a NaN or an infinity"):
        optimizer.load_state_dict(state)
    after = parameters(model), residuals(optimizer.loco), optimizer.inner.state_dict()
    steps = [[s["step"] for s in one[2]["state"].values()] for one in (before, after)]
    return same(before[0], after[0]) and same(before[1], after[1]) and steps[0] == steps[1]


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
@pytest.mark.parametrize("key", [RESIDUAL, ROWS])
def test_not_finite_on_one_rank(ranks: RankPool, key: str, value: float) -> None:
    """A rank that raised alone would leave the others waiting."""
    assert ranks.run(refused, 3, key, value) == [True] * 3


# Broken units


def broken() -> Any:
    model, optimizer = net(OPTIMIZERS["adamw"], TINY)
    train(model, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    failing = mock.patch("torch.distributed.all_to_all_single", side_effect=RuntimeError("cut"))
    with failing, pytest.raises(RuntimeError, match="cut"):
        loss_of(model, 2).backward()
    for call in (
        optimizer.state_dict,
        optimizer.loco.state_dict,
        lambda: get_optimizer_state_dict(model, optimizer),
    ):
        with pytest.raises(RuntimeError, match=r"is broken since an exchange failed.*cut"):
            call()
    optimizer.zero_grad()
    optimizer.load_state_dict(saved)
    optimizer.state_dict()
    return train(model, optimizer, range(2, 4)), optimizer.loco.steps


def test_a_broken_unit_is_not_saved(ranks: RankPool) -> None:
    """Half-updated residuals never reach a checkpoint; loading one makes the unit whole again."""
    for losses, steps in ranks.run(broken, 2):
        assert len(losses) == 2 and steps == 4

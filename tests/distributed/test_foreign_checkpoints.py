"""Checkpoints of other settings, of other versions, without LoCo, and for jobs without it."""

from __future__ import annotations

import copy
import unittest
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.optim import Optimizer

from distributed.checkpoint_runs import (
    OPTIMIZERS,
    load_from,
    mean_residuals,
    net,
    save_to,
)
from distributed.models import TINY, residuals
from distributed.optimizer_runs import loss_of, parameters, plain_net, shard, train
from loco_fsdp import LoCoOptimizer
from loco_fsdp.checkpoint import KEYS
from rank_pool import RankPool

EXACT = replace(TINY, residual_checkpoint="exact")


def logged(call: Any) -> list[str]:
    """What ``call()`` logs as warnings."""
    with unittest.TestCase().assertLogs("loco_fsdp", "WARNING") as logs:
        call()
    return [record.getMessage() for record in logs.records]


# Ours into a plain optimizer


def plain_after_ours(name: str, form: str, folder: str) -> Any:
    """Ten steps of a plain optimizer that continues a wrapped one, beside one that never knew."""
    model, optimizer = net(OPTIMIZERS[name], EXACT)
    train(model, optimizer, range(3))
    runs = []
    for with_ours in (True, False):
        source = optimizer if with_ours else optimizer.inner
        other = shard(plain_net())
        plain = OPTIMIZERS[name](other.parameters())
        if form == "files":
            save_to(f"{folder}/{with_ours}", model, source)
            load_from(f"{folder}/{with_ours}", other, plain)
        else:
            other.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
            if form == "raw":
                plain.load_state_dict(copy.deepcopy(source.state_dict()))
            else:
                options = StateDictOptions(flatten_optimizer_state_dict=form == "flattened")
                state = get_optimizer_state_dict(model, source, options=options)
                set_optimizer_state_dict(other, plain, copy.deepcopy(state), options=options)
        runs.append((train(other, plain, range(3, 13)), parameters(other)))
    return runs[0][0] == runs[1][0], all(
        torch.equal(value, runs[1][1][key]) for key, value in runs[0][1].items()
    )


@pytest.mark.parametrize("form", ["files", "raw", "dcp", "flattened"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ours_into_a_plain_optimizer(ranks: RankPool, tmp_path: Path, name: str, form: str) -> None:
    """Field case 65, the reverse: residuals are ignored, and no optimizer trips over them."""
    for outcome in ranks.run(plain_after_ours, 2, name, form, str(tmp_path)):
        assert outcome == (True, True)


def plain_before_the_first_step() -> None:
    """A state that was never stepped holds nothing that AdamW could take for its own."""
    model, optimizer = net(OPTIMIZERS["adamw"], EXACT)
    loss_of(model, 0).backward()
    state = optimizer.state_dict()
    assert state["state"] == {}
    other = shard(plain_net())
    plain = OPTIMIZERS["adamw"](other.parameters())
    plain.load_state_dict(state)
    train(other, plain, range(2))


def test_untouched_ours_into_a_plain_optimizer(ranks: RankPool) -> None:
    ranks.run(plain_before_the_first_step, 2)


# A plain optimizer's into ours


def ours_after_plain(name: str, form: str, folder: str) -> Any:
    """What is logged, the steps and residuals after loading, and ten steps beside the plain job."""
    model = shard(plain_net())
    plain = OPTIMIZERS[name](model.parameters())
    train(model, plain, range(3))
    other, optimizer = net(OPTIMIZERS[name], replace(TINY, warmup_steps=100))
    train(other, optimizer, range(50, 52))

    def load_it() -> None:
        if form == "files":
            save_to(folder, model, plain)
            weights, state = get_state_dict(other, optimizer.inner)
            loaded: dict[str, Any] = {"model": weights, "optimizer": state}
            load(loaded, checkpoint_id=folder)
            set_state_dict(
                other,
                optimizer,
                model_state_dict=loaded["model"],
                optim_state_dict=loaded["optimizer"],
            )
            return
        other.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
        if form == "raw":
            optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
            return
        options = StateDictOptions(
            flatten_optimizer_state_dict=form == "flattened", strict=form != "loose"
        )
        state = copy.deepcopy(get_optimizer_state_dict(model, plain, options=options))
        set_optimizer_state_dict(other, optimizer, state, options=options)

    messages = logged(load_it)
    steps = optimizer.loco.steps
    is_zero = not any(e.any() for e in residuals(optimizer.loco).values())
    losses = train(model, plain, range(3, 13)), train(other, optimizer, range(3, 13))
    return messages, steps, is_zero, losses


@pytest.mark.parametrize("form", ["files", "raw", "dcp", "loose", "flattened"])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_plain_optimizer_into_ours(ranks: RankPool, tmp_path: Path, name: str, form: str) -> None:
    """Field case 65: zero residuals and one warning, strict and not, flattened and not."""
    for messages, steps, is_zero, (plain, ours) in ranks.run(
        ours_after_plain, 2, name, form, str(tmp_path)
    ):
        (message,) = messages
        assert "no residual for 4 of 4 compressed parameters, such as 'inp.weight'" in message
        assert steps == 0 and is_zero
        assert ours == pytest.approx(plain, rel=1e-4)  # its warm-up sums in rank order


def strict_template(folder: str) -> Any:
    """DCP into our own template: it names the key that is missing, unless told to go on."""
    model = shard(plain_net())
    plain = OPTIMIZERS["adamw"](model.parameters())
    train(model, plain, range(3))
    save_to(folder, model, plain)
    other, optimizer = net()
    with pytest.raises(
        CheckpointException, match=r"Missing key.*optimizer\.state\.inp\.weight\.loco_meta"
    ):
        load_from(folder, other, optimizer)
    state: Any = get_optimizer_state_dict(other, optimizer)
    loaded = {"optimizer": state}
    load(loaded, checkpoint_id=folder, planner=DefaultLoadPlanner(allow_partial_load=True))
    set_optimizer_state_dict(other, optimizer, state)
    return optimizer.loco.steps, any(e.any() for e in residuals(optimizer.loco).values())


def test_missing_keys_are_named(ranks: RankPool, tmp_path: Path) -> None:
    """Field case 65: a named message where DCP looks for what was never saved."""
    assert ranks.run(strict_template, 2, str(tmp_path)) == [(0, False)] * 2


# Ours of other settings


OTHER_SETTINGS: list[dict[str, Any]] = [
    {"block_size": 32},
    {"bits": 8},
    {"residual_dtype": "bfloat16"},
    {"residual_dtype": "float32"},
    {"scale": "static", "static_residual_scale": 2.0**10},
    {"feedback_gain": 0.4},
    {"feedback": "classic"},
    {"residual_checkpoint": "exact"},
]


def converted(before: dict[str, Any], after: dict[str, Any]) -> Any:
    model, optimizer = net(OPTIMIZERS["adamw"], replace(TINY, **before))
    train(model, optimizer, range(3))
    state = copy.deepcopy(optimizer.state_dict())
    _, fresh = net(OPTIMIZERS["adamw"], replace(TINY, **after))
    fresh.load_state_dict(state)
    gains = optimizer.loco.config.gain, fresh.loco.config.gain
    return mean_residuals(optimizer.loco), mean_residuals(fresh.loco), gains, fresh.loco.steps


@pytest.mark.parametrize("there_and_back", [False, True])
@pytest.mark.parametrize("changes", OTHER_SETTINGS, ids=str)
def test_other_settings(ranks: RankPool, changes: dict[str, Any], there_and_back: bool) -> None:
    """Block size, codec and storage are converted; with another gain the backlog e/gain stays."""
    pair = (changes, {}) if there_and_back else ({}, changes)
    for before, after, (old_gain, new_gain), steps in ranks.run(converted, 2, *pair):
        assert steps == 3
        for name, mean in before.items():
            backlog = mean / old_gain
            assert backlog.any()
            bound = float(backlog.abs().max()) * (2**-9 + 2**-7)
            bound += 2.0**-10 / new_gain if changes.get("scale") else 0.0
            torch.testing.assert_close(after[name] / new_gain, backlog, rtol=0, atol=bound)


def without_feedback() -> Any:
    model, optimizer = net(OPTIMIZERS["adamw"], TINY)
    train(model, optimizer, range(3))
    state = copy.deepcopy(optimizer.state_dict())
    _, fresh = net(OPTIMIZERS["adamw"], replace(TINY, feedback="none"))
    fresh.load_state_dict(state)
    _, last = net(OPTIMIZERS["adamw"], TINY)
    state = copy.deepcopy(fresh.state_dict())
    messages = logged(lambda: last.load_state_dict(state))
    return fresh.loco.steps, last.loco.steps, messages


def test_without_feedback(ranks: RankPool) -> None:
    """It drops the residuals, but steps go on being counted; the way back has a warning."""
    for steps, steps_after, messages in ranks.run(without_feedback, 2):
        assert (steps, steps_after) == (3, 3)
        assert len(messages) == 1 and "no residual" in messages[0]


def after_training() -> Any:
    """States that lack some residuals, into a job that has trained on: nothing of it stays."""
    model, optimizer = net(config=TINY)
    train(model, optimizer, range(2))
    state, steps = copy.deepcopy(optimizer.loco.state_dict()), optimizer.loco.steps
    name = min(state)
    found = []
    for loaded in (state, {**state, name: {}}, {name: state[name]}, {}):
        train(model, optimizer, range(2, 4))
        assert all(value.any() for value in residuals(optimizer.loco).values())
        optimizer.loco.load_state_dict(loaded)
        kept = {key for key, value in residuals(optimizer.loco).items() if value.any()}
        found.append((kept == {key for key in loaded if loaded[key]}, optimizer.loco.steps))
    return found == [(True, steps), (True, steps), (True, steps), (True, 0)]


def test_into_a_job_that_has_trained(ranks: RankPool) -> None:
    assert ranks.run(after_training, 2) == [True, True]


def now_skipped() -> list[str]:
    model, optimizer = net(OPTIMIZERS["adamw"], TINY)
    train(model, optimizer, range(3))
    state = copy.deepcopy(optimizer.state_dict())
    _, fresh = net(OPTIMIZERS["adamw"], replace(TINY, skip=("blocks.*",)))
    return logged(lambda: fresh.load_state_dict(state))


def test_dropped_residuals_are_named(ranks: RankPool) -> None:
    for messages in ranks.run(now_skipped, 2):
        (message,) = messages
        assert "residuals of 2 parameters that are not compressed here" in message


# The handle as a Stateful


def stateful(folder: str) -> Any:
    """A job that saves the inner optimizer its own way, and the handle beside it."""
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.checkpoint.stateful import Stateful

    model, optimizer = net(OPTIMIZERS["adamw"], EXACT)
    assert isinstance(optimizer.loco, Stateful)
    train(model, optimizer, range(3))
    weights, state = get_state_dict(model, optimizer.inner)
    save({"model": weights, "optim": state, "loco": optimizer.loco}, checkpoint_id=folder)
    straight = train(model, optimizer, range(3, 8))
    other, fresh = net(OPTIMIZERS["adamw"], EXACT)
    weights, state = get_state_dict(other, fresh.inner)
    app: dict[str, Any] = {"model": weights, "optim": state, "loco": fresh.loco}
    load(app, checkpoint_id=folder)
    set_state_dict(other, fresh.inner, model_state_dict=app["model"], optim_state_dict=app["optim"])
    assert not any(set(KEYS) & set(values) for values in app["optim"]["state"].values())
    return straight == train(other, fresh, range(3, 8))


def test_handle_is_a_stateful(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(stateful, 2, str(tmp_path)) == [True, True]


def two_optimizers() -> Any:
    """One wrapped, one plain: the wrapped one's state holds the residuals of its own only."""

    def make() -> Any:
        model = shard(plain_net())
        own = [p for name, p in model.named_parameters() if name.startswith("blocks")]
        others = [p for name, p in model.named_parameters() if not name.startswith("blocks")]
        optimizer = LoCoOptimizer(OPTIMIZERS["adamw"](own), model, EXACT)
        return model, optimizer, OPTIMIZERS["momentum"](others)

    def both(model: Any, one: Optimizer, other: Optimizer, steps: range) -> list[float]:
        losses = []
        for step in steps:
            loss = loss_of(model, step)
            loss.backward()
            for optimizer in (one, other):
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model, optimizer, plain = make()
    both(model, optimizer, plain, range(3))
    loco, *saved = copy.deepcopy(
        [optimizer.loco.state_dict(), optimizer.state_dict(), plain.state_dict()]
    )
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    straight = both(model, optimizer, plain, range(3, 8))
    model, optimizer, plain = make()
    model.load_state_dict(weights)
    optimizer.loco.load_state_dict(loco)
    optimizer.load_state_dict(saved[0])
    plain.load_state_dict(saved[1])
    return straight == both(model, optimizer, plain, range(3, 8))


def test_two_optimizers(ranks: RankPool) -> None:
    assert ranks.run(two_optimizers, 2) == [True, True]

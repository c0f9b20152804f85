"""Optimizer states that come and go: skipped and empty steps, parameters that join later."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.optim import Optimizer

from distributed.checkpoint_runs import OPTIMIZERS, Build, load_from, net, save_to
from distributed.models import TINY, residuals, same
from distributed.optimizer_runs import loss_of, parameters, plain_net, shard, train
from loco_fsdp import LoCoOptimizer
from loco_fsdp.checkpoint import ROWS
from rank_pool import RankPool

EXACT = replace(TINY, residual_checkpoint="exact")

# Any sequence of what a training loop may do


def empty_step(model: Any, optimizer: Optimizer, number: int) -> None:
    """A step to which no gradient came."""
    optimizer.zero_grad()
    optimizer.step()


def skipped_step(model: Any, optimizer: Optimizer, number: int) -> None:
    """As a scaler skips one."""
    loss_of(model, number).backward()
    optimizer.zero_grad()


def partly_frozen_step(model: Any, optimizer: Optimizer, number: int) -> None:
    """One block gets no gradient."""
    model.blocks[number % 2].requires_grad_(False)
    train(model, optimizer, [number])
    model.blocks[number % 2].requires_grad_(True)


def whole_step(model: Any, optimizer: Optimizer, number: int) -> None:
    train(model, optimizer, [number])


EVENTS = (empty_step, skipped_step, partly_frozen_step, whole_step)


def outcome(model: Any, optimizer: LoCoOptimizer) -> Any:
    return parameters(model), residuals(optimizer.loco), optimizer.loco.steps


def sequence_run(build: Build, seed: int, folder: str | None) -> tuple[Any, Any, Any]:
    """The same events straight on, with DCP asked before each, and saved and loaded half way."""
    draw = random.Random(seed)
    events = [draw.choice(EVENTS) for _ in range(8)]
    if folder is not None:
        events[0] = whole_step  # DCP loads no state, of any optimizer, that some parameters lack
    saved: Any = None
    found = []
    for is_asked in (False, True):
        model, optimizer = net(build, EXACT)
        for number, event in enumerate(events):
            if is_asked:
                get_optimizer_state_dict(model, optimizer)
            if is_asked and number == 4:
                if folder is not None:
                    save_to(folder, model, optimizer)
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            event(model, optimizer, number)
        found.append(outcome(model, optimizer))
    model, optimizer = net(build, EXACT)
    if folder is not None:
        load_from(folder, model, optimizer)
    else:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    for number in range(4, 8):
        events[number](model, optimizer, number)
    return found[0], found[1], outcome(model, optimizer)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("form", ["files", "plain"])
@pytest.mark.parametrize("name", ["sgd", "momentum", "adamw", "adagrad"])
def test_any_sequence_of_steps(
    ranks: RankPool, tmp_path: Path, name: str, form: str, seed: int
) -> None:
    """Neither asking for the state nor saving and resuming shows in what follows."""
    folder = str(tmp_path) if form == "files" else None
    for straight, asked, resumed in ranks.run(sequence_run, 2, OPTIMIZERS[name], seed, folder):
        for result in (asked, resumed):
            assert same(result[0], straight[0])
            assert same(result[1], straight[1])
            assert result[2] == straight[2]


# Parameters that join later


def joined(build: Build, folder: str) -> tuple[Any, Any]:
    """A block is frozen for two steps, then trained; saved, and resumed with all trained."""
    model, optimizer = net(build, EXACT)
    for p in model.blocks[1].parameters():
        p.requires_grad_(False)
    train(model, optimizer, range(2))
    get_optimizer_state_dict(model, optimizer)
    for p in model.blocks[1].parameters():
        p.requires_grad_(True)
    train(model, optimizer, range(2, 4))
    save_to(folder, model, optimizer)
    train(model, optimizer, range(4, 6))
    other, fresh = net(build, EXACT)
    load_from(folder, other, fresh)
    train(other, fresh, range(4, 6))
    return outcome(model, optimizer), outcome(other, fresh)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adamw"])
def test_parameters_that_join_later(ranks: RankPool, tmp_path: Path, name: str) -> None:
    for straight, resumed in ranks.run(joined, 2, OPTIMIZERS[name], str(tmp_path)):
        assert same(resumed[0], straight[0])
        assert same(resumed[1], straight[1])
        assert any(e.any() for fqn, e in resumed[1].items() if fqn.startswith("blocks.1"))


# State that is there before LoCo is attached, or is only a template


def loaded_before_it_is_attached(build: Build, is_saved_again: bool) -> tuple[Any, Any]:
    """Loaded, perhaps saved at once and loaded by a third, then attached at the first forward."""
    model, optimizer = net(build, EXACT)
    train(model, optimizer, range(3))
    weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(3, 6))
    for _ in range(2 if is_saved_again else 1):
        other = shard(plain_net())
        other.load_state_dict(weights)
        late = LoCoOptimizer(build(other.parameters()), config=EXACT)
        late.load_state_dict(state)
        state = copy.deepcopy(late.state_dict())
    train(other, late, range(3, 6))
    return outcome(model, optimizer), outcome(other, late)


@pytest.mark.parametrize("is_saved_again", [False, True])
@pytest.mark.parametrize("name", ["sgd", "momentum", "adamw"])
def test_loaded_before_it_is_attached(ranks: RankPool, name: str, is_saved_again: bool) -> None:
    for straight, late in ranks.run(
        loaded_before_it_is_attached, 2, OPTIMIZERS[name], is_saved_again
    ):
        assert same(late[0], straight[0])
        assert same(late[1], straight[1])
        assert late[2] == straight[2]


def load_partly(folder: str, model: Any, optimizer: Optimizer) -> None:
    """Through the template of a fresh job, what is missing left out."""
    weights, state = get_state_dict(model, optimizer)
    loaded: dict[str, Any] = {"model": weights, "optimizer": state}
    load(loaded, checkpoint_id=folder, planner=DefaultLoadPlanner(allow_partial_load=True))
    model.load_state_dict(loaded["model"])
    set_optimizer_state_dict(model, optimizer, loaded["optimizer"])


def partly_loaded(build: Build, folder: str) -> tuple[Any, Any]:
    """Losses of a plain job, and of ours that goes on with its files."""
    model = shard(plain_net())
    plain = build(model.parameters())
    train(model, plain, range(3))
    save_to(folder, model, plain)
    other, optimizer = net(build, EXACT)
    load_partly(folder, other, optimizer)
    return train(model, plain, range(3, 6)), train(other, optimizer, range(3, 6))


@pytest.mark.parametrize("world_size", [2, 5])
@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_a_plain_job_continued_by_ours(
    ranks: RankPool, tmp_path: Path, name: str, world_size: int
) -> None:
    """The optimizer's own state is not taken for the template that it was loaded into."""
    for plain, ours in ranks.run(partly_loaded, world_size, OPTIMIZERS[name], str(tmp_path)):
        assert ours == pytest.approx(plain, rel=1e-2)


def skipping_less(folder: str) -> Any:
    """The first parameter was exempt in the job that saved; the others keep their residuals."""
    model, optimizer = net(config=replace(EXACT, skip=("inp.weight",)))
    train(model, optimizer, range(3))
    save_to(folder, model, optimizer)
    other, fresh = net(config=EXACT)
    load_partly(folder, other, fresh)
    found, wanted = residuals(fresh.loco), residuals(optimizer.loco)
    first = found.pop("inp.weight")
    wanted.pop("inp.weight", None)
    return bool(first.any()), same(found, wanted), fresh.loco.steps


def test_what_was_not_saved_starts_at_zero(ranks: RankPool, tmp_path: Path) -> None:
    """And what was saved is loaded, counters too."""
    assert ranks.run(skipping_less, 2, str(tmp_path)) == [(False, True, 3)] * 2


def rows_saved() -> list[int]:
    """Rows of a save after ``saved_ranks`` was set and nothing loaded."""
    model, optimizer = net(config=EXACT)
    optimizer.loco.saved_ranks = 5
    train(model, optimizer, range(2))
    return [entry[ROWS].shape[0] for entry in optimizer.loco.state_dict().values()]


def test_saved_ranks_is_forgotten_by_a_job_that_trains(ranks: RankPool) -> None:
    assert ranks.run(rows_saved, 2) == [[2] * 4] * 2


def resumed_with_rows_of_others(folder: str) -> list[int]:
    """And it is forgotten once the rows of that job are loaded."""
    model, optimizer = net(config=EXACT)
    if dist.get_world_size() == 2:
        train(model, optimizer, range(2))
        save_to(folder, model, optimizer)
    else:
        optimizer.loco.saved_ranks = 2
        load_from(folder, model, optimizer)
    return [entry[ROWS].shape[0] for entry in optimizer.loco.state_dict().values()]


def test_saved_ranks_is_forgotten_by_a_load(ranks: RankPool, tmp_path: Path) -> None:
    for world_size in (2, 3):
        for rows in ranks.run(resumed_with_rows_of_others, world_size, str(tmp_path)):
            assert rows == [world_size] * 4

"""A run that is saved, ended and resumed is the run that never stopped."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import LBFGS

from distributed.checkpoint_runs import (
    OPTIMIZERS,
    language_model_run,
    load_from,
    mean_residuals,
    net,
    resumed_run,
    save_to,
    straight_run,
)
from distributed.models import TINY, same
from distributed.optimizer_runs import WIDTH, Net, loss_of, parameters, plain_net, shard, train
from loco_fsdp import LoCoConfig, LoCoOptimizer
from rank_pool import RankPool

EXACT = replace(TINY, residual_checkpoint="exact")


@pytest.fixture(scope="module")
def fresh_ranks() -> Iterator[RankPool]:
    """Processes that have never seen the model whose checkpoint they load."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_exact_resume_is_the_same_bit_for_bit(
    ranks: RankPool, fresh_ranks: RankPool, tmp_path: Path, name: str
) -> None:
    """30 steps = 10, save, fresh processes, load, 20; warm-up and a reset fall into both parts."""
    config = replace(EXACT, warmup_steps=2, reset_interval=7)
    setting = (OPTIMIZERS[name], config, 30, str(tmp_path), 10)
    straight = ranks.run(straight_run, 2, *setting)
    resumed = fresh_ranks.run(resumed_run, 2, *setting)
    for (losses, weights), (again, weights_again, counted) in zip(straight, resumed, strict=True):
        assert counted == 10
        assert losses[10:] == again
        assert same(weights, weights_again)


STORAGES = [
    {"residual_dtype": "bfloat16"},
    {"residual_dtype": "float32"},
    {"scale": "static", "static_scale": 64.0, "static_residual_scale": 512.0},
    {"bits": 8, "feedback": "classic", "block_size": 16},
]


@pytest.mark.parametrize("changes", STORAGES, ids=str)
def test_exact_resume_in_every_storage(
    ranks: RankPool, tmp_path: Path, changes: dict[str, Any]
) -> None:
    setting = (OPTIMIZERS["momentum"], replace(EXACT, **changes), 20, str(tmp_path), 8)
    straight, resumed = (ranks.run(run, 3, *setting) for run in (straight_run, resumed_run))
    for (losses, weights), (again, weights_again, _) in zip(straight, resumed, strict=True):
        assert losses[8:] == again
        assert same(weights, weights_again)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resume_from_the_mean(ranks: RankPool, tmp_path: Path, name: str) -> None:
    """A small language model's loss is within 0.1 % of the straight run's at each of 20 steps."""
    setting = (OPTIMIZERS[name], str(tmp_path))
    straight, resumed = (
        torch.tensor(ranks.run(language_model_run, 2, *setting, resume)[0])
        for resume in (False, True)
    )
    assert ((resumed - straight).abs() / straight).max() < 1e-3


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def interrupted_in_half_precision(folder: str, full_state: bool) -> Any:
    options = StateDictOptions(full_state_dict=full_state)
    model, optimizer = net(OPTIMIZERS["adamw"], EXACT, mp_policy=HALF)
    train(model, optimizer, range(15))
    save_to(folder, model, optimizer, options)
    straight = train(model, optimizer, range(15, 30))
    other, fresh = net(OPTIMIZERS["adamw"], EXACT, mp_policy=HALF)
    load_from(folder, other, fresh, options)
    return straight, train(other, fresh, range(15, 30))


@pytest.mark.parametrize("full_state", [False, True], ids=["sharded", "full"])
def test_no_spike_after_resuming(ranks: RankPool, tmp_path: Path, full_state: bool) -> None:
    """Field case 63: bfloat16 with a float32 reduction, from shards and from whole tensors."""
    for straight, resumed in ranks.run(interrupted_in_half_precision, 2, str(tmp_path), full_state):
        assert straight == resumed


def asked_run(name: str, at: int | None) -> Any:
    """Three steps after DCP was asked for the state once ``at`` steps were done, or never."""
    model, optimizer = net(OPTIMIZERS[name])
    history = []
    for step in range(5):
        if step == at:
            get_optimizer_state_dict(model, optimizer)
        train(model, optimizer, [step])
        history.append((parameters(model), mean_residuals(optimizer.loco), optimizer.loco.steps))
    return history


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_asking_before_and_after_the_first_step_changes_nothing(ranks: RankPool, name: str) -> None:
    """Field case 56: parameters, residuals, counters, and the updates that follow."""
    wanted = ranks.run(asked_run, 2, name, None)
    for at in (0, 1):
        for found, expected in zip(ranks.run(asked_run, 2, name, at), wanted, strict=True):
            for one, other in zip(found, expected, strict=True):
                assert same(one[0], other[0])
                assert same(one[1], other[1])
                assert one[2] == other[2]


def saved_before_the_first_step(folder: str) -> Any:
    model, optimizer = net(OPTIMIZERS["adamw"], EXACT)
    save_to(folder, model, optimizer)
    straight = train(model, optimizer, range(5))
    other, fresh = net(OPTIMIZERS["adamw"], EXACT)
    load_from(folder, other, fresh)
    return straight, train(other, fresh, range(5))


def test_saved_before_the_first_step(ranks: RankPool, tmp_path: Path) -> None:
    """AdamW's first step stays its first, though DCP has made a state with step 1 of it."""
    for straight, resumed in ranks.run(saved_before_the_first_step, 2, str(tmp_path)):
        assert straight == resumed


def lbfgs_steps(model: Any, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return losses


class Even(Net):
    """With four outputs, of which the last is dropped: no shard on two ranks is uneven."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, :3].clone()


def even_net(build: Any, config: LoCoConfig) -> tuple[Even, LoCoOptimizer]:
    torch.manual_seed(1)
    model = Even()
    shard(model)
    return model, LoCoOptimizer(build(model.parameters()), model, config)


def lbfgs_run(reload: bool) -> Any:
    """Steps with a closure; in the middle the state goes through bytes into a fresh wrapper."""
    config = LoCoConfig(min_numel=0, residual_checkpoint="exact")

    def build(params: Any) -> LBFGS:
        return LBFGS(params, lr=0.05, max_iter=2, history_size=3)

    model, optimizer = even_net(build, config)
    losses = lbfgs_steps(model, optimizer, range(3))
    if reload:
        buffer = io.BytesIO()
        torch.save((model.state_dict(), optimizer.state_dict()), buffer)
        buffer.seek(0)
        weights, state = torch.load(buffer, weights_only=False)
        model, optimizer = even_net(build, config)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    return losses + lbfgs_steps(model, optimizer, range(3, 6)), optimizer.loco.steps


def test_lbfgs(ranks: RankPool) -> None:
    straight, reloaded = (ranks.run(lbfgs_run, 2, reload) for reload in (False, True))
    assert straight == reloaded
    assert all(steps == 6 for _, steps in straight)


def plain_lbfgs_on_uneven_shards() -> None:
    model = shard(plain_net())
    with pytest.raises(RuntimeError, match="Cannot flatten unevenly sharded tensor"):
        lbfgs_steps(model, LBFGS(model.parameters()), range(1))


def test_lbfgs_on_uneven_shards_is_refused_by_torch_itself(ranks: RankPool) -> None:
    """Without LoCo: LBFGS flattens its gradients, which DTensor does for even shards only."""
    ranks.run(plain_lbfgs_on_uneven_shards, 2)


def lbfgs_template() -> Any:
    """DCP's step without a closure, which a plain LBFGS cannot do at all."""
    model, optimizer = even_net(LBFGS, TINY)
    with pytest.raises(TypeError, match="not callable"):
        get_optimizer_state_dict(model, optimizer.inner)
    state = get_optimizer_state_dict(model, optimizer)["state"]
    return sorted(state["inp.weight"])  # type: ignore[call-overload,arg-type]


def test_dcp_asks_lbfgs_for_its_state(ranks: RankPool) -> None:
    assert (
        ranks.run(lbfgs_template, 2) == [["func_evals", "loco_meta", "loco_residual", "n_iter"]] * 2
    )

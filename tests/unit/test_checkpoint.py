"""What a checkpoint holds, without a process group: stored forms, meta data, names in a state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from loco_fsdp import LoCoConfig, ResidualState
from loco_fsdp.checkpoint import KEYS, META, RESIDUAL, ROWS, Meta, saved_keys
from loco_fsdp.optimizer_state import (
    hide_names,
    is_template_step,
    make_template,
    parameters_of,
    put_names,
    split_entries,
    with_entries,
)
from strategies import configs, gradients

CPU = torch.device("cpu")


@given(config=configs(feedback="classic"), values=gradients())
def test_dense_values_are_stored_again_bit_for_bit(config: LoCoConfig, values: Tensor) -> None:
    """What ``exact`` relies on: what was decoded is encoded again and decoded to the same bits.

    Also after the factor 2 by which FSDP divides float16 gradients went in and out.
    """
    first = ResidualState(config)
    first.load_dense(values)
    for factor in (1.0, 2.0):
        again = ResidualState(config)
        dense = first.dense() * factor
        if dense.isfinite().all():
            again.load_dense(dense / factor)
            assert torch.equal(again.dense().view(torch.int32), first.dense().view(torch.int32))


@given(config=configs())
def test_meta_round_trip(config: LoCoConfig) -> None:
    meta = Meta.of(config, steps=123456789, is_untouched=True)
    tensor = meta.tensor(CPU)
    assert (tensor.dtype, tuple(tensor.shape)) == (torch.float64, (8,))
    assert Meta.read({META: tensor}) == meta
    assert meta.gain == config.gain


def test_meta_of_another_version() -> None:
    tensor = Meta.of(LoCoConfig(), steps=1, is_untouched=False).tensor(CPU)
    tensor[0] = 2
    with pytest.raises(
        ValueError, match=r"format version 2: wanted 1\. Load it with the loco_fsdp"
    ):
        Meta.read({META: tensor})


@pytest.mark.parametrize("missing", [{}, {META: {}}, {META: None}], ids=str)
def test_no_meta(missing: dict[str, Any]) -> None:
    assert Meta.read(missing) is None


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        ({}, (META, RESIDUAL)),
        ({"residual_checkpoint": "exact"}, (META, RESIDUAL, ROWS)),
        ({"residual_checkpoint": "none"}, (META,)),
        ({"feedback": "none"}, (META,)),
    ],
    ids=str,
)
def test_what_is_saved(settings: dict[str, Any], keys: tuple[str, ...]) -> None:
    assert saved_keys(LoCoConfig.from_dict(settings)) == keys


# Names in the live state


def model_of(optimizer_class: Any, **settings: Any) -> tuple[nn.Linear, Optimizer]:
    model = nn.Linear(3, 2)
    return model, optimizer_class(model.parameters(), lr=0.1, **settings)


def step(model: nn.Linear, optimizer: Optimizer) -> None:
    model(torch.ones(3)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("optimizer_class", [SGD, AdamW, Adagrad])
def test_names_come_after_the_optimizers_own_state(optimizer_class: Any) -> None:
    """An AdamW that finds a state that is not its own raises KeyError: 'exp_avg'."""
    model, optimizer = model_of(optimizer_class)
    own = {id(model.weight)}
    model(torch.ones(3)).sum().backward()
    put_names(optimizer, own, KEYS, stepped=False)
    assert (META in optimizer.state.get(model.weight, {})) == (optimizer_class is Adagrad)
    optimizer.step()
    put_names(optimizer, own, KEYS, stepped=True)
    assert set(KEYS) <= optimizer.state[model.weight].keys()
    assert (META in optimizer.state.get(model.bias, {})) == (optimizer_class is SGD)
    optimizer.register_state_dict_post_hook(hide_names)
    states = optimizer.state_dict()["state"].values()
    assert not any(set(KEYS) & state.keys() for state in states)
    assert bool(states) == (optimizer_class is not SGD)
    step(model, optimizer)


def test_entries_in_and_out() -> None:
    model, optimizer = model_of(AdamW)
    step(model, optimizer)
    plain = optimizer.state_dict()
    entry = {META: torch.zeros(8), RESIDUAL: torch.ones(2, 3)}
    both = with_entries(plain, optimizer, {0: entry})
    assert both["state"][0].keys() == plain["state"][0].keys() | entry.keys()
    own, entries = split_entries(both)
    assert own["state"].keys() == plain["state"].keys()
    assert all(own["state"][i].keys() == plain["state"][i].keys() for i in own["state"])
    assert entries == {0: entry}
    named = {
        "state": {"w": both["state"][0]},
        "param_groups": [{"params": ["x", "w"]}],  # as DCP gives it
    }
    assert split_entries(named)[1] == {1: entry}
    older = {**both, "loco": {META: torch.zeros(8)}}
    assert split_entries(older)[1] == {0: entry}
    beside = with_entries(plain | {"state": {}}, model_of(SGD)[1], {1: entry})
    assert beside["state"] == {}
    assert split_entries(beside)[1] == {1: entry}


@pytest.mark.parametrize("zero_rate", [0.0, torch.tensor(0.0)], ids=["number", "tensor"])
def test_template_step(zero_rate: Any) -> None:
    """No gradient or rate other than zero, and no state yet: nothing but DCP does such a step."""
    model, optimizer = model_of(AdamW)
    assert not is_template_step(optimizer)
    optimizer.param_groups[0]["lr"] = zero_rate
    assert not is_template_step(optimizer)  # there is no gradient
    for parameter in parameters_of(optimizer):
        parameter.grad = torch.zeros_like(parameter)
    assert is_template_step(optimizer)
    before = model.weight.clone()
    make_template(optimizer)
    assert torch.equal(model.weight, before)
    assert not is_template_step(optimizer)  # there is a state now


def test_group_counters_survive_a_template() -> None:
    """Schedule-free and other optimizers count steps in their groups."""

    class Counting(SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["k"] = group.get("k", 0) + 1
            return super().step(closure)

    _, optimizer = model_of(Counting)
    optimizer.param_groups[0]["k"] = 0
    make_template(optimizer)
    assert optimizer.param_groups[0]["k"] == 0

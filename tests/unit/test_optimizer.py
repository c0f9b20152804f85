"""LoCoOptimizer without a process group: what it passes on, what it refuses, and in what words."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from loco_fsdp import LoCoConfig, LoCoOptimizer

DELEGATED = ("param_groups", "state", "defaults")


def global_hooks() -> int:
    gc.collect()  # those of earlier tests may live in cycles
    return len(torch_module._global_forward_pre_hooks)


def wrapped(**settings: Any) -> LoCoOptimizer:
    return LoCoOptimizer(AdamW(nn.Linear(3, 2).parameters(), **settings))


class ScheduleFree(SGD):
    """Stands for optimizers with methods and attributes of their own."""

    is_training = False

    def train(self) -> None:
        self.is_training = True

    def __deepcopy__(self, _: Any) -> str:
        return "a copy of the inner optimizer"


def test_is_an_optimizer() -> None:
    """Field case 46: for all that test the class, also under the class form."""
    model = nn.Linear(3, 2)
    of_class = LoCoOptimizer(AdamW)(model.parameters(), lr=0.5, config=LoCoConfig(bits=8))
    for optimizer in (LoCoOptimizer(AdamW(model.parameters(), lr=0.5)), of_class):
        assert isinstance(optimizer, Optimizer)
        assert isinstance(optimizer, LoCoOptimizer)
        assert type(optimizer.inner) is AdamW
        assert optimizer.param_groups[0]["lr"] == 0.5
        assert repr(optimizer).startswith("LoCoOptimizer(AdamW (")


@pytest.mark.parametrize("name", DELEGATED)
def test_groups_state_and_defaults_are_the_inner_ones(name: str) -> None:
    """Field case 47: the same objects, and an assignment to either is seen by both."""
    optimizer = wrapped()
    assert getattr(optimizer, name) is getattr(optimizer.inner, name)
    for one, other in ((optimizer, optimizer.inner), (optimizer.inner, optimizer)):
        value = copy.copy(getattr(one, name))
        setattr(one, name, value)
        assert getattr(other, name) is value


def test_nothing_is_kept_twice() -> None:
    """Field case 47: no attribute of the wrapper shadows one of the inner optimizer."""
    optimizer = wrapped()
    assert not optimizer.__dict__.keys() & optimizer.inner.__dict__.keys()


def test_other_attributes_are_the_inner_ones() -> None:
    optimizer = LoCoOptimizer(ScheduleFree(nn.Linear(3, 2).parameters(), lr=0.1))
    optimizer.train()
    assert optimizer.is_training
    assert optimizer.inner.is_training  # type: ignore[attr-defined]
    assert not hasattr(optimizer, "eval")
    with pytest.raises(AttributeError, match="'ScheduleFree' object has no attribute 'eval'"):
        optimizer.eval()


def test_groups_and_gradients() -> None:
    optimizer = wrapped()
    added = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [added], "lr": 7.0})
    assert [group["lr"] for group in optimizer.inner.param_groups] == [1e-3, 7.0]
    added.grad = torch.ones(2)
    optimizer.zero_grad(set_to_none=False)
    assert torch.equal(added.grad, torch.zeros(2))
    optimizer.zero_grad()
    assert added.grad is None


def test_state_dict_is_the_inner_one() -> None:
    """Ready-made state (Adagrad's) goes out and in, and an empty state does no harm."""
    optimizer = LoCoOptimizer(Adagrad(nn.Linear(3, 2).parameters(), initial_accumulator_value=3.0))
    saved = optimizer.state_dict()
    assert saved == optimizer.inner.state_dict()
    assert saved["state"][0]["sum"].eq(3.0).all()
    other = LoCoOptimizer(Adagrad(nn.Linear(3, 2).parameters()))
    other.load_state_dict(saved)
    assert other.state[other.param_groups[0]["params"][0]]["sum"].eq(3.0).all()
    fresh = wrapped()
    fresh.load_state_dict(fresh.state_dict())
    assert fresh.state == {}


def test_state_dict_hooks() -> None:
    """They get the wrapper as first argument, run once each, and can replace what passes."""
    optimizer = wrapped()
    calls: list[str] = []

    def hook(name: str) -> Callable[..., Any]:
        def run(first: Optimizer, *rest: Any) -> Any:
            assert first is optimizer
            calls.append(name)
            return {**rest[0], name: True} if rest else None

        return run

    handles = [
        optimizer.register_state_dict_pre_hook(hook("before saving")),
        optimizer.register_state_dict_post_hook(hook("saved")),
        optimizer.register_state_dict_post_hook(hook("saved first"), prepend=True),
        optimizer.register_load_state_dict_pre_hook(hook("loading")),
        optimizer.register_load_state_dict_pre_hook(hook("loading first"), prepend=True),
        optimizer.register_load_state_dict_post_hook(hook("loaded")),
    ]
    saved = optimizer.state_dict()
    assert calls == ["before saving", "saved first", "saved"]
    assert saved["saved"]
    optimizer.load_state_dict(saved)
    assert calls[3:] == ["loading first", "loading", "loaded"]
    for handle in handles:
        handle.remove()
    optimizer.load_state_dict(optimizer.state_dict())
    assert len(calls) == 6


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda f: f.__name__)
@pytest.mark.parametrize("inner", [AdamW, ScheduleFree])
def test_neither_copied_nor_pickled(
    take: Callable[[Any], Any], inner: Callable[..., Optimizer]
) -> None:
    """Field case 18: a copy would be bound to no model, so it is refused; a state dict is not.

    Not even an inner optimizer that knows how to copy itself is copied in the wrapper's place.
    """
    optimizer = LoCoOptimizer(inner(nn.Linear(3, 2).parameters(), lr=0.1))
    with pytest.raises(TypeError, match=r"can be neither copied nor pickled.*save its state_dict"):
        take(optimizer)
    torch.save(optimizer.state_dict(), io.BytesIO())


def test_forward_hook_goes_when_the_optimizer_goes() -> None:
    """The hook that waits for the model's first forward neither leaks nor keeps alive."""
    before = global_hooks()
    optimizer = wrapped()
    assert global_hooks() == before + 1
    alive = weakref.ref(optimizer)
    del optimizer
    assert alive() is None
    assert global_hooks() == before


def test_unrelated_forward_is_ignored() -> None:
    before = global_hooks()
    optimizer = wrapped()
    nn.Linear(5, 1)(torch.ones(5))
    assert global_hooks() == before + 1
    with pytest.raises(RuntimeError, match="LoCo is not attached yet"):
        optimizer.loco.stats()


@pytest.mark.parametrize("with_model", [True, False])
def test_plain_model(with_model: bool) -> None:
    """Field case 10 (a): refused at the first step, before anything changes."""
    model = nn.Linear(3, 2)
    optimizer = LoCoOptimizer(SGD(model.parameters(), lr=1.0), model if with_model else None)
    before = model.weight.detach().clone()
    for _ in range(2):  # and it stays refused
        model(torch.ones(3)).sum().backward()
        with pytest.raises(RuntimeError, match=r"no FSDP2 unit.* 2 parameters. Call fully_shard"):
            optimizer.step()
    assert torch.equal(model.weight, before)


def test_plain_model_in_a_closure() -> None:
    """Field case 10 (a): the same where the first forward is in the closure."""
    model = nn.Linear(3, 2)
    optimizer = LoCoOptimizer(SGD(model.parameters(), lr=1.0), model)
    before = model.weight.detach().clone()

    def closure() -> float:
        loss: Tensor = model(torch.ones(3)).sum()
        loss.backward()
        return loss.item()

    with pytest.raises(RuntimeError, match="no FSDP2 unit"):
        optimizer.step(closure)
    assert torch.equal(model.weight, before)


def test_step_with_zero_gradients_before_the_model_is_sharded() -> None:
    """Checkpoint loaders do such a step on a fresh optimizer, to make its state."""
    optimizer = wrapped()
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert len(optimizer.state) == 2


def plain() -> Optimizer:
    return SGD(nn.Linear(2, 2).parameters(), lr=0.1)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no optimizer": (lambda: LoCoOptimizer(nn.Linear(2, 2)), "optimizer=Linear"),  # type: ignore[call-overload]
    "class of another kind": (lambda: LoCoOptimizer(nn.Linear), "Linear"),  # type: ignore[arg-type]
    "twice": (lambda: LoCoOptimizer(LoCoOptimizer(plain())), "LoCoOptimizer already"),
    "class with a model": (
        lambda: LoCoOptimizer(SGD, nn.Linear(2, 2)),  # type: ignore[call-overload]
        "LoCoOptimizer(SGD)(params, ..., model=model)",
    ),
    "config for model": (lambda: LoCoOptimizer(plain(), LoCoConfig()), "model=LoCoConfig("),  # type: ignore[call-overload]
    "dict for config": (
        lambda: LoCoOptimizer(plain(), None, {"bits": 4}),  # type: ignore[call-overload]
        "config={'bits': 4}",
    ),
    "number for scaler": (
        lambda: LoCoOptimizer(plain(), grad_scaler=2.0),  # type: ignore[call-overload]
        "grad_scaler=2.0",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_arguments(case: str) -> None:
    """Each is a ValueError: a sentence that names what was found and what is wanted."""
    before = global_hooks()
    build, found = REFUSED[case]
    with pytest.raises(ValueError) as caught:
        build()
    message = str(caught.value)
    assert found in message
    assert "wanted" in message or "wrap the inner one" in message
    assert message.endswith(".")
    del caught  # its traceback holds what was built
    assert global_hooks() == before

"""LoCoOptimizer trains as its inner optimizer does, and passes everything on to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from distributed.models import TINY, residuals, same
from distributed.optimizer_runs import (
    Net,
    batch,
    full,
    loss_of,
    parameters,
    plain_net,
    shard,
    train,
    validation_loss,
)
from loco_fsdp import LoCoOptimizer, attach
from rank_pool import RankPool

INNER: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda p: AdamW(p, lr=1e-2),
    "AdamW foreach": lambda p: AdamW(p, lr=1e-2, foreach=True),
    "AdamW loop": lambda p: AdamW(p, lr=1e-2, foreach=False),
    "AdamW fused": lambda p: AdamW(p, lr=1e-2, fused=True),
    "AdamW amsgrad": lambda p: AdamW(p, lr=1e-2, amsgrad=True),
    "Adam": lambda p: Adam(p, lr=1e-2, weight_decay=0.1),
    "SGD": lambda p: SGD(p, lr=1e-2),
    "SGD nesterov": lambda p: SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "Adagrad": lambda p: Adagrad(p, lr=1e-2),
    "RMSprop": lambda p: RMSprop(p, lr=1e-3),
}


STEPS = 60


def uncompressed_run() -> Any:
    model = shard(plain_net())
    train(model, AdamW(model.parameters(), lr=2e-2), range(STEPS))
    return parameters(model), validation_loss(model)


def wrapped_run() -> Any:
    model = shard(plain_net())
    optimizer = LoCoOptimizer(AdamW(model.parameters(), lr=2e-2), model, TINY)
    train(model, optimizer, range(STEPS))
    return parameters(model), validation_loss(model)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ends_where_the_uncompressed_run_ends(ranks: RankPool, world_size: int) -> None:
    """Validation loss within 10 % of the uncompressed run's, both below 0.3 of the first."""
    start = validation_loss(plain_net())
    plain_weights, plain_loss = ranks.run(uncompressed_run, world_size)[0]
    for weights, loss in (wrapped := ranks.run(wrapped_run, world_size)):
        assert same(weights, wrapped[0][0])
        assert not same(weights, plain_weights)  # it is compressed
        assert abs(loss - plain_loss) < 0.1 * plain_loss
        assert plain_loss < 0.3 * start


def test_world_size_1_is_exact(ranks: RankPool) -> None:
    """Field case 10 (d): one rank works, bit for bit as without compression."""
    [(wrapped, _)] = ranks.run(wrapped_run, 1)
    [(plain, _)] = ranks.run(uncompressed_run, 1)
    assert same(wrapped, plain)


def class_form_run() -> Any:
    model = shard(plain_net())
    build = LoCoOptimizer(SGD)
    optimizer = build(model.parameters(), 0.1, momentum=0.9, model=model, config=TINY)
    train(model, optimizer, range(3))
    return type(optimizer.inner), optimizer.loco.config, parameters(model)


def instance_form_run(with_model: bool) -> Any:
    model = shard(plain_net())
    inner = SGD(model.parameters(), 0.1, momentum=0.9)
    optimizer = LoCoOptimizer(inner, model if with_model else None, TINY)
    train(model, optimizer, range(3))
    return type(optimizer.inner), optimizer.loco.config, parameters(model)


def test_both_forms_are_one(ranks: RankPool) -> None:
    of_class = ranks.run(class_form_run, 2)[0]
    assert of_class[:2] == (SGD, TINY)
    for with_model in (True, False):
        of_instance = ranks.run(instance_form_run, 2, with_model)[0]
        assert of_instance[:2] == of_class[:2]
        assert same(of_instance[2], of_class[2])


def every_inner_optimizer() -> dict[str, Any]:
    """Per optimizer: does the wrapper do the same bits as attach and the optimizer alone?"""
    outcome = {}
    for name, build in INNER.items():
        model = shard(plain_net())
        train(model, LoCoOptimizer(build(model.parameters()), model, TINY), range(3))
        by_hand = shard(plain_net())
        optimizer, handle = build(by_hand.parameters()), attach(by_hand, TINY)
        for step in range(3):
            train(by_hand, optimizer, [step])
            handle.step()
        has_moved = not same(parameters(model), parameters(shard(plain_net())))
        outcome[name] = (same(parameters(model), parameters(by_hand)), has_moved)
    return outcome


def test_every_inner_optimizer(ranks: RankPool) -> None:
    """Foreach and fused ones, with and without state."""
    for outcome in ranks.run(every_inner_optimizer, 2):
        assert outcome == dict.fromkeys(INNER, (True, True))


def closure_run(build: Callable[[Any], Optimizer], in_closure: bool, late: bool) -> Any:
    model = shard(plain_net())
    optimizer = LoCoOptimizer(build(model.parameters()), None if late else model, TINY)
    losses = []
    for step in range(4):

        def closure(step: int = step) -> float:
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return float(loss.detach())

        if in_closure:
            losses.append(optimizer.step(closure))
        else:
            losses.append(closure())
            optimizer.step()
    return losses, optimizer.loco.steps, parameters(model)


@pytest.mark.parametrize("late", [False, True], ids=["attached", "late"])
def test_closure(ranks: RankPool, late: bool) -> None:
    """A closure's loss is returned; the late form attaches inside the first closure."""
    outside = ranks.run(closure_run, 2, sgd, False, late)
    inside = ranks.run(closure_run, 2, sgd, True, late)
    for one, other in zip(outside, inside, strict=True):
        assert one[:2] == other[:2]
        assert other[1] == 4
        assert same(one[2], other[2])


def mismatch_run(in_closure: bool) -> bool:
    """Does a step leave the weights alone if the check of its gradients fails?

    On GPUs a reduction only sets a flag; ``check`` reads it. Here it fails once gradients are
    there.
    """
    model = shard(plain_net())
    optimizer = LoCoOptimizer(SGD(model.parameters(), lr=0.1), model, TINY)
    before = parameters(model)
    with patch.object(optimizer.loco, "check") as check:

        def closure() -> float:
            loss = loss_of(model, 0)
            loss.backward()
            check.side_effect = RuntimeError("different layouts")
            return float(loss.detach())

        with pytest.raises(RuntimeError, match="different layouts"):
            if in_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
    return same(parameters(model), before)


@pytest.mark.parametrize("in_closure", [False, True])
def test_bad_gradients_are_not_used(ranks: RankPool, in_closure: bool) -> None:
    assert ranks.run(mismatch_run, 2, in_closure) == [True, True]


def sgd(params: Any) -> Optimizer:
    return SGD(params, lr=0.1)


def lbfgs(params: Any) -> Optimizer:
    return LBFGS(params, lr=0.5, max_iter=3)


def test_lbfgs(ranks: RankPool) -> None:
    """On one rank the steps are LBFGS's own; nothing was reduced there, so none is counted."""
    [(losses, steps, weights)] = ranks.run(closure_run, 1, lbfgs, True, False)
    model = plain_net()
    optimizer = LBFGS(model.parameters(), lr=0.5, max_iter=3)
    for step in range(4):

        def closure(step: int = step) -> float:
            optimizer.zero_grad()
            x, y = batch(step, rank=0)
            loss = (model(x) - y).square().mean()
            loss.backward()
            return float(loss.detach())

        assert float(optimizer.step(closure)) == losses[step]
    assert steps == 0
    assert same(weights, parameters(model))


def added_group_run() -> Any:
    """Field case 49: the last layer is given to the optimizer at step 3."""
    model = shard(plain_net())
    first = [p for name, p in model.named_parameters() if not name.startswith("blocks.1.")]
    optimizer = LoCoOptimizer(AdamW(first, lr=1e-2), model, TINY)
    scheduler, on_plateau = LambdaLR(optimizer, lambda k: 0.9**k), ReduceLROnPlateau(optimizer)
    model.blocks[1].requires_grad_(False)
    for step in range(3):
        train(model, optimizer, [step])
        scheduler.step()
        on_plateau.step(1.0)
    kept = residuals(optimizer.loco)
    new_is_zero = not kept["blocks.1.weight"].any()
    model.blocks[1].requires_grad_(True)
    optimizer.add_param_group({"params": list(model.blocks[1].parameters()), "lr": 0.02})
    untouched = same(residuals(optimizer.loco), kept)
    before = parameters(model)
    train(model, optimizer, range(3, 6))
    moved = [name for name, value in parameters(model).items() if not value.equal(before[name])]
    on_plateau.step(1.0)  # knows the new group
    has_residual = bool(optimizer.loco.residual("blocks.1.weight").any())
    return new_is_zero, untouched, len(optimizer.inner.param_groups), moved, has_residual


def test_group_added_in_training(ranks: RankPool) -> None:
    """Field case 49: new parameters train, their residual starts at 0, the others' stay."""
    names = [name for name, _ in plain_net().named_parameters()]
    for outcome in ranks.run(added_group_run, 2):
        assert outcome == (True, True, 2, names, True)


def one_step_size(model: Net, optimizer: Optimizer, step: int) -> float:
    before = full(model.inp.weight)
    train(model, optimizer, [step])
    return float((full(model.inp.weight) - before).norm())


def changed_groups_run() -> Any:
    """Field case 47: new groups are assigned to the wrapper, and a state is loaded."""
    model = shard(plain_net())
    optimizer = LoCoOptimizer(SGD(model.parameters(), lr=0.1), model, TINY)
    optimizer.param_groups[0]["lr"] = 0.0
    still = one_step_size(model, optimizer, 0)
    optimizer.param_groups = [{**optimizer.param_groups[0], "lr": 0.1}]
    assigned = optimizer.inner.param_groups is optimizer.param_groups
    normal = one_step_size(model, optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    one_source = optimizer.inner.param_groups is optimizer.param_groups
    scheduler = LambdaLR(optimizer, lambda epoch: 1.0 if epoch == 0 else 0.0)
    train(model, optimizer, [2])
    scheduler.step()
    return still, assigned, normal > 0, one_source, one_step_size(model, optimizer, 3)


def test_groups_have_one_source(ranks: RankPool) -> None:
    """Field case 47: a rate set through either way is the rate of the next step."""
    for outcome in ranks.run(changed_groups_run, 2):
        assert outcome == (0.0, True, True, True, 0.0)


def test_scheduler_made_before_wrapping(ranks: RankPool) -> None:
    """Field case 48: it drives the wrapper's steps, since the groups are the same objects."""
    for outcome in ranks.run(early_scheduler_run, 2):
        assert outcome == (True, 0.0)


def early_scheduler_run() -> Any:
    model = shard(plain_net())
    inner = SGD(model.parameters(), lr=0.1)
    scheduler = LambdaLR(inner, lambda epoch: 1.0 if epoch < 3 else 0.0)
    group = inner.param_groups[0]
    optimizer = LoCoOptimizer(inner, model, TINY)
    for step in range(3):
        train(model, optimizer, [step])
        scheduler.step()
    return optimizer.param_groups[0] is group, one_step_size(model, optimizer, 3)


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: LambdaLR(o, lambda step: 0.5**step),
    "OneCycleLR": lambda o: OneCycleLR(o, max_lr=0.1, total_steps=10),
    "CosineAnnealingLR": lambda o: CosineAnnealingLR(o, T_max=5),
    "SequentialLR": lambda o: SequentialLR(
        o, [ConstantLR(o, 0.1, 1), CosineAnnealingLR(o, T_max=3)], milestones=[1]
    ),
    "ReduceLROnPlateau": lambda o: ReduceLROnPlateau(o, patience=0),
}


def every_scheduler() -> dict[str, Any]:
    outcome = {}
    for name, build in SCHEDULERS.items():
        rates: list[list[Any]] = []
        for wrap in (False, True):
            model = shard(plain_net(1))
            optimizer: Optimizer = AdamW(model.parameters(), lr=1e-2)
            if wrap:
                optimizer = LoCoOptimizer(optimizer, model, TINY)
            scheduler = build(optimizer)
            rates.append([])
            for step in range(3):
                train(model, optimizer, [step])
                scheduler.step(*([1.0] if isinstance(scheduler, ReduceLROnPlateau) else []))
                group = optimizer.param_groups[0]
                rates[-1].append((group["lr"], group["betas"]))
        outcome[name] = rates[0] == rates[1] and len({lr for lr, _ in rates[1]}) > 1
    return outcome


def test_schedulers(ranks: RankPool) -> None:
    """Field case 46: all take the wrapper, none warns (warnings are errors here)."""
    for outcome in ranks.run(every_scheduler, 1):
        assert outcome == dict.fromkeys(SCHEDULERS, True)


def hooked_run() -> Any:
    model = shard(plain_net(1))
    optimizer = LoCoOptimizer(SGD(model.parameters(), lr=0.1), model, TINY)
    calls: list[tuple[str, bool]] = []

    def hook(name: str) -> Callable[..., None]:
        return lambda first, *_: calls.append((name, first is optimizer))

    handles = [
        optimizer.register_step_pre_hook(hook("pre")),
        optimizer.register_step_post_hook(hook("post")),
    ]
    everywhere = [
        register_optimizer_step_pre_hook(hook("global pre")),
        register_optimizer_step_post_hook(hook("global post")),
    ]
    train(model, optimizer, [0])
    first, calls[:] = list(calls), []
    for handle in (*handles, *everywhere):
        handle.remove()
    train(model, optimizer, [1])
    return first, calls


def test_step_hooks(ranks: RankPool) -> None:
    """Own hooks get the wrapper; each hook runs once a step, global ones for the inner step."""
    for first, after_removal in ranks.run(hooked_run, 1):
        assert first == [
            ("global pre", False),
            ("pre", True),
            ("post", True),
            ("global post", False),
        ]
        assert after_removal == []

"""What counts as an optimizer step, and what hangs on it: warm-up, reset, accumulation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from distributed.models import TINY, residuals, same
from distributed.optimizer_runs import (
    Net,
    batch,
    loss_of,
    parameters,
    plain_net,
    set_sync,
    shard,
    train,
)
from loco_fsdp import LoCoConfig, LoCoOptimizer
from rank_pool import RankPool


def counted() -> list[int]:
    """``handle.steps`` after some things that are steps and some that are none."""
    model = shard(plain_net())
    optimizer = LoCoOptimizer(SGD(model.parameters(), lr=0.1), model, TINY)
    seen = [optimizer.loco.steps]
    optimizer.step()  # nothing was reduced
    seen.append(optimizer.loco.steps)
    train(model, optimizer, [0])
    seen.append(optimizer.loco.steps)
    optimizer.step()  # nothing since the last step
    seen.append(optimizer.loco.steps)
    loss_of(model, 1).backward()
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    optimizer.step()  # two reductions, one step
    seen.append(optimizer.loco.steps)
    set_sync(model, False)
    loss_of(model, 3).backward()
    optimizer.step()  # nothing was reduced yet
    seen.append(optimizer.loco.steps)
    return seen


def test_steps_follow_reductions(ranks: RankPool) -> None:
    assert ranks.run(counted, 2) == [[0, 0, 1, 1, 2, 2]] * 2


def warm_up_run(warmup_steps: int, micro_batches: int) -> Any:
    """Six steps beside a plain run: which ones were exact, and when there was a residual."""
    config = replace(TINY, warmup_steps=warmup_steps)
    model, plain = shard(plain_net()), shard(plain_net())
    optimizer = LoCoOptimizer(SGD(model.parameters(), lr=0.1), model, config)
    plain_optimizer = SGD(plain.parameters(), lr=0.1)
    exact, has_residual, sent = [], [], []
    for step in range(6):
        for micro in range(micro_batches):
            loss_of(model, 10 * step + micro).backward()
            loss_of(plain, 10 * step + micro).backward()
        for one in (optimizer, plain_optimizer):
            one.step()
            one.zero_grad()
        exact.append(same(parameters(model), parameters(plain)))
        has_residual.append([e.any().item() for e in residuals(optimizer.loco).values()])
        sent.append(sum(stats.bytes_sent for stats in optimizer.loco.stats()))
    per_step = [after - before for before, after in zip([0, *sent], sent, strict=False)]
    return exact, has_residual, per_step


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("warmup_steps", [0, 1, 2, 3])
def test_warm_up(ranks: RankPool, warmup_steps: int, micro_batches: int) -> None:
    """Field case 15: the first optimizer steps (not calls) are exact and leave no residual."""
    warm = [step < warmup_steps for step in range(6)]
    for exact, has_residual, sent in ranks.run(warm_up_run, 2, warmup_steps, micro_batches):
        assert exact == warm
        assert has_residual == [[not is_warm] * 4 for is_warm in warm]
        assert [count == sent[0] for count in sent] == [is_warm == warm[0] for is_warm in warm]
        assert sent[-1] < sent[0] or warmup_steps == 0


def test_negative_warm_up_is_refused() -> None:
    """Field case 15: a negative value is refused."""
    with pytest.raises(ValueError, match="warmup_steps=-1: wanted an integer, 0 or more"):
        LoCoConfig(warmup_steps=-1)


class Skipping(Net):
    """Leaves its last block out if told to."""

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        h = self.inp(x)
        for block in self.blocks[: 1 if skip else 2]:
            h = h + torch.tanh(block(h))
        result: Tensor = self.out(h)
        return result


def reset_run() -> Any:
    """Interval 3; the last block runs in every second step, the others twice in each."""
    torch.manual_seed(1)
    model = shard(Skipping())
    config = replace(TINY, reset_interval=3)
    optimizer = LoCoOptimizer(SGD(model.parameters(), lr=0.1), model, config)
    zero = []
    for step in range(7):
        for micro in range(2):
            x, y = batch(10 * step + micro)
            (model(x, skip=step % 2 == 1) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        zero.append([not e.any().item() for e in residuals(optimizer.loco).values()])
    return zero, {stats.unit: stats.calls for stats in optimizer.loco.stats()}


def test_reset_of_all_units_together(ranks: RankPool) -> None:
    """After every third optimizer step, whatever was reduced how often."""
    for zero, calls in ranks.run(reset_run, 2):
        last = [False, False, True, True, False, True, False]  # unused in step 3
        others = [False, False, True, False, False, True, False]
        assert [sum(row) for row in zero] == [
            3 * other + own for other, own in zip(others, last, strict=True)
        ]
        assert calls == {"blocks.0": 14, "blocks.1": 8, "root": 14}


def accumulating_run(accumulate: int, micro_batches: int, with_sync: bool) -> Any:
    """A run over some micro-batches whose last cycle may be incomplete, and another after it."""
    model = shard(plain_net())
    optimizer = LoCoOptimizer(SGD(model.parameters(), lr=0.1), model, TINY)
    agreed = []
    for epoch in range(2):
        for micro in range(1, micro_batches + 1):
            is_last = micro % accumulate == 0
            set_sync(model, is_last or with_sync)
            (loss_of(model, 100 * epoch + micro) / accumulate).backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
                agreed.append(parameters(model))
    handle = optimizer.loco
    return agreed, handle.steps, [(s.calls, s.bytes_sent) for s in handle.stats()]


@pytest.mark.parametrize(("accumulate", "micro_batches"), [(1, 3), (2, 4), (4, 4), (2, 5)], ids=str)
def test_accumulation(ranks: RankPool, accumulate: int, micro_batches: int) -> None:
    """Field cases 24 and 26: one exchange a step without sync, one a micro-batch with it.

    Counters say so, ranks agree after each step, and an incomplete cycle upsets nothing.
    """
    saving = ranks.run(accumulating_run, 2, accumulate, micro_batches, False)
    syncing = ranks.run(accumulating_run, 2, accumulate, micro_batches, True)
    steps = 2 * (micro_batches // accumulate)
    for result, wanted_calls in ((saving, steps), (syncing, 2 * micro_batches)):
        for agreed, counted_steps, figures in result:
            assert counted_steps == steps
            assert [calls for calls, _ in figures] == [wanted_calls] * 3
            assert len(agreed) == steps
            assert all(map(same, agreed, result[0][0]))
    for (_, bytes_once), (_, bytes_each) in zip(saving[0][2], syncing[0][2], strict=True):
        assert bytes_each * steps == bytes_once * 2 * micro_batches


def accumulated_update(accumulate: int, with_sync: bool, compressed: bool) -> Any:
    """The parameters after one step of 4 micro-batches' mean gradient."""
    model = shard(plain_net())
    optimizer = SGD(model.parameters(), lr=1.0)
    config = replace(TINY, bits=8)
    wrapped = LoCoOptimizer(optimizer, model, config) if compressed else optimizer
    for micro in range(accumulate):
        set_sync(model, with_sync or micro == accumulate - 1)
        (loss_of(model, micro) / accumulate).backward()
    wrapped.step()
    start = parameters(shard(plain_net()))
    return {name: start[name] - value for name, value in parameters(model).items()}


@pytest.mark.parametrize("with_sync", [False, True])
def test_accumulated_gradient(ranks: RankPool, with_sync: bool) -> None:
    """Field cases 24 and 26: both ways give the mean gradient, within what 8 bits can."""
    wanted = ranks.run(accumulated_update, 2, 4, with_sync, False)[0]
    for found in ranks.run(accumulated_update, 2, 4, with_sync, True):
        for name, value in found.items():
            error = (value - wanted[name]).norm() / wanted[name].norm()
            assert error < 0.01, name

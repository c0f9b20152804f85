"""LoCoOptimizer and GradScaler: residuals in unscaled units, skipped steps, the fused path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer

from distributed.models import TINY, residuals, same
from distributed.optimizer_runs import Net, batch, full, loss_of, parameters, plain_net, shard
from loco_fsdp import LoCoConfig, LoCoOptimizer
from rank_pool import RankPool

EXACT = LoCoConfig(min_numel=0, bits=8, block_size=16, residual_dtype="float32", feedback="classic")


def sgd(params: Any) -> Optimizer:
    return SGD(params, lr=0.1, momentum=0.9)


def fused_adamw(params: Any) -> Optimizer:
    return AdamW(params, lr=1e-2, fused=True)


def clip(scaler: torch.amp.GradScaler, model: nn.Module, optimizer: Optimizer) -> None:
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def scaled_run(
    build: Callable[[Any], Optimizer], enabled: bool, late: bool, with_clip: bool
) -> Any:
    """Eight steps; the scale doubles after every second one."""
    model = shard(plain_net())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_interval=2, enabled=enabled)
    optimizer = LoCoOptimizer(
        build(model.parameters()), None if late else model, TINY, grad_scaler=scaler
    )
    for step in range(8):
        scaler.scale(loss_of(model, step)).backward()
        if with_clip:
            clip(scaler, model, optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return scaler.get_scale(), optimizer.loco.steps, residuals(optimizer.loco), parameters(model)


def unscaled_run(build: Callable[[Any], Optimizer], with_clip: bool) -> Any:
    model = shard(plain_net())
    optimizer = LoCoOptimizer(build(model.parameters()), model, TINY)
    for step in range(8):
        loss_of(model, step).backward()
        if with_clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return residuals(optimizer.loco), parameters(model)


@pytest.mark.parametrize("with_clip", [False, True], ids=["plain", "clip"])
@pytest.mark.parametrize("build", [sgd, fused_adamw])
def test_scale_leaves_no_trace(
    ranks: RankPool, build: Callable[[Any], Optimizer], with_clip: bool
) -> None:
    """Scales that are powers of two and grow on the way: residuals and weights keep their bits."""
    unscaled = ranks.run(unscaled_run, 2, build, with_clip)
    for late in (False, True):
        scaled = ranks.run(scaled_run, 2, build, True, late, with_clip)
        for (scale, steps, scaled_residuals, weights), expected in zip(
            scaled, unscaled, strict=True
        ):
            assert (scale, steps) == (2.0**13, 8)
            assert same(scaled_residuals, expected[0])
            assert same(weights, expected[1])


def test_disabled_scaler(ranks: RankPool) -> None:
    unscaled = ranks.run(unscaled_run, 2, sgd, False)
    for result, expected in zip(
        ranks.run(scaled_run, 2, sgd, False, False, False), unscaled, strict=True
    ):
        assert result[:2] == (1.0, 8)
        assert same(result[2], expected[0])
        assert same(result[3], expected[1])


def added_back(factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """What a zero gradient is reduced to under a scale that changed by ``factor``.

    Returns the gradient as the optimizer will see it, divided by the scale, the mean of the
    ranks' residuals before, and the largest of them: all of ``inp.weight``.
    """
    model = shard(plain_net())
    scaler = torch.amp.GradScaler("cpu", init_scale=1000.0)
    optimizer = LoCoOptimizer(SGD(model.parameters(), lr=0.0), model, EXACT, grad_scaler=scaler)
    scaler.scale(loss_of(model, 0)).backward()
    scaler.step(optimizer)
    scaler.update(1000.0 * factor)
    optimizer.zero_grad()
    kept = optimizer.loco.residual("inp.weight")
    mean = kept.clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    scaler.scale(0.0 * loss_of(model, 1)).backward()
    assert isinstance(model.inp.weight.grad, DTensor)
    reduced = model.inp.weight.grad.full_tensor() / scaler.get_scale()
    largest = kept.abs().max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return reduced, mean, largest


@pytest.mark.parametrize("factor", [1.0, 3.0, 1 / 7, 2.0**-20])
def test_what_is_added_back_follows_the_scale(ranks: RankPool, factor: float) -> None:
    for reduced, mean, largest in ranks.run(added_back, 2, factor):
        assert mean.any()
        # 8 bits: a step is 1/128 of a block's largest, rounded to bfloat16.
        torch.testing.assert_close(reduced, mean, rtol=0, atol=float(largest) / 128)


class Bombed(Net):
    """Also returns its last weight, so that a loss can give it a gradient of its own."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.out.weight[-1, -1] * 1.0


def overflow_run(
    build: Callable[[Any], Optimizer], bad_rank: int, policy: MixedPrecisionPolicy, clipped: bool
) -> Any:
    """Twelve steps; in step 5 one rank's gradient of the very last element is inf."""
    torch.manual_seed(1)
    model = shard(Bombed(), mp_policy=policy)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = LoCoOptimizer(build(model.parameters()), model, TINY, grad_scaler=scaler)
    scales, moved, losses = [], [], []
    for step in range(12):
        before = parameters(model)
        x, y = batch(step)
        output, last = model(x)
        loss = (output - y).square().mean()
        bomb = torch.inf if step == 5 and dist.get_rank() == bad_rank else 0.0
        scaler.scale(loss + bomb * last).backward()
        if clipped:
            clip(scaler, model, optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        moved.append(not same(parameters(model), before))
        losses.append(loss.item())
        assert all(e.isfinite().all() for e in residuals(optimizer.loco).values())
    assert all(value.isfinite().all() for value in parameters(model).values())
    nonfinite = sum(stats.nonfinite_blocks for stats in optimizer.loco.stats())
    return scales, moved, optimizer.loco.steps, nonfinite, losses


SINGLE = MixedPrecisionPolicy()
HALF = MixedPrecisionPolicy(
    param_dtype=torch.float16, reduce_dtype=torch.float32, cast_forward_inputs=True
)


@pytest.mark.parametrize(
    ("build", "policy", "clipped"),
    [(sgd, SINGLE, False), (sgd, HALF, True), (fused_adamw, SINGLE, False)],
    ids=["sgd", "fp16-clip", "fused"],
)
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_inf_on_one_rank(
    ranks: RankPool,
    build: Callable[[Any], Optimizer],
    policy: MixedPrecisionPolicy,
    clipped: bool,
    bad_rank: int,
) -> None:
    """Field cases 7 and 53: all ranks skip that step, back off once, and go on as before.

    Residuals stay finite: the bad block's keeps its old value. A fused optimizer is stepped by
    the scaler and skips by itself, so there the step counts.
    """
    results = ranks.run(overflow_run, 2, build, bad_rank, policy, clipped)
    for rank, (scales, moved, steps, nonfinite, losses) in enumerate(results):
        assert scales == [2.0**10] * 5 + [2.0**9] * 7
        assert moved == [step != 5 for step in range(12)]
        assert steps == (12 if build is fused_adamw else 11)
        assert nonfinite == (1 if rank == bad_rank else 0)
        assert losses[-1] < losses[0]


def fused_attributes() -> Any:
    """What the inner optimizer sees of the scaler during the step, and what is left after it."""
    model = shard(plain_net())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    inner = fused_adamw(model.parameters())
    optimizer = LoCoOptimizer(inner, model, TINY, grad_scaler=scaler)
    seen = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.append((float(inner.grad_scale), float(inner.found_inf)))  # type: ignore[attr-defined]
    )
    supports = getattr(optimizer, "_step_supports_amp_scaling", False)
    scaler.scale(loss_of(model, 0)).backward()
    before = full(model.inp.weight)
    scaler.step(optimizer)
    left = [
        hasattr(one, name) for one in (optimizer, inner) for name in ("grad_scale", "found_inf")
    ]
    return supports, seen, left, not torch.equal(full(model.inp.weight), before)


def test_fused_path(ranks: RankPool) -> None:
    """The scaler sets attributes on the wrapper; they reach the inner optimizer and go again."""
    for outcome in ranks.run(fused_attributes, 2):
        assert outcome == (True, [(8.0, 0.0)], [False] * 4, True)

"""Under FSDP2 each gradient is the composition of ``reference`` functions, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from distributed.models import (
    TINY,
    Definition,
    Probe,
    Shapes,
    fp16_divisors,
    gradients,
    local_gradients,
    reduce_dtype,
    residuals,
    shard,
    uncompressed,
)
from loco_fsdp import LoCoConfig, attach
from rank_pool import RankPool

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SHAPES = {
    "odd": (5, 3),
    "bias": (7,),
    "wide": (130, 7),
    "skipped": (6, 5),
    "long": (2305, 1),
    "cube": (3, 2, 5),
}
CONFIG = LoCoConfig(min_numel=0, skip=("skip*",))
EXEMPT = {"bias", "skipped"}
STEPS = 4

Result = tuple[list[dict[str, Tensor]], dict[str, Tensor]]


def train(shapes: Shapes, config: LoCoConfig, policy: MixedPrecisionPolicy) -> Result:
    """This rank's gradients of each step, and its residuals at the end."""
    model = shard(Probe(shapes), mp_policy=policy)
    handle = attach(model, config)
    found = []
    for step in range(STEPS):
        model.zero_grad()
        model(gradients(shapes, step)).backward()
        handle.step()
        found.append(local_gradients(model))
    return found, residuals(handle)


def check(
    results: list[Result], shapes: Shapes, config: LoCoConfig, policy: MixedPrecisionPolicy
) -> None:
    world_size, dtype = len(results), reduce_dtype(policy)
    before, after, factor = 1.0, 1.0, 1 / world_size
    if dtype == FP16:  # FSDP divides by itself and asks for a sum
        before, after = fp16_divisors(world_size)
        factor = 1.0
    for name, shape in shapes.items():
        definition = Definition(world_size, config)
        for step in range(STEPS):
            fulls = [gradients({name: shape}, step, rank)[name] for rank in range(world_size)]
            fulls = [g.to(policy.param_dtype or FP32).to(dtype).div(before) for g in fulls]
            exempt = name in EXEMPT
            shards = uncompressed(fulls, factor) if exempt else definition.reduce(fulls, factor)
            for rank, expected in enumerate(shards):
                found = results[rank][0][step][name]
                assert found.dtype == FP32  # the parameter's own
                assert torch.equal(found, expected.div(after).to(FP32)), (name, step, rank)
        for rank in range(world_size):
            if name in EXEMPT:
                assert name not in results[rank][1]
            else:
                assert torch.equal(results[rank][1][name], definition.residual(rank, shape))


@pytest.mark.parametrize(
    "policy",
    [
        MixedPrecisionPolicy(),
        MixedPrecisionPolicy(param_dtype=BF16),
        MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32),
        MixedPrecisionPolicy(reduce_dtype=BF16),
        MixedPrecisionPolicy(param_dtype=FP16),
        MixedPrecisionPolicy(param_dtype=FP16, reduce_dtype=FP32),
        MixedPrecisionPolicy(param_dtype=FP32, reduce_dtype=FP16),
    ],
    ids=lambda p: f"{p.param_dtype}-{p.reduce_dtype}".replace("torch.", ""),
)
@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_equals_definition(ranks: RankPool, world_size: int, policy: MixedPrecisionPolicy) -> None:
    """Field cases 1, 2 and 3: odd world sizes, odd counts per rank, no multiple of 8."""
    check(ranks.run(train, world_size, SHAPES, CONFIG, policy), SHAPES, CONFIG, policy)


@pytest.mark.parametrize(
    "config",
    [
        LoCoConfig(min_numel=0, bits=8, block_size=16, skip=("skip*",)),
        LoCoConfig(min_numel=0, feedback="classic", residual_dtype="float32", skip=("skip*",)),
        LoCoConfig(min_numel=0, feedback_gain=0.5, residual_dtype="bfloat16", skip=("skip*",)),
        LoCoConfig(min_numel=0, scale="static", static_scale=4, skip=("skip*",)),
    ],
    ids=lambda c: f"{c.scale}{c.bits}-{c.feedback}-{c.residual_dtype}",
)
def test_equals_definition_in_other_settings(ranks: RankPool, config: LoCoConfig) -> None:
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    check(ranks.run(train, 3, SHAPES, config, policy), SHAPES, config, policy)


def test_equals_definition_for_a_large_odd_parameter(ranks: RankPool) -> None:
    shapes, policy = {"table": (50257, 3)}, MixedPrecisionPolicy()
    check(ranks.run(train, 3, shapes, TINY, policy), shapes, TINY, policy)

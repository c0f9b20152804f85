"""Under FSDP2 each gradient is the composition of ``reference`` functions, bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
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
    """Field cases 1, 2 and 3 and more: odd world sizes, odd counts, no multiple of 8."""
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


def run_smallest_cases() -> dict[str, Tensor]:
    """This rank's gradient and residual of one parameter of a field case."""
    shapes = {2: (5, 3), 3: (7, 5), 4: (2305, 1)}
    shape = shapes[dist.get_world_size()]
    dtype = BF16 if shape == (7, 5) else FP32
    model = shard(Probe({"w": shape}, dtype))
    handle = attach(model, TINY)
    model(gradients({"w": shape}, 0)).backward()
    return {"gradient": local_gradients(model)["w"], "residual": handle.residual("w")}


def test_odd_element_counts(ranks: RankPool) -> None:
    """Field case 2: (5, 3) over 2 ranks, 9 elements each: both sides of the border are right."""
    results = ranks.run(run_smallest_cases, 2)
    assert [result["gradient"].shape for result in results] == [(3, 3), (2, 3)]
    mean = (gradients({"w": (5, 3)}, 0, 0)["w"] + gradients({"w": (5, 3)}, 0, 1)["w"]) / 2
    step = max(gradients({"w": (5, 3)}, 0, r)["w"].abs().max() for r in range(2)) / 8
    for found, expected in (
        (results[0]["gradient"][2, 2], mean[2, 2]),
        (results[1]["gradient"][0, 0], mean[3, 0]),
    ):
        assert abs(found - expected) <= step


def test_odd_world_size(ranks: RankPool) -> None:
    """Field case 1: bfloat16 (7, 5) over 3 ranks, which get 3, 3 and 1 rows."""
    results = ranks.run(run_smallest_cases, 3)
    assert [result["gradient"].shape for result in results] == [(3, 5), (3, 5), (1, 5)]
    given = [gradients({"w": (7, 5)}, 0, r)["w"].bfloat16() for r in range(3)]
    expected = Definition(3).reduce(given)
    for result, shares in zip(results, expected, strict=True):
        assert result["gradient"].dtype == BF16
        assert torch.equal(result["gradient"], shares)


def test_no_padding_by_hand(ranks: RankPool) -> None:
    """Field case 3: (2305, 1) over 4 ranks: 577, 577, 577 and 574 rows, and no pads anywhere."""
    results = ranks.run(run_smallest_cases, 4)
    rows = [result["gradient"].shape[0] for result in results]
    assert rows == [577, 577, 577, 574]
    definition = Definition(4)
    definition.reduce([gradients({"w": (2305, 1)}, 0, r)["w"] for r in range(4)])
    for rank, (result, state) in enumerate(zip(results, definition.states, strict=True)):
        assert torch.equal(result["residual"], definition.residual(rank, (2305, 1)))
        assert not state.dense()[3, 574:].any()

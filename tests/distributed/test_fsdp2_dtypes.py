"""Warm-up steps, and which dtype everything has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from distributed.models import (
    TINY,
    Definition,
    Probe,
    gradient,
    gradients,
    local_gradients,
    residuals,
    same,
    shard,
    uncompressed,
)
from loco_fsdp import LoCoConfig, attach
from rank_pool import RankPool

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SHAPES = {"w": (13, 7), "v": (4, 5), "bias": (7,)}
POLICIES = [
    MixedPrecisionPolicy(),
    MixedPrecisionPolicy(param_dtype=BF16),
    MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32),
]


def warm_up(warmup_steps: int, policy: MixedPrecisionPolicy) -> Any:
    """Gradients and residuals of six steps; ``v`` is unused in two of them."""
    model = shard(Probe(SHAPES), mp_policy=policy)
    handle = attach(model, LoCoConfig(min_numel=0, warmup_steps=warmup_steps))
    history = []
    for step in range(6):
        model.zero_grad()
        given = gradients(SHAPES, step)
        if step in (1, 4):
            del given["v"]
        model(given).backward()
        history.append((local_gradients(model), residuals(handle)))
        handle.step()
    return history


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p.param_dtype}-{p.reduce_dtype}")
@pytest.mark.parametrize("warmup_steps", [0, 1, 2, 3])
def test_warm_up(ranks: RankPool, warmup_steps: int, policy: MixedPrecisionPolicy) -> None:
    """Field case 15: exact sums in rank order, residuals 0 until compression starts."""
    results = ranks.run(warm_up, 2, warmup_steps, policy)
    dtype = policy.param_dtype or FP32
    for name, shape in SHAPES.items():
        definition = Definition(2)
        for step in range(6):
            if name == "v" and step in (1, 4):
                assert all(name not in result[step][0] for result in results)
                continue
            fulls = [gradient(name, shape, r, step).to(dtype) for r in range(2)]
            fulls = [full.to(policy.reduce_dtype or dtype) for full in fulls]
            plain = step < warmup_steps or name == "bias"
            shards = uncompressed(fulls) if plain else definition.reduce(fulls)
            for rank, result in enumerate(results):
                found, kept = result[step]
                assert torch.equal(found[name], shards[rank].to(FP32))
                if name != "bias":
                    assert torch.equal(kept[name], definition.residual(rank, shape))


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 9), nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(torch.tanh(self.first(x)))
        return result


def dtypes_of_a_run(
    dtype: torch.dtype, reduce_dtype: torch.dtype | None, loco: bool
) -> dict[str, torch.dtype]:
    model = Net().to(dtype)
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    for layer in (model.first, model.second):
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    if loco:
        attach(model, TINY)
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-3)  # float16 has no 1e-8
    found = {}
    for step in range(2):
        model(gradient("x", (8, 6), dist.get_rank(), step).to(dtype)).square().sum().backward()
        optimizer.step()
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            assert parameter.grad is not None
            assert parameter.full_tensor().isfinite().all()
            found[f"{name} {step}"] = parameter.dtype
            found[f"{name} {step} gradient"] = parameter.grad.dtype
            for key, value in optimizer.state[parameter].items():
                found[f"{name} {step} {key}"] = value.dtype
        optimizer.zero_grad()
    return found


def dtypes_of_runs(dtype: torch.dtype) -> None:
    for reduce_dtype in (None, FP32, BF16):
        native, loco = (dtypes_of_a_run(dtype, reduce_dtype, loco) for loco in (False, True))
        assert native == loco
        assert len(native) == 4 * 2 * 5


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_dtypes_are_those_of_the_uncompressed_run(ranks: RankPool, dtype: torch.dtype) -> None:
    """Field case 5: parameters, gradients and optimizer state, over all reduce dtypes."""
    ranks.run(dtypes_of_runs, 2, dtype)


def reduce_large(reduce_dtype: torch.dtype, loco: bool) -> dict[str, Tensor]:
    """Gradients about 70,000, beyond what float16 holds, from bfloat16 parameters."""
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype)
    model = shard(Probe(SHAPES), mp_policy=policy)
    handle = attach(model, TINY) if loco else None
    scaled = {name: 70000 + 100 * g for name, g in gradients(SHAPES, 0).items()}
    model(scaled).backward()
    found = local_gradients(model)
    if handle is not None:
        found |= {f"{name} residual": value for name, value in residuals(handle).items()}
    return found


@pytest.mark.parametrize("reduce_dtype", [FP32, BF16, FP16], ids=str)
def test_reduce_dtype_is_the_only_cast(ranks: RankPool, reduce_dtype: torch.dtype) -> None:
    """Field case 20: float32 and bfloat16 do not overflow; float16 does, as without LoCo."""
    native = ranks.run(reduce_large, 2, reduce_dtype, False)
    loco = ranks.run(reduce_large, 2, reduce_dtype, True)
    for plain, found in zip(native, loco, strict=True):
        for name in SHAPES:
            assert found[name].dtype == FP32
            if reduce_dtype == FP16:
                assert not plain[name].isfinite().any()
                assert not found[name].isfinite().any()
            else:
                torch.testing.assert_close(found[name], plain[name], rtol=0.05, atol=0)
        assert all(value.isfinite().all() for key, value in found.items() if "residual" in key)
    if reduce_dtype == FP32:  # no rounding but that of the parameters' own dtype
        fulls = [70000 + 100 * gradient("bias", (7,), r, 0) for r in range(2)]
        shards = uncompressed([full.bfloat16().float() for full in fulls])
        for rank, expected in enumerate(shards):
            assert same({"bias": loco[rank]["bias"]}, {"bias": expected})

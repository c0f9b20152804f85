"""Reduce ops, divide factors and hybrid meshes: each honoured once, with all-to-all alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from distributed.models import (
    TINY,
    Definition,
    Probe,
    fp16_divisors,
    full_gradients,
    gradient,
    gradients,
    local_gradients,
    shard,
    uncompressed,
)
from loco_fsdp import LoCoConfig, attach
from rank_pool import RankPool

SHAPE = (13, 7)
SHAPES = {"w": SHAPE}
BF16_FP32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP16 = MixedPrecisionPolicy(param_dtype=torch.float16)


def set_up(
    factor: float | None, force_sum: bool, config: LoCoConfig = TINY, **settings: Any
) -> Any:
    model = shard(Probe(SHAPES), **settings)
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    model.set_force_sum_reduction_for_comms(force_sum)
    attach(model, config)
    return model


OPS = [(None, False), (1.0, False), (2.0, False), (300.0, False), (None, True), (3.0, True)]
"""Divide factor and whether FSDP has to use SUM: AVG, PREMUL_SUM, AVG, PREMUL_SUM, SUM, SUM."""


def reduce_odd_numbers(config: LoCoConfig) -> list[Tensor]:
    """Rank r's gradient is 2 r + 1 everywhere, which 4 bits represent exactly."""
    found = []
    for factor, force_sum in OPS:
        model = set_up(factor, force_sum, config)
        model({"w": torch.full(SHAPE, 2.0 * dist.get_rank() + 1)}).backward()
        found.append(full_gradients(model)["w"])
    return found


@pytest.mark.parametrize("config", [TINY, LoCoConfig(), LoCoConfig(min_numel=0, warmup_steps=1)])
def test_each_op_is_honoured_once(ranks: RankPool, config: LoCoConfig) -> None:
    """Field cases 29 and 32: AVG, SUM, PREMUL_SUM; compressed, tiny unit, warm-up."""
    for results in ranks.run(reduce_odd_numbers, 2, config):
        for found, (factor, _) in zip(results, OPS, strict=True):
            wanted = torch.full(SHAPE, 4 / (factor or 2))
            torch.testing.assert_close(found, wanted, rtol=2e-7, atol=0)


def compare_ops(policy: MixedPrecisionPolicy) -> list[list[Tensor]]:
    """This rank's gradients of three steps under each op."""
    found: list[list[Tensor]] = []
    for factor, force_sum in OPS:
        model = set_up(factor, force_sum, mp_policy=policy)
        found.append([])
        for step in range(3):
            model.zero_grad()
            model(gradients(SHAPES, step)).backward()
            found[-1].append(local_gradients(model)["w"])
    return found


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BF16_FP32, FP16])
def test_equals_definition_under_each_op(ranks: RankPool, policy: MixedPrecisionPolicy) -> None:
    """Field cases 28 and 29, float16 included, where FSDP divides before and after itself."""
    results = ranks.run(compare_ops, 3, policy)
    dtype = policy.param_dtype or torch.float32
    for index, (factor, force_sum) in enumerate(OPS):
        divisor = factor or 3
        before, after, on_sum = 1.0, 1.0, 1 / divisor
        if policy == FP16:
            before, after = fp16_divisors(divisor)
            on_sum = 1.0
        elif force_sum:
            after, on_sum = divisor, 1.0
        definition = Definition(3)
        for step in range(3):
            fulls = [gradient("w", SHAPE, r, step).to(dtype) for r in range(3)]
            fulls = [full.to(policy.reduce_dtype or dtype).div(before) for full in fulls]
            for rank, expected in enumerate(definition.reduce(fulls, on_sum)):
                assert torch.equal(results[rank][index][step], expected.div(after).float())


def run_hybrid(replicas: int, shards: int, factor: float | None, loco: bool) -> Any:
    """Three steps on a mesh; bytes held and sent come with the last gradients."""
    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replica", "shard"))
    model = shard(Probe(SHAPES), mesh=mesh, mp_policy=BF16_FP32)
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    handle = attach(model, TINY) if loco else None
    history = []
    for step in range(3):
        model.zero_grad()
        model(gradients(SHAPES, step)).backward()
        history.append(full_gradients(model)["w"])
    if handle is None:
        return history, 0, 0
    return history, handle.memory_bytes(), handle.stats()[0].bytes_sent


def bfloat16_gradients(world_size: int, step: int) -> list[Tensor]:
    return [gradient("w", SHAPE, r, step).bfloat16().float() for r in range(world_size)]


@pytest.mark.parametrize(("factor", "divisor"), [(None, 4.0), (3.0, 3.0)])
def test_hybrid_mesh(ranks: RankPool, factor: float | None, divisor: float) -> None:
    """Field case 28: one factor means the same on a (4,) and on a (2, 2) mesh."""
    results = ranks.run(run_hybrid, 4, 2, 2, factor, True)
    pairs = [Definition(2), Definition(2)]
    factor_in_pair = 1 / 2 if factor is None else 1 / factor
    for step in range(3):
        fulls = bfloat16_gradients(4, step)
        halves = [
            torch.cat(pair.reduce(fulls[2 * i : 2 * i + 2], factor_in_pair))
            for i, pair in enumerate(pairs)
        ]
        expected = halves[0] + halves[1]
        if factor is None:  # FSDP averages over the replicas
            expected = expected / 2
        for history, _, _ in results:
            assert torch.equal(history[step], expected)
        flat = Definition(4)
        bound = 0.3 * fulls[0].norm()
        assert (history[step] - sum(fulls) / divisor).norm() < bound
        assert (torch.cat(flat.reduce(fulls, 1 / divisor)) - sum(fulls) / divisor).norm() < bound


def test_mesh_with_a_dimension_of_one(ranks: RankPool) -> None:
    """Field case 40: (2, 1) compresses nothing, bit for bit; (1, 2) equals the 1-D run."""
    replicated = ranks.run(run_hybrid, 2, 2, 1, None, True)
    native = ranks.run(run_hybrid, 2, 2, 1, None, False)
    for (history, held, sent), (plain, _, _) in zip(replicated, native, strict=True):
        assert all(torch.equal(one, two) for one, two in zip(history, plain, strict=True))
        assert held == sent == 0
    definition = Definition(2)
    sharded = ranks.run(run_hybrid, 2, 1, 2, None, True)
    for step in range(3):
        expected = torch.cat(definition.reduce(bfloat16_gradients(2, step)))
        for history, held, sent in sharded:
            assert torch.equal(history[step], expected)
            assert held > 0
            assert sent > 0


class Net(nn.Module):
    """Three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 2)
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x).square().mean()
        return result


def joined_batch(config: LoCoConfig, tolerance: float) -> None:
    rank, plain, model = dist.get_rank(), Net(), Net()
    for layer in (model.layers[0], model.layers[2], model.layers[4]):
        fully_shard(layer)
    fully_shard(model)
    attach(model, config)
    batch = gradient("batch", (16, 6), 0, 0)
    model(batch[8 * rank : 8 * rank + 8]).backward()
    plain(batch).backward()
    found = full_gradients(model)
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        error = (found[name] - parameter.grad).norm() / parameter.grad.norm()
        assert error < tolerance, (name, error)


@pytest.mark.parametrize(
    ("config", "tolerance"),
    [(TINY, 0.15), (LoCoConfig(), 1e-6), (LoCoConfig(min_numel=0, warmup_steps=1), 1e-6)],
)
def test_equals_one_process_on_the_joined_batch(
    ranks: RankPool, config: LoCoConfig, tolerance: float
) -> None:
    """Field case 32: the mean, not the sum, compressed, of tiny units and in warm-up."""
    ranks.run(joined_batch, 2, config, tolerance)


class Collectives(TorchDispatchMode):
    """Notes the collectives that run; those that reduce raise, as on a poor backend."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name
            self.names.append(name.removeprefix("c10d::"))
            if "reduce" in name:
                raise RuntimeError(f"{name}: not on this backend")
            if "alltoall" in name:
                assert all(t.dtype == torch.uint8 for t in args if isinstance(t, Tensor))
        return func(*args, **(kwargs or {}))


def run_on_poor_backend(policy: MixedPrecisionPolicy) -> None:
    shapes = {"w": SHAPE, "bias": (5,)}
    model = shard(Probe(shapes), mp_policy=policy)
    handle = attach(model, LoCoConfig(min_numel=0, warmup_steps=1))
    for factor in (None, 3.0):
        if factor is not None:
            model.set_gradient_divide_factor(factor)
        for step in range(3):
            model.zero_grad()
            loss = model(gradients(shapes, step))
            with Collectives() as seen:
                loss.backward()
            handle.step()
            assert seen.names.count("alltoall_base_") == 1
            assert set(seen.names) <= {"alltoall_base_", "_allgather_base_"}
            if step == 0 and factor is None and policy.reduce_dtype is None:  # warm-up
                fulls = [gradient("w", SHAPE, r, 0) for r in range(2)]
                dtype = policy.param_dtype or torch.float32
                expected = uncompressed([f.to(dtype) for f in fulls])[dist.get_rank()].float()
                assert torch.equal(local_gradients(model)["w"], expected)


@pytest.mark.parametrize(
    "policy", [MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16), BF16_FP32]
)
def test_backend_without_reducing_collectives(
    ranks: RankPool, policy: MixedPrecisionPolicy
) -> None:
    """Field cases 33 and 34: one all-to-all of bytes, in warm-up (of bfloat16 too) and after."""
    ranks.run(run_on_poor_backend, 2, policy)

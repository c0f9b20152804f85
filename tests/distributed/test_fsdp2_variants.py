"""Ways of FSDP2 that must make no difference: each gives what the definition says."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from distributed.models import (
    TINY,
    Chain,
    Definition,
    Probe,
    TwoLayers,
    full_gradients,
    gradient,
    gradients,
    local_gradients,
    residuals,
    shard,
    shard_probes,
)
from loco_fsdp import LoCoHandle, attach
from rank_pool import RankPool

PROBES: dict[str, dict[str, tuple[int, ...]]] = {
    "a": {"w": (9, 5), "v": (4, 6)},
    "b": {"w": (7, 3)},
}
SHAPES = {f"{unit}.{name}": shape for unit, own in PROBES.items() for name, shape in own.items()}


def check_three_steps(model: Any, handle: LoCoHandle) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    definitions = {name: Definition(world_size) for name in SHAPES}
    for step in range(3):
        model.zero_grad()
        model(gradients(SHAPES, step)).backward()
        found = local_gradients(model)
        for name, shape in SHAPES.items():
            fulls = [gradient(name, shape, r, step) for r in range(world_size)]
            assert torch.equal(found[name], definitions[name].reduce(fulls)[rank])
            assert torch.equal(handle.residual(name), definitions[name].residual(rank, shape))


def as_usual() -> None:
    model = shard_probes(Chain(PROBES))
    check_three_steps(model, attach(model, TINY))


def keep_unsharded_after_forward() -> None:
    model = shard_probes(Chain(PROBES), reshard_after_forward=False)
    check_three_steps(model, attach(model, TINY))


def reshard_to_two_ranks() -> None:
    model = shard_probes(Chain(PROBES), reshard_after_forward=2)
    check_three_steps(model, attach(model, TINY))


def keep_unsharded_after_backward() -> None:
    """Parameters stay whole over three backwards, whose gradients add up."""
    model = shard_probes(Chain(PROBES))
    model.set_reshard_after_backward(False)
    attach(model, TINY)
    for step in range(3):
        model(gradients(SHAPES, step)).backward()
    for unit in (model.a, model.b):
        unit.reshard()
    for name, shape in SHAPES.items():
        definition = Definition(2)
        calls = [[gradient(name, shape, r, step) for r in range(2)] for step in range(3)]
        one, two, three = (definition.reduce(fulls)[dist.get_rank()] for fulls in calls)
        expected = one + two + three
        assert torch.equal(local_gradients(model)[name], expected)


def group_of_its_own() -> None:
    """FSDP gives the reduction another process group, after LoCo has been attached."""
    model = shard_probes(Chain(PROBES))
    handle = attach(model, TINY)
    model.set_separate_reduce_scatter_group(True)
    check_three_steps(model, handle)


def on_the_meta_device() -> None:
    """Attached before the parameters have any memory."""
    with torch.device("meta"):
        model = shard_probes(Chain(PROBES))
    handle = attach(model, TINY)
    model.to_empty(device="cpu")
    check_three_steps(model, handle)


def evaluated_first() -> None:
    model = shard_probes(Chain(PROBES))
    handle = attach(model, TINY)
    with torch.no_grad():
        model(gradients(SHAPES, 9))
    check_three_steps(model, handle)


def attached_in_training() -> None:
    model = shard_probes(Chain(PROBES))
    model(gradients(SHAPES, 9)).backward()
    check_three_steps(model, attach(model, TINY))


def attached_between_forward_and_backward() -> None:
    model = shard_probes(Chain(PROBES))
    loss = model(gradients(SHAPES, 9))
    handle = attach(model, TINY)
    loss.backward()
    assert [stats.calls for stats in handle.stats()] == [1, 1]
    handle.reset()
    check_three_steps(model, handle)


def offloaded() -> None:
    model = shard_probes(Chain(PROBES), offload_policy=CPUOffloadPolicy(pin_memory=False))
    check_three_steps(model, attach(model, TINY))


@pytest.mark.parametrize(
    ("variant", "world_size"),
    [
        (as_usual, 2),
        (keep_unsharded_after_forward, 2),
        (reshard_to_two_ranks, 4),
        (keep_unsharded_after_backward, 2),
        (group_of_its_own, 2),
        (on_the_meta_device, 2),
        (evaluated_first, 2),
        (attached_in_training, 2),
        (attached_between_forward_and_backward, 2),
        (offloaded, 2),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_variant(ranks: RankPool, variant: Callable[[], None], world_size: int) -> None:
    ranks.run(variant, world_size)


class NormAndHead(nn.Module):
    """Norm runs in forward; the head, which shares its unit, is called for each chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = Probe({"w": (9, 5)}), Probe({"w": (9, 5)})

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        result: Tensor = self.norm(given, torch.zeros((), requires_grad=True))
        return result


def chunk_the_head() -> None:
    model = NormAndHead()
    fully_shard([model.norm, model.head])
    fully_shard(model)
    handle = attach(model, TINY)
    rank, shape = dist.get_rank(), (9, 5)
    norm, head = Definition(2), Definition(2)
    for step in range(2):
        model.zero_grad()
        x = model({"w": gradient("norm", shape, rank, step)})
        cut = x.detach().requires_grad_()
        expected = torch.zeros(shape)
        for chunk in range(3):
            model.head({"w": gradient(f"head {chunk}", shape, rank, step)}, cut).backward()
            fulls = [gradient(f"head {chunk}", shape, r, step) for r in range(2)]
            expected += torch.cat(head.reduce(fulls))
        x.backward(cut.grad / 3)
        found = full_gradients(model)
        assert torch.equal(found["head.w"], expected)
        fulls = [gradient("norm", shape, r, step) for r in range(2)]
        assert torch.equal(found["norm.w"], torch.cat(norm.reduce(fulls)))
    assert handle.stats()[0].calls == 8
    assert torch.equal(residuals(handle)["head.w"], head.residual(rank, shape))


def test_head_in_chunks(ranks: RankPool) -> None:
    """One unit, one reduction for each chunk and one for the norm, of one parameter each."""
    ranks.run(chunk_the_head, 2)


def defer_the_all_reduce() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = shard(Probe({"w": (9, 5)}), mesh=mesh)
    handle = attach(model, TINY)
    for step in range(2):
        model.set_requires_all_reduce(step == 1)
        model({"w": gradient("w", (9, 5), dist.get_rank(), step)}).backward()
    pairs = [Definition(2), Definition(2)]
    halves = []
    for index, pair in enumerate(pairs):
        own = range(2 * index, 2 * index + 2)
        first, second = (
            torch.cat(pair.reduce([gradient("w", (9, 5), r, step) for r in own]))
            for step in range(2)
        )
        halves.append(second + first)
    assert torch.equal(full_gradients(model)["w"], (halves[0] + halves[1]) / 2)
    assert handle.stats()[0].calls == 2
    own_pair = pairs[dist.get_rank() // 2]
    assert torch.equal(handle.residual("w"), own_pair.residual(dist.get_rank() % 2, (9, 5)))


def test_deferred_all_reduce(ranks: RankPool) -> None:
    """Field case 27: earlier micro-batches are in the all-reduce; both calls moved the residual."""
    ranks.run(defer_the_all_reduce, 4)


def shard_beside_tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank()
    plain, split = TwoLayers(), TwoLayers()
    parallelize_module(split, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model = shard(split, mesh=mesh["dp"])
    handle = attach(model, TINY)
    loss = model(gradient("x", (4, 6), dp, 0))
    if tp == 1:
        time.sleep(1)  # the other pair must not wait for this one
    loss.backward()
    wanted: dict[str, list[Tensor]] = {"up.weight": [], "down.weight": []}
    for rank in range(2):
        plain.zero_grad()
        plain(gradient("x", (4, 6), rank, 0)).backward()
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            own = parameter.grad.chunk(2, 0 if name == "up.weight" else 1)[tp]
            wanted[name].append(own.clone())
    for name, fulls in wanted.items():
        assert torch.equal(local_gradients(model)[name], Definition(2).reduce(fulls)[dp])
        assert handle.residual(name).shape == fulls[0].shape


def test_beside_tensor_parallel(ranks: RankPool) -> None:
    """Field case 11: only the shard group is used, on each tensor-parallel rank's part."""
    ranks.run(shard_beside_tensor_parallel, 4)

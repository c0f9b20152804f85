"""Ranks that disagree get an error on every rank; a failed exchange breaks the unit until reset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from distributed.models import (
    TINY,
    Chain,
    Definition,
    Probe,
    gradient,
    gradients,
    local_gradients,
    residuals,
    same,
    shard,
    shard_probes,
    uncompressed,
)
from loco_fsdp import LoCoConfig, attach
from rank_pool import RankPool

EXPERTS = {"e0": (8, 8), "e1": (8, 8)}


def message(model: Any, used: Sequence[str]) -> str:
    """Text of the RuntimeError that a backward raises, with what it has been annotated with."""
    with pytest.raises(RuntimeError) as caught:
        model(gradients({name: EXPERTS[name] for name in used}, 0)).backward()
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


def use_other_experts(used_by_rank: Sequence[str]) -> tuple[str, str, str]:
    """Errors of this rank: of the call itself, of the next one, of reading the residual."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = shard(Probe(EXPERTS))
    handle = attach(model, TINY)
    first = message(model, used_by_rank[rank].split())
    model.reset_iter_state()
    second = message(model, ["e0", "e1"])
    with pytest.raises(RuntimeError) as caught:
        handle.residual("e0")
    # As new after reset.
    handle.reset()
    model.reset_iter_state()
    model.zero_grad()
    model(gradients(EXPERTS, 7)).backward()
    for name, shape in EXPERTS.items():
        fulls = [gradient(name, shape, r, 7) for r in range(world_size)]
        definition = Definition(world_size)
        assert torch.equal(local_gradients(model)[name], definition.reduce(fulls)[rank])
        assert torch.equal(handle.residual(name), definition.residual(rank, shape))
    return first, second, str(caught.value)


@pytest.mark.parametrize("used", [["e0", "e1"], ["e0", "e0 e1"], ["e0", "e0", "e1"]], ids="-".join)
def test_ranks_with_other_parameters(ranks: RankPool, used: list[str]) -> None:
    """Field case 36 (a), sets of different size, and (b), of equal size: never a silent mix."""
    for first, second, reading in ranks.run(use_other_experts, len(used), used):
        for rank, names in enumerate(used):
            line = next(line for line in first.splitlines() if f"rank {rank}:" in line)
            for name in EXPERTS:
                absent = "" if name in names else ", no gradient"
                row_numel = -(-8 // len(used)) * 8
                assert f"{name}: {row_numel} codes{absent}" in line.split("; ")
        assert "FSDP unit 'root'" in first
        assert "set_reduce_scatter_unused_params(True)" in first
        for text in (second, reading):
            assert "FSDP unit 'root' is broken" in text
            assert "reset()" in text


def run_in_other_order() -> str:
    shapes = {"a.w": (8, 8), "b.w": (8, 8)}
    model = shard_probes(Chain({"a": {"w": (8, 8)}, "b": {"w": (8, 8)}}))
    attach(model, TINY)
    with pytest.raises(RuntimeError, match="different layouts") as caught:
        model(gradients(shapes, 0), "ab" if dist.get_rank() == 0 else "ba").backward()
    return str(caught.value)


def test_ranks_with_another_order_of_units(ranks: RankPool) -> None:
    """Equal sizes again, so that FSDP itself would mix the two."""
    for text in ranks.run(run_in_other_order, 2):
        assert "a.w: 32 codes" in text
        assert "b.w: 32 codes" in text


def use_other_experts_with_zeros() -> None:
    """Rank 0 uses e0 in odd and both in even steps, rank 1 only e1 in all."""
    rank = dist.get_rank()
    model = shard(Probe(EXPERTS))
    model.set_reduce_scatter_unused_params(True)
    handle = attach(model, TINY)
    definitions = {name: Definition(2) for name in EXPERTS}
    for step in range(6):
        used = [["e0"] if step % 2 else ["e0", "e1"], ["e1"]]
        model.zero_grad()
        model(gradients({n: EXPERTS[n] for n in used[rank]}, step)).backward()
        for name, shape in EXPERTS.items():
            fulls = [gradient(name, shape, r, step) if name in used[r] else None for r in range(2)]
            expected = definitions[name].reduce(fulls)[rank]
            assert torch.equal(local_gradients(model)[name], expected)
            assert torch.equal(handle.residual(name), definitions[name].residual(rank, shape))
    assert not handle.residual("e0").any() or rank == 0


def test_unused_parameters_as_zeros(ranks: RankPool) -> None:
    """Field case 36: with FSDP's own switch it works; an unused expert keeps its residual."""
    ranks.run(use_other_experts_with_zeros, 2)


def disagree(configs: Sequence[LoCoConfig]) -> str:
    model = shard(Probe(EXPERTS))
    with pytest.raises(ValueError, match="equal settings on all ranks") as caught:
        attach(model, configs[dist.get_rank()])
    # Nothing was installed: FSDP reduces as ever.
    model(gradients(EXPERTS, 0)).backward()
    for name, shape in EXPERTS.items():
        fulls = [gradient(name, shape, r, 0) for r in range(len(configs))]
        expected = uncompressed(fulls)[dist.get_rank()]
        torch.testing.assert_close(local_gradients(model)[name], expected)
    return str(caught.value)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("block_size", 64), ("bits", 8), ("warmup_steps", 2), ("skip", ("e0",)), ("min_numel", 1)],
)
def test_ranks_with_other_settings(ranks: RankPool, setting: str, value: Any) -> None:
    """Field case 77: compared once at attach, an error on all ranks, no hang."""
    other = LoCoConfig(**{"min_numel": 0, setting: value})
    for text in ranks.run(disagree, 3, [TINY, TINY, other]):
        assert f"{setting}={getattr(TINY, setting)!r}" in text
        assert f"{setting}={value!r}" in text
        assert "rank 2" in text


def disagree_in_one_group() -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = shard(Probe(EXPERTS), mesh=mesh)
    with pytest.raises(ValueError, match="equal settings on all ranks") as caught:
        attach(model, LoCoConfig(min_numel=0, bits=8 if dist.get_rank() == 3 else 4))
    return str(caught.value)


def test_replicas_with_other_settings(ranks: RankPool) -> None:
    """HSDP: ranks whose own shard group agrees must not go on alone."""
    for text in ranks.run(disagree_in_one_group, 4):
        assert "bits=4" in text
        assert "bits=8" in text


def disagree_on_model(other_shapes: bool) -> str:
    other = dist.get_rank() == 1
    model = Chain({"a": {"w": (4, 4)}, "b": {"v" if other and other_shapes else "w": (4, 4)}})
    fully_shard(model.get_submodule("a"))
    if other and not other_shapes:
        fully_shard(model.get_submodule("b"))
    fully_shard(model)
    with pytest.raises(ValueError, match="equal settings on all ranks") as caught:
        attach(model, TINY)
    return str(caught.value)


def test_ranks_with_other_parameters_or_units(ranks: RankPool) -> None:
    for text in ranks.run(disagree_on_model, 2, True):
        assert "b.w [4, 4]" in text
        assert "b.v [4, 4]" in text
    for text in ranks.run(disagree_on_model, 2, False):
        assert "unit 'root'" in text


def fail_once(*_: Any, **__: Any) -> None:
    raise ConnectionError("the peer went away")


def lose_an_exchange() -> None:
    rank, shapes = dist.get_rank(), {"w": (12, 5)}
    model = shard(Probe(shapes))
    handle = attach(model, TINY)
    model(gradients(shapes, 0)).backward()
    before = residuals(handle)
    with (
        patch.object(dist, "all_to_all_single", fail_once),
        pytest.raises(ConnectionError, match="the peer went away") as caught,
    ):
        model(gradients(shapes, 1)).backward()
    assert "FSDP unit 'root'" in caught.value.__notes__[0]
    model.reset_iter_state()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"broken .* the peer went away"):
            model(gradients(shapes, 2)).backward()
        model.reset_iter_state()
    with pytest.raises(RuntimeError, match="broken"):
        handle.residual("w")
    handle.reset()
    assert same(residuals(handle), {"w": torch.zeros(12, 5)})
    assert not same(residuals(handle), before)
    model.zero_grad()
    model(gradients(shapes, 3)).backward()
    expected = Definition(2).reduce([gradient("w", (12, 5), r, 3) for r in range(2)])[rank]
    assert torch.equal(local_gradients(model)["w"], expected)


def test_failed_exchange_breaks_the_unit(ranks: RankPool) -> None:
    ranks.run(lose_an_exchange, 2)

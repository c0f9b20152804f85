"""The pending correction survives a change of the number of ranks, of dtype and of mesh."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from distributed.checkpoint_runs import (
    OPTIMIZERS,
    load_from,
    mean_residuals,
    net,
    odd_model,
    save_to,
)
from distributed.models import TINY, full_gradients, residuals
from distributed.optimizer_runs import loss_of, set_sync, train
from loco_fsdp import LoCoConfig, LoCoOptimizer
from rank_pool import RankPool

FLOAT = replace(TINY, residual_dtype="float32", residual_checkpoint_dtype="float32")


def saved(config: LoCoConfig, folder: str) -> dict[str, Tensor]:
    """Give every rank residuals of its own and save them; returns their means."""
    model, optimizer = odd_model(config)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for parameter in optimizer.loco.compressible_parameters():
        shape = parameter.tensor.shape
        optimizer.loco.load_residual(parameter.name, torch.randn(shape, generator=generator))
    optimizer.loco.steps = 17
    save_to(folder, model, optimizer)
    return mean_residuals(optimizer.loco)


def loaded(config: LoCoConfig, folder: str, saved_ranks: int | None = None) -> Any:
    model, optimizer = odd_model(config)
    optimizer.loco.saved_ranks = saved_ranks
    load_from(folder, model, optimizer)
    return mean_residuals(optimizer.loco), optimizer.loco.steps


def error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Largest difference, relative to the parameter's largest element."""
    assert found.keys() == wanted.keys() and len(wanted) == 4
    return max(
        float((found[name] - value).abs().max() / value.abs().max())
        for name, value in wanted.items()
    )


PAIRS = [(2, 2), (2, 1), (2, 3), (2, 4), (2, 8), (3, 2), (4, 3), (4, 1), (8, 2)]


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=str)
def test_mean_on_other_numbers_of_ranks(
    ranks: RankPool, tmp_path: Path, before: int, after: int
) -> None:
    """Field case 58: more ranks than rows, fewer, one; steps travel too.

    With float32 the mean is the same to its rounding; by default to that of bfloat16 (2^-9) and of
    an 8-bit block (half a step, 1/256 of its largest element).
    """
    for config, bound in ((FLOAT, 1e-6), (TINY, 2**-9 + 2**-8)):
        folder = str(tmp_path / config.residual_dtype)
        wanted = ranks.run(saved, before, config, folder)[0]
        for found, steps in ranks.run(loaded, after, config, folder):
            assert error(found, wanted) < bound
            assert steps == 17


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 4), (4, 3), (3, 1)], ids=str)
def test_rows_on_other_numbers_of_ranks(
    ranks: RankPool, tmp_path: Path, before: int, after: int
) -> None:
    """Field cases 57 and 58: each new rank has W'/W times the sum of the rows that it inherits."""
    config = replace(FLOAT, residual_checkpoint="exact")
    wanted = ranks.run(saved, before, config, str(tmp_path))[0]
    for found, _ in ranks.run(loaded, after, config, str(tmp_path), before):
        assert error(found, wanted) < 1e-6


def test_exact_checkpoint_loads_as_a_mean(ranks: RankPool, tmp_path: Path) -> None:
    """Field case 58: an exact checkpoint holds the mean too, for jobs that ask for no more."""
    wanted = ranks.run(saved, 2, replace(FLOAT, residual_checkpoint="exact"), str(tmp_path))[0]
    for found, _ in ranks.run(loaded, 3, FLOAT, str(tmp_path)):
        assert error(found, wanted) < 1e-6


def test_one_rank_passes_on_what_it_got(ranks: RankPool, tmp_path: Path) -> None:
    """Two ranks, then one, which compresses nothing, then three."""
    first, second = str(tmp_path / "a"), str(tmp_path / "b")
    wanted = ranks.run(saved, 2, FLOAT, first)[0]
    ranks.run(passed_on, 1, first, second)
    for found, steps in ranks.run(loaded, 3, FLOAT, second):
        assert error(found, wanted) < 1e-6
        assert steps == 17


def passed_on(first: str, second: str) -> None:
    model, optimizer = odd_model(FLOAT)
    load_from(first, model, optimizer)
    save_to(second, model, optimizer)


def halves(folder: str, policy: MixedPrecisionPolicy, scale: float, save: bool) -> Any:
    """Train scaled for two steps and save, or load; then what a zero gradient is reduced to."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    model, _ = net(OPTIMIZERS["sgd"], FLOAT, mp_policy=policy)
    optimizer = LoCoOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0),
        model,
        replace(FLOAT, bits=8),
        grad_scaler=scaler,
    )
    if save:
        for step in range(2):
            scaler.scale(loss_of(model, step)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        save_to(folder, model, optimizer)
    else:
        load_from(folder, model, optimizer)
    scaler.scale(0.0 * loss_of(model, 5)).backward()
    return {name: g.float() / scale for name, g in full_gradients(model).items() if g.dim() > 1}


POLICIES = {
    "fp16": MixedPrecisionPolicy(reduce_dtype=torch.float16),
    "fp32": MixedPrecisionPolicy(),
}


@pytest.mark.parametrize(
    ("one", "other", "after"),
    [("fp16", "fp32", 4), ("fp32", "fp16", 4), ("fp16", "fp16", 2), ("fp32", "fp32", 2)],
)
def test_units_are_of_plain_gradients(
    ranks: RankPool, tmp_path: Path, one: str, other: str, after: int
) -> None:
    """FSDP divides float16 gradients by 2 before it reduces them, and scalers differ: none shows.

    What the next zero gradient is reduced to is the pending correction, whichever job saved it.
    """
    wanted = ranks.run(halves, 4, str(tmp_path), POLICIES[one], 64.0, True)[0]
    for found in ranks.run(halves, after, str(tmp_path), POLICIES[other], 8.0, False):
        for name, value in wanted.items():
            assert value.any()
            torch.testing.assert_close(
                found[name], value, rtol=0, atol=float(value.abs().max()) / 30, msg=name
            )


def hybrid(folder: str, shape: tuple[int, ...], save: bool) -> Any:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    config = replace(FLOAT, residual_checkpoint="exact" if len(shape) == 2 else "mean")
    model, optimizer = net(OPTIMIZERS["adamw"], config, mesh=mesh)
    if save:
        train(model, optimizer, range(3))
        save_to(folder, model, optimizer)
    else:
        load_from(folder, model, optimizer)
    return mean_residuals(optimizer.loco), residuals(optimizer.loco)


def test_replicas(ranks: RankPool, tmp_path: Path) -> None:
    """HSDP: the mean is over shard group and replicas; the exact rows are every rank's own."""
    wanted = ranks.run(hybrid, 4, str(tmp_path), (2, 2), True)
    exact = ranks.run(hybrid, 4, str(tmp_path), (2, 2), False)
    for (_, found), (_, own) in zip(exact, wanted, strict=True):
        assert all(torch.equal(found[name], own[name]) for name in own)
    for shape in ((3,), (4,)):
        for found, _ in ranks.run(hybrid, shape[0], str(tmp_path), shape, False):
            assert error(found, wanted[0][0]) < 1e-6


def used_on_one_rank_only() -> Any:
    """Rank 1 alone has a residual of the last block: it has never held one elsewhere."""
    model, optimizer = net(OPTIMIZERS["adamw"], FLOAT)
    model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
    train(model, optimizer, [0])
    optimizer.loco.reset()
    name = "blocks.1.weight"
    if dist.get_rank() == 1:
        optimizer.loco.load_residual(name, torch.full((24, 24), 3.0))
    found = optimizer.loco.state_dict()[name]["loco_residual"]
    assert isinstance(found, DTensor)
    return found.full_tensor()


def test_residual_of_some_ranks_only(ranks: RankPool) -> None:
    for mean in ranks.run(used_on_one_rank_only, 3):
        assert torch.equal(mean, torch.ones(24, 24))


def incomplete_cycle(folder: str) -> Any:
    """Five micro-batches, two a step: saved while the fifth waits for its sixth."""
    model, optimizer = net()
    for micro in range(5):
        set_sync(model, micro % 2 == 1)
        (loss_of(model, micro) / 2).backward()
        if micro % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
    save_to(folder, model, optimizer)
    other, fresh = net()
    load_from(folder, other, fresh)
    return fresh.loco.steps, optimizer.loco.steps, mean_residuals(fresh.loco)


def test_saved_in_an_incomplete_cycle(ranks: RankPool, tmp_path: Path) -> None:
    """Field case 26: the step counter is that of whole cycles, and so are the residuals."""
    results = ranks.run(incomplete_cycle, 2, str(tmp_path))
    for steps, saved_steps, means in results:
        assert (steps, saved_steps) == (2, 2)
        assert all(mean.any() for mean in means.values())

"""Checkpoints where parameters are split in more ways than over the data-parallel ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import AdamW

from distributed.checkpoint_runs import load_from, save_to
from distributed.models import TINY, TwoLayers, gradient, residuals, same, shard
from loco_fsdp import LoCoOptimizer
from rank_pool import RankPool

EXACT = replace(TINY, residual_checkpoint="exact", residual_checkpoint_dtype="float32")
SPLIT_DIMS = {"up.weight": 0, "down.weight": 1}


def split_net(mesh: DeviceMesh) -> tuple[TwoLayers, LoCoOptimizer]:
    model = TwoLayers()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    shard(model, mesh=mesh["dp"])
    return model, LoCoOptimizer(AdamW(model.parameters(), lr=1e-2), model, EXACT)


def train(model: TwoLayers, optimizer: LoCoOptimizer, mesh: DeviceMesh, steps: range) -> None:
    for step in steps:
        model(gradient("x", (4, 6), mesh["dp"].get_local_rank(), step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def beside_tensor_parallel(folder: str) -> Any:
    """Whole residuals put together by hand, and two steps after a load and without one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, optimizer = split_net(mesh)
    train(model, optimizer, mesh, range(3))
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, residuals(optimizer.loco))
    state = optimizer.loco.state_dict()
    for name, dim in SPLIT_DIMS.items():
        parts = [[everyone[2 * dp + tp][name] for tp in range(2)] for dp in range(2)]
        whole = torch.stack([torch.cat(both, dim) for both in parts])
        rows: Any = state[name]["loco_residual_rows"]
        assert rows.placements == (Shard(0), Shard(1 + dim)) and rows.shape == whole.shape
        assert torch.equal(rows.full_tensor(), whole) and whole.any()
        mean: Any = state[name]["loco_residual"]
        torch.testing.assert_close(mean.full_tensor(), whole.mean(0), rtol=0, atol=1e-7)
    save_to(folder, model, optimizer)
    other, fresh = split_net(mesh)
    load_from(folder, other, fresh)
    assert same(residuals(optimizer.loco), residuals(fresh.loco))
    for run in ((model, optimizer), (other, fresh)):
        train(*run, mesh, range(3, 5))
    return all(
        torch.equal(a.to_local(), b.to_local())  # type: ignore[attr-defined]
        for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


def test_beside_tensor_parallel(ranks: RankPool, tmp_path: Path) -> None:
    """Each rank's residual is one row, of the whole parameter, split as the parameter is."""
    assert ranks.run(beside_tensor_parallel, 4, str(tmp_path)) == [True] * 4

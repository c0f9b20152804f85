"""Ranks that die or stall: the others get an error, and the last checkpoint is a whole one.

These tests use processes of their own, since some of them do not survive.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from distributed.checkpoint_runs import OPTIMIZERS, mean_residuals, net
from distributed.optimizer_runs import full, loss_of, train
from lm.checkpoint import Checkpoints
from lm.parallel import World
from loco_fsdp import LoCoOptimizer
from rank_pool import GROUP_TIMEOUT, RankError, RankPool


@pytest.fixture
def mortal_ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


def checkpoints(folder: str) -> Checkpoints:
    world = World(rank=dist.get_rank(), size=dist.get_world_size(), device=torch.device("cpu"))
    return Checkpoints(folder=Path(folder), world=world, identity={"model": "net"})


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def note(folder: str, **outcome: Any) -> None:
    """Leave word of this rank where the test finds it, whoever dies later."""
    Path(folder, f"rank{dist.get_rank()}.json").write_text(json.dumps(outcome))


def refuses(optimizer: LoCoOptimizer) -> bool:
    try:
        optimizer.state_dict()
    except RuntimeError as error:
        return "is broken since an exchange failed" in str(error)
    return False


def killed_in_backward(folder: str) -> None:
    """Checkpoint after step 2; in the third backward rank 2 is gone."""
    model, optimizer = net()
    train(model, optimizer, range(2))
    checkpoints(folder).save(2, model, optimizer)
    loss = loss_of(model, 2)
    if dist.get_rank() == 2:
        model.blocks[0].register_full_backward_hook(die)
        loss = loss_of(model, 2)
    else:
        loss_of(model, 2)  # as many forwards on all ranks
    started = time.monotonic()
    try:
        loss.backward()
    except RuntimeError as error:
        seconds = time.monotonic() - started
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        note(folder, error=text, seconds=seconds, refuses=refuses(optimizer))


def killed_in_save(folder: str) -> None:
    """Checkpoint after step 2; while the one after step 4 is written rank 2 is gone."""
    model, optimizer = net()
    train(model, optimizer, range(2))
    checkpoints(folder).save(2, model, optimizer)
    train(model, optimizer, range(2, 4))
    write = die if dist.get_rank() == 2 else torch.save
    try:
        with mock.patch("torch.save", write):
            checkpoints(folder).save(4, model, optimizer)
    except RuntimeError as error:
        note(folder, error=str(error), seconds=0.0, refuses=True)


def resumed(folder: str) -> Any:
    """Two more steps from the newest whole checkpoint."""
    model, optimizer = net(OPTIMIZERS["adamw"])
    found = checkpoints(folder)
    step = found.newest_step()
    assert step is not None
    found.load(step, model, optimizer)
    pending = any(mean.any() for mean in mean_residuals(optimizer.loco).values())
    train(model, optimizer, range(step, step + 2))
    return step, optimizer.loco.steps, pending, full(model.out.weight).isfinite().all().item()


@pytest.mark.parametrize("job", [killed_in_backward, killed_in_save])
def test_sigkill(ranks: RankPool, mortal_ranks: RankPool, tmp_path: Path, job: Any) -> None:
    """Field case 78: survivors raise within the timeout; a restart works on 3 ranks and on 2.

    What was being written when the rank died is never taken for a checkpoint.
    """
    with pytest.raises(RankError, match="the process has ended"):
        mortal_ranks.run(job, 3, str(tmp_path))
    for rank in (0, 1):
        outcome = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert outcome["seconds"] < GROUP_TIMEOUT.total_seconds()
        assert outcome["refuses"]
        assert job is killed_in_save or "reduction of FSDP unit" in outcome["error"]
    assert [p.name for p in tmp_path.glob("step-*4*")] == (
        ["step-00000004.partial"] if job is killed_in_save else []
    )
    for world_size in (3, 2):
        for outcome in ranks.run(resumed, world_size, str(tmp_path)):
            assert outcome == (2, 4, True, True)


def stalled(folder: str) -> None:
    """Rank 1 is late by more than the timeout of the shard group."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    mesh = DeviceMesh.from_group(group, "cpu")
    # Backward has no all-gather then: the exchange is what fails.
    model, optimizer = net(mesh=mesh, reshard_after_forward=False)
    train(model, optimizer, range(1))
    loss = loss_of(model, 1)

    def wait(_: Tensor) -> None:
        if dist.get_rank() == 1:
            time.sleep(4)

    loss.register_hook(wait)
    started = time.monotonic()
    with pytest.raises(RuntimeError):
        loss.backward()
    waited = time.monotonic() - started
    with pytest.raises(RuntimeError, match="is broken since an exchange failed"):
        optimizer.step()
    note(folder, seconds=waited, refuses=refuses(optimizer))


def test_time_out(mortal_ranks: RankPool, tmp_path: Path) -> None:
    """Field case 77: a rank that is late ends the wait of the others, and the unit is broken."""
    mortal_ranks.run(stalled, 2, str(tmp_path))
    for rank in (0, 1):
        outcome = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert outcome["refuses"]
        assert outcome["seconds"] < 10

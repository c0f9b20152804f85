"""Checkpoints of model and optimizer by ``torch.distributed.checkpoint``, whole or not there.

A checkpoint is written into ``step-N.partial`` and renamed to ``step-N`` when every rank has
written its part. The step is all that is needed besides: batches, learning rate and random
numbers are functions of seed and step. The shards fit any number of ranks.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from lm.parallel import World

KEPT = 2
"""Newest checkpoints that stay on disk."""


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """The checkpoints of one run. All methods are collectives, except where they say not."""

    folder: Path
    """Holds one folder per checkpoint."""

    world: World
    """The ranks that save and load together."""

    identity: dict[str, Any]
    """Settings without which a checkpoint makes no sense; compared when one is loaded."""

    def newest_step(self) -> int | None:
        """Steps done at the newest whole checkpoint, or None; the same answer on every rank."""
        # A shared file system may show a new folder to one rank before another: rank 0 decides.
        answer = [max(self.steps_on_disk(), default=None)]
        dist.broadcast_object_list(answer, src=0, device=self.world.device)
        return answer[0]

    def steps_on_disk(self) -> list[int]:
        """Steps of the whole checkpoints that this rank sees, in order; not a collective."""
        names = (path.name for path in self.folder.glob("step-*"))
        return sorted(int(m[1]) for name in names if (m := re.fullmatch(r"step-(\d+)", name)))

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Write the state after ``step`` steps, and forget all but the newest checkpoints."""
        partial = self.folder / f"step-{step:08d}.partial"
        if self.world.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        dist.barrier()
        save(_state(model, optimizer), checkpoint_id=partial)
        if self.world.rank == 0:
            (partial / "identity.json").write_text(json.dumps(self.identity, indent=2))
            self._publish(step, partial)
        dist.barrier()

    def load(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Bring model and optimizer to where they were after ``step`` steps, in place.

        Raises ``ValueError`` when the checkpoint belongs to another model or optimizer.
        """
        path = self._path(step)
        saved = json.loads((path / "identity.json").read_text())
        for name, value in self.identity.items():
            if saved.get(name) != value:
                raise ValueError(
                    f"{name}={value!r}: the checkpoint {path} has {saved.get(name)!r}."
                )
        state = _state(model, optimizer)
        load(state, checkpoint_id=path)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _publish(self, step: int, partial: Path) -> None:
        final = self._path(step)
        shutil.rmtree(final, ignore_errors=True)
        partial.replace(final)
        for old in self.steps_on_disk()[:-KEPT]:
            shutil.rmtree(self._path(old))


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}

"""Checkpoints of a run by ``torch.distributed.checkpoint``, whole or not there.

A checkpoint is written into ``step-N.partial`` and renamed to ``step-N`` when every rank has
written its part; ``latest`` names the newest. It holds model, optimizer with LoCo's residuals,
the position in the data and every rank's random numbers. The shards fit any number of ranks;
random numbers are taken up again where the number is the same.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from lm.parallel import World
from lm.runlog import write_atomically
from loco_fsdp import LoCoOptimizer

KEPT = 2
"""Newest checkpoints that stay on disk."""


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """The checkpoints of one run. All methods are collectives, except where they say not."""

    folder: Path
    """Holds one folder per checkpoint, and ``latest``."""

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
        whole = (path.name for path in self.folder.glob("step-*") if _is_whole(path))
        return sorted(int(m[1]) for name in whole if (m := re.fullmatch(r"step-(\d+)", name)))

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Write the state after ``step`` steps, and forget all but the newest checkpoints."""
        partial = self.folder / f"step-{step:08d}.partial"
        if self.world.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        dist.barrier()
        save(_state(model, optimizer), checkpoint_id=partial)
        with (partial / _random_file(self.world.rank)).open("wb") as file:
            torch.save(self._random_state(), file)
            file.flush()
            os.fsync(file.fileno())
        dist.barrier()
        if self.world.rank == 0:
            run = {"steps": step, "ranks": self.world.size, "identity": self.identity}
            write_atomically(partial / "run.json", json.dumps(run, indent=2) + "\n")
            self._publish(step, partial)
        dist.barrier()

    def load(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Bring model, optimizer and random numbers to where they were after ``step`` steps.

        Raises ``ValueError`` when the checkpoint belongs to another run.
        """
        path = self._path(step)
        run = json.loads((path / "run.json").read_text())
        for name, value in self.identity.items():
            if run["identity"].get(name) != value:
                raise ValueError(
                    f"{name}={value!r}: the checkpoint {path} has {run['identity'].get(name)!r}."
                )
        if isinstance(optimizer, LoCoOptimizer) and run["ranks"] != self.world.size:
            optimizer.loco.saved_ranks = run["ranks"]
        state = _state(model, optimizer)
        _leave_out_what_was_not_saved(state["optimizer"], path)
        load(state, checkpoint_id=path)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        if run["ranks"] == self.world.size:
            self._set_random_state(torch.load(path / _random_file(self.world.rank)))

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _publish(self, step: int, partial: Path) -> None:
        final = self._path(step)
        shutil.rmtree(final, ignore_errors=True)
        partial.replace(final)
        write_atomically(self.folder / "latest", final.name + "\n")
        for old in self.steps_on_disk()[:-KEPT]:
            shutil.rmtree(self._path(old))

    def _random_state(self) -> list[torch.Tensor]:
        on_gpu = self.world.device.type == "cuda"
        gpu = [torch.cuda.get_rng_state(self.world.device)] if on_gpu else []
        return [torch.get_rng_state(), *gpu]

    def _set_random_state(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self.world.device.type == "cuda":
            torch.cuda.set_rng_state(states[1], self.world.device)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def _leave_out_what_was_not_saved(state: dict[str, Any], path: Path) -> None:
    """Take out LoCo's tensors that a checkpoint lacks, so that one without LoCo loads too."""
    saved = FileSystemReader(path).read_metadata().state_dict_metadata
    for name, values in state["state"].items():
        for key in [key for key in values if key.startswith("loco_")]:
            if f"optimizer.state.{name}.{key}" not in saved:
                del values[key]


def _is_whole(path: Path) -> bool:
    """Tell whether a copy of a checkpoint, which somebody may have interrupted, is complete."""
    try:
        ranks = json.loads((path / "run.json").read_text())["ranks"]
        files = FileSystemReader(path).read_metadata().storage_data.values()
    except Exception:  # a file is not there, or is half a file
        return False
    sizes = {_random_file(rank): 1 for rank in range(ranks)}
    for info in files:
        end = info.offset + info.length
        sizes[info.relative_path] = max(end, sizes.get(info.relative_path, 0))
    present = ((path / name, size) for name, size in sizes.items())
    return all(file.is_file() and file.stat().st_size >= size for file, size in present)


def _random_file(rank: int) -> str:
    return f"random-{rank:05d}.pt"

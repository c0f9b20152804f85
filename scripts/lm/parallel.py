"""Process group, device and FSDP2 sharding of a run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lm.model import Decoder
from lm.settings import TrainSettings


@dataclass(frozen=True, kw_only=True)
class World:
    """Where this process stands among the ranks."""

    rank: int
    """Rank of this process."""

    size: int
    """Number of ranks."""

    device: torch.device
    """Device of this rank's model and batches."""

    def mean(self, value: Tensor) -> float:
        """Average a scalar over all ranks."""
        total = value.detach().to(torch.float64 if value.device.type == "cpu" else torch.float32)
        dist.all_reduce(total)
        return float(total) / self.size

    def any(self, flag: bool) -> bool:
        """Tell whether the flag is set on some rank; the same answer on all."""
        flags = torch.tensor(int(flag), device=self.device)
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        return bool(flags)


@contextmanager
def joined_world(settings: TrainSettings) -> Iterator[World]:
    """Join the process group that torchrun describes; without torchrun, be alone in one."""
    device = _device(settings.device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=settings.timeout_seconds)
    if "RANK" in os.environ:
        # Named, the device is also the one of barriers; NCCL would have to guess it otherwise.
        device_id = device if device.type == "cuda" else None
        dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not in __all__
        dist.init_process_group(backend, timeout=timeout, store=store, rank=0, world_size=1)
    yield World(rank=dist.get_rank(), size=dist.get_world_size(), device=device)
    # Only a run that went well gets here: after an error the other ranks may never arrive.
    # Without the barrier a fast rank can tear down connections that a slow one still uses.
    dist.barrier()
    dist.destroy_process_group()


def shard(model: Decoder, settings: TrainSettings, world: World) -> FSDPModule:
    """Shard each block, then what is left (embedding, last norm, head), in place."""
    # The mesh is named so that `device: cpu` means the CPU on a machine with a GPU too.
    mesh = init_device_mesh(world.device.type, (world.size,))
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, settings.param_dtype),
        reduce_dtype=getattr(torch, settings.reduce_dtype),
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def plain_reduction_bytes(model: nn.Module, dtype: torch.dtype, world_size: int) -> int:
    """Bytes that one rank must send to reduce all gradients once, uncompressed.

    A reduce-scatter gives every other rank its shard of each parameter: ``ceil(d0/W)`` of the
    ``d0`` rows. (What gloo really sends is more: it reduces all and then scatters.)
    """
    elements = 0
    for parameter in model.parameters():
        rows = -(-parameter.shape[0] // world_size)
        elements += rows * (parameter.numel() // parameter.shape[0])
    return (world_size - 1) * elements * dtype.itemsize


def full_value(tensor: Tensor) -> float:
    """Read a scalar that may be spread over the ranks, such as a gradient norm."""
    return float(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)


def _device(name: str) -> torch.device:
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(f"device={name!r}: no GPU here. Wanted cpu or auto.")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device

"""Sections of ``scripts/gpu_check``: two processes on one device, exchanging over gloo."""

from __future__ import annotations

import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn

from gpu.sections import Skipped
from kernel_calls import assert_same_bits
from loco_fsdp import LoCoConfig, ResidualState, attach, compressed_reduce_scatter

CPU = torch.device("cpu")
RANKS = 2
GROUP_TIMEOUT = timedelta(seconds=60)


def check_reduce_scatter(device: torch.device, numel: int = 300_001, steps: int = 5) -> str:
    """``compressed_reduce_scatter`` with memory: the bits of the same exchange on the CPU."""
    _on_two_ranks(_reduce_scatters, device, numel, steps)
    return f"{steps} steps of {RANKS} x {numel} elements equal those on the CPU"


def check_fsdp2(device: torch.device, steps: int = 5) -> str:
    """``fully_shard`` and ``attach``: the gradients of the same training on the CPU."""
    _on_two_ranks(_fsdp2, device, steps)
    return f"gradients of {steps} steps equal those on the CPU"


def _on_two_ranks(function: Any, device: torch.device, *arguments: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (function, folder, device, *arguments), nprocs=RANKS)
        reason = Path(folder, "skipped")
        if reason.exists():
            raise Skipped(reason.read_text())


def _rank(rank: int, function: Any, folder: str, device: torch.device, *arguments: Any) -> None:
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=RANKS,
        timeout=GROUP_TIMEOUT,
    )
    try:
        function(device, *arguments)
    except Skipped as reason:
        Path(folder, "skipped").write_text(str(reason))
    dist.barrier()  # gloo may abort at exit if a rank leaves while the other still talks
    dist.destroy_process_group()


def _reduce_scatters(device: torch.device, numel: int, steps: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        _reduce_scatter(device, numel, steps, dtype)


def _reduce_scatter(device: torch.device, numel: int, steps: int, dtype: torch.dtype) -> None:
    config = LoCoConfig()
    sides = [(place, ResidualState(config)) for place in (device, CPU)]
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(steps):
        x = torch.randn(RANKS * numel, generator=generator).to(dtype)
        outputs = []
        for place, state in sides:
            output = torch.full((numel,), torch.nan, dtype=dtype, device=place)
            compressed_reduce_scatter(output, x.to(place), config=config, state=state)
            outputs.append(output.cpu())
        assert_same_bits(*outputs)
        assert_same_bits(*(state.dense().cpu() for _, state in sides))
        if step == 0 and not bool(outputs[0].isfinite().all()):
            raise AssertionError("The output of finite gradients is not finite.")


class Linear(nn.Module):
    """Its loss is a sum of products, so that the gradient is the input itself on every device."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 96))

    def forward(self, x: Tensor) -> Tensor:
        """A 0-d loss for ``x`` ``[64, 96]``."""
        return (self.weight * x).sum()


def _fsdp2(device: torch.device, steps: int) -> None:
    found, expected = (_gradients(place, steps) for place in (device, CPU))
    for ours, wanted in zip(found, expected, strict=True):
        assert_same_bits(ours, wanted)


def _gradients(device: torch.device, steps: int) -> list[Tensor]:
    model = Linear().to(device)
    sharded = fully_shard(model, mesh=init_device_mesh(device.type, (RANKS,)))
    try:
        sharded.unshard()
        sharded.reshard()
    except RuntimeError as error:
        words = " ".join(str(error).split())[:200]
        raise Skipped(f"FSDP2 cannot gather its parameters over gloo: {words}") from error
    handle = attach(model, LoCoConfig(min_numel=0))
    generator = torch.Generator().manual_seed(dist.get_rank())
    gradients = []
    for _ in range(steps):
        model(torch.randn(64, 96, generator=generator).to(device)).backward()
        gradient = model.weight.grad
        assert isinstance(gradient, DTensor)
        gradients.append(gradient.to_local().cpu())
        model.zero_grad()
    handle.detach()
    return gradients

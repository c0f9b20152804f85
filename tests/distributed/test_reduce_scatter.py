"""The distributed result is the single-process composition of the reference, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from loco_fsdp import LoCoConfig, ResidualState, compressed_reduce_scatter, reference
from rank_pool import RankPool

SIZES = (1, 15, 16, 129, 130 * 7, 2305, 50257 * 3)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CONFIGS = (
    LoCoConfig(),
    LoCoConfig(bits=8, block_size=16),
    LoCoConfig(feedback="classic", residual_dtype="float32"),
    LoCoConfig(feedback="none", block_size=18),
    LoCoConfig(residual_dtype="bfloat16", block_size=8192),
    LoCoConfig(scale="static", static_scale=2.0**5, static_residual_scale=2.0**8),
)


def gradient(rank: int, call: int, world_size: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + call)
    return torch.randn(world_size, numel, generator=generator).to(dtype)


def definition(
    world_size: int, numel: int, dtype: torch.dtype, config: LoCoConfig, factor: float, calls: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs ``[W][N]`` and residuals ``[W][W, N]`` after some calls, in one process."""
    states = [ResidualState(config) for _ in range(world_size)]
    residuals = [torch.zeros(world_size, numel) for _ in range(world_size)]
    outputs: list[Tensor] = []
    for call in range(calls):
        rows = []
        for rank in range(world_size):
            x = gradient(rank, call, world_size, numel, dtype)
            h = reference.compensate(x, residuals[rank])
            rows.append(reference.decompress(reference.compress(h, config), numel, config))
            if config.feedback != "none":
                new = reference.update_residual(residuals[rank], h, config)
                states[rank].load_dense(new)  # rounds to the residual's storage
                residuals[rank] = states[rank].dense()
        stacked = torch.stack(rows)  # [sender, receiver, N]
        outputs = [reference.reduce(stacked[:, r], factor).to(dtype) for r in range(world_size)]
    return outputs, residuals


def run_calls(sizes: tuple[int, ...], dtype: torch.dtype, config: LoCoConfig, op: Any) -> Any:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    results = []
    for numel in sizes:
        state = ResidualState(config)
        output = torch.full((numel,), torch.nan, dtype=dtype)
        for call in range(3):
            x = gradient(rank, call, world_size, numel, dtype)
            compressed_reduce_scatter(output, x, op=op, config=config, state=state)
        dense = None if config.feedback == "none" or world_size == 1 else state.dense()
        results.append((output, dense))
    return results


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.scale}{c.bits}-{c.feedback}")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_equals_definition(
    ranks: RankPool, world_size: int, dtype: torch.dtype, config: LoCoConfig
) -> None:
    sizes = SIZES if config == LoCoConfig() else SIZES[:-1]
    results = ranks.run(run_calls, world_size, sizes, dtype, config, dist.ReduceOp.AVG)
    for index, numel in enumerate(sizes):
        outputs, residuals = definition(world_size, numel, dtype, config, 1 / world_size, 3)
        for rank in range(world_size):
            output, dense = results[rank][index]
            assert torch.equal(output, outputs[rank]), (numel, rank)
            if dense is not None:
                assert torch.equal(dense, residuals[rank]), (numel, rank)

"""The GPU backend: the Triton kernels of ``loco_fsdp_kernels``."""

from __future__ import annotations

import torch
from torch import Tensor

import loco_fsdp_kernels
from loco_fsdp.codecs import static_step
from loco_fsdp.config import LoCoConfig
from loco_fsdp.tiles import TileTable

SCALES = ("block", "static")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tile_blocks(block_size: int, device: torch.device) -> int:
    """Blocks in a tile, the work of one program."""
    return loco_fsdp_kernels.tile_blocks_for(block_size, device)


def compress(
    x: Tensor,
    table: TileTable,
    payload: Tensor,
    residual: Tensor | None,
    residual_steps: Tensor | None,
    nonfinite: Tensor,
    errors: Tensor | None,
    loss_scale: Tensor | None,
    config: LoCoConfig,
) -> None:
    """See ``kernels.compress``."""
    is_static = config.scale == "static"
    loco_fsdp_kernels.compress(
        x,
        table.segments,
        table.tiles,
        payload,
        residual,
        residual_steps,
        nonfinite,
        errors,
        loss_scale,
        bits=config.bits,
        block_size=config.block_size,
        code_step=static_step(config.static_scale) if is_static else None,
        residual_step=static_step(config.static_residual_scale) if is_static else None,
        gain=config.gain,
        tile_blocks=table.tile_blocks,
        aligned=table.aligned,
    )


def reduce(
    payload: Tensor,
    table: TileTable,
    output: Tensor,
    values_dtype: torch.dtype,
    factor: float,
    config: LoCoConfig,
) -> None:
    """See ``kernels.reduce``."""
    loco_fsdp_kernels.reduce(
        payload,
        table.segments,
        table.tiles,
        output,
        bits=config.bits,
        block_size=config.block_size,
        factor=factor,
        tile_blocks=table.tile_blocks,
        aligned=table.aligned,
        values_dtype=values_dtype,
    )

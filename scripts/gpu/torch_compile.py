"""The operations by ``torch.compile``, on chunks of a fixed shape: what the CPU backend could be.

It is measured, not used: its code is slower than the loops of numba, and it joins products and
sums, which makes other bits. One segment of whole chunks only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from loco_fsdp import LoCoConfig
from loco_fsdp.codecs import BlockCodec, pack, unpack
from loco_fsdp.feedback import next_residual
from loco_fsdp.payload import PayloadLayout, single_segment
from loco_fsdp.tiles import Column, TileTable

OPTIONS: Any = {"emulate_precision_casts": True}
"""A step is rounded to bfloat16 and back; without this, that is left out."""
CHUNK_BLOCKS = 2048
"""Blocks of 128 in a chunk; 256 and 16384 took as long or longer on 2 Xeon cores."""


def tile_blocks(block_size: int, device: torch.device) -> int:
    """Blocks in a tile, here a chunk."""
    return CHUNK_BLOCKS


def compress(
    x: Tensor,
    table: TileTable,
    payload: Tensor,
    residual: Tensor,
    residual_steps: Tensor,
    nonfinite: Tensor,
    errors: None,
    loss_scale: None,
    config: LoCoConfig,
) -> None:
    """See ``kernels.compress``; with memory, without measuring, without a loss scale."""
    layout, blocks = _layout(table, config), int(table.segments[0, Column.BLOCKS])
    packed = layout.codes(payload, 0).unflatten(1, (blocks, -1))
    steps = layout.steps(payload, 0)
    codes = residual.unflatten(0, (x.shape[0], blocks))
    memory_steps = residual_steps.unflatten(0, (x.shape[0], blocks))
    for row in range(x.shape[0]):
        for first in range(0, blocks, CHUNK_BLOCKS):
            at = row, slice(first, first + CHUNK_BLOCKS)
            h = x[row].unflatten(0, (blocks, -1))[at[1]]
            results = _compress_chunk(h, codes[at], memory_steps[at], config.bits, config.gain)
            for tensor, part in zip((packed, steps, codes, memory_steps), results, strict=True):
                tensor[at] = part


def reduce(
    payload: Tensor,
    table: TileTable,
    output: Tensor,
    values_dtype: torch.dtype,
    factor: float,
    config: LoCoConfig,
) -> None:
    """See ``kernels.reduce``."""
    layout, blocks = _layout(table, config), int(table.segments[0, Column.BLOCKS])
    packed = layout.codes(payload, 0).unflatten(1, (blocks, -1))
    out = output.unflatten(0, (blocks, -1))
    for first in range(0, blocks, CHUNK_BLOCKS):
        at = slice(first, first + CHUNK_BLOCKS)
        out[at] = _reduce_chunk(
            packed[:, at], layout.steps(payload, 0)[:, at], factor, config.bits, output.dtype
        )


@torch.compile(fullgraph=True, dynamic=False, options=OPTIONS)
def _compress_chunk(x: Tensor, codes: Tensor, steps: Tensor, bits: int, gain: float) -> Any:
    wire, memory = BlockCodec(bits), BlockCodec(8)
    e = memory.decode(codes, steps)
    h = x.float() + e
    h_codes, h_steps = wire.encode(h)
    new = next_residual(e, h - wire.decode(h_codes, h_steps), gain)
    good = new.isfinite().all(-1)
    new_codes, new_steps = memory.encode(new)
    return (
        pack(h_codes, bits),
        h_steps.to(steps.dtype),
        torch.where(good.unsqueeze(-1), new_codes, codes),
        torch.where(good, new_steps.to(steps.dtype), steps),
    )


@torch.compile(fullgraph=True, dynamic=False, options=OPTIONS)
def _reduce_chunk(
    packed: Tensor, steps: Tensor, factor: float, bits: int, dtype: torch.dtype
) -> Tensor:
    codec = BlockCodec(bits)
    total = codec.decode(unpack(packed[0], bits), steps[0])
    for row in range(1, packed.shape[0]):
        total = total + codec.decode(unpack(packed[row], bits), steps[row])
    return (total * factor).to(dtype)


def _layout(table: TileTable, config: LoCoConfig) -> PayloadLayout:
    return single_segment(config, int(table.segments[0, Column.NUMEL]))

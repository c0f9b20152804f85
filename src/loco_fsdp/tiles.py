"""The work of one exchange as a table of tiles, which a backend goes through in one call.

A tile is up to ``tile_blocks`` consecutive blocks of one segment in one row. All rows have the
same tiles, so the table describes one row.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import torch
from torch import Tensor

from loco_fsdp import _torch
from loco_fsdp.payload import PayloadLayout

WIDE = 16  # elements; starts that are multiples of it allow the widest loads of every dtype


class Column(IntEnum):
    """Columns of the segment table. Its numbers are the kernels' too: change both."""

    START = 0
    """First element in a row of the gradient, and in the output."""
    NUMEL = 1
    """Elements in a row."""
    DATA = 2
    """First byte of its codes, or of its values, in a payload row."""
    STEPS = 3
    """Its first step in a payload row, counted in bfloat16 elements."""
    FORM = 4
    """See ``Form``."""
    RESIDUAL = 5
    """Its first block, that of row 0, in the residual buffer; -1: it is sent without memory."""
    FIRST_TILE = 6
    """Its first tile in a row."""
    BLOCKS = 7
    """Blocks in a row; the last may be short."""


class Form(IntEnum):
    """How a segment travels."""

    VALUES = 0
    """Uncompressed, in the gradient's dtype."""
    BLOCK_STEPS = 1
    """As codes with a step a block."""
    ROW_STEP = 2
    """As codes with one step for the row."""


@dataclass(frozen=True)
class TileTable:
    """What a backend is told about one exchange."""

    segments: Tensor
    """int64 ``[S, 8]``, see ``Column``: the segments that lie in the gradient buffer."""
    tiles: Tensor
    """int32 ``[T]``: row number in ``segments`` of each tile."""
    tile_blocks: int
    aligned: bool
    """Every start is a multiple of ``WIDE`` elements, and every half block too."""


@lru_cache(maxsize=4096)
def tile_table(
    layout: PayloadLayout,
    residual_blocks: tuple[int, ...],
    tile_blocks: int,
    device: torch.device,
) -> TileTable:
    """Return the table of one exchange; it is kept, so that later steps copy nothing.

    Args:
        layout: where everything lies.
        residual_blocks: first block of each segment in the residual buffer, or -1 for none.
        tile_blocks: blocks in a tile.
        device: of the gradient.

    """
    rows: list[list[int]] = []
    owners: list[int] = []
    first_tile = 0
    for index, segment in enumerate(layout.segments):
        if segment.start is None or segment.numel == 0:
            continue
        slot, blocks = layout.slots[index], layout.num_blocks(segment)
        form, residual = Form.VALUES, -1
        if segment.compressed:
            form = Form.BLOCK_STEPS if layout.config.scale == "block" else Form.ROW_STEP
            residual = residual_blocks[index]
        steps = slot.steps.start // torch.bfloat16.itemsize
        row = [segment.start, segment.numel, slot.data.start, steps, form, residual]
        num_tiles = -(-blocks // tile_blocks)
        owners += [len(rows)] * num_tiles
        rows.append([*row, first_tile, blocks])
        first_tile += num_tiles
    with _torch.outside_modes():
        segments = torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(-1, len(Column))
        tiles = torch.tensor(owners, dtype=torch.int32, device="cpu")
        segments, tiles = segments.to(device), tiles.to(device)
    starts = (row[c] for row in rows for c in (Column.START, Column.NUMEL, Column.DATA))
    aligned = layout.config.block_size % (2 * WIDE) == 0 and all(n % WIDE == 0 for n in starts)
    return TileTable(segments, tiles, tile_blocks, aligned)

"""The table of segments, as the kernels read it, and segments that travel uncompressed.

Its columns are those of ``Column`` and ``Form`` in ``loco_fsdp.tiles``: change both.
"""

from __future__ import annotations

import triton
import triton.language as tl

COLUMNS = tl.constexpr(8)
VALUES = tl.constexpr(0)
ROW_STEP = tl.constexpr(2)


@triton.jit
def load_segment(
    segments: tl.tensor, tiles: tl.tensor, tile: tl.tensor, TILE_BLOCKS: tl.constexpr
) -> tl.tensor:
    """Return the columns of the segment of a tile, and the tile's first block in it. All int64."""
    segment = segments + tl.load(tiles + tile).to(tl.int64) * COLUMNS
    start = tl.load(segment)
    numel = tl.load(segment + 1)
    data = tl.load(segment + 2)
    steps = tl.load(segment + 3)
    form = tl.load(segment + 4)
    residual = tl.load(segment + 5)
    first_block = (tile - tl.load(segment + 6)) * TILE_BLOCKS
    blocks = tl.load(segment + 7)
    return start, numel, data, steps, form, residual, first_block, blocks


@triton.jit
def wide(offset: tl.tensor, ALIGNED: tl.constexpr) -> tl.tensor:
    """Make plain to the compiler that an offset is a multiple of 16, if so: for wide accesses.

    A ``tl.multiple_of`` on the offset of row 0 is lost when its addition is folded away.
    """
    if ALIGNED:
        offset = (offset >> 4) << 4
    return offset


@triton.jit
def element_masks(
    column: tl.tensor,
    block: tl.tensor,
    left: tl.tensor,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
) -> tl.tensor:
    """Return offsets in the tile of the first halves' elements, and which of each half exist.

    Args:
        column: int32 ``[1, HALF_PADDED]``, in the half.
        block: int32 ``[K, 1]``, in the tile.
        left: int32, elements of the row from the tile's first on.

    """
    offset = block * BLOCK + column
    low, high = offset < left, offset + HALF < left
    if HALF != HALF_PADDED:
        low, high = low & (column < HALF), high & (column < HALF)
    return offset, low, high

"""Unpack, decode and sum the received rows in rank order, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loco_fsdp_kernels.blocks import (
    INFINITY_BITS,
    NAN_BFLOAT16,
    code_value,
    magnitude_bits,
    round_to_bfloat16,
    to_float32,
)
from loco_fsdp_kernels.segments import ROW_STEP, VALUES, element_masks, load_segment, wide

VALUE_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.int16}


@triton.jit(do_not_specialize=["row_bytes"])
def reduce_kernel(
    payload: tl.tensor,
    segments: tl.tensor,
    tiles: tl.tensor,
    output: tl.tensor,
    row_bytes: tl.tensor,
    factor: tl.tensor,
    ROWS: tl.constexpr,
    VALUE_TYPE: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """One program: one tile of all rows. See ``loco_fsdp_kernels.reduce``.

    A bfloat16 output comes as int16. ``VALUE_TYPE``: one of ``VALUE_TYPES``, of the uncompressed
    segments. W is a constant so that the compiler can request several rows at once.
    """
    HALF: tl.constexpr = BLOCK // 2
    HALF_RANGE: tl.constexpr = 2 ** (BITS - 1)
    CODE_BYTES: tl.constexpr = BLOCK * BITS // 8
    start, numel, data, step_start, form, _, first_block, blocks = load_segment(
        segments, tiles, tl.program_id(0), TILE_BLOCKS
    )
    first = first_block * BLOCK
    left = wide(tl.minimum(numel - first, TILE_BLOCKS * BLOCK).to(tl.int32), ALIGNED)
    target = output + wide(start + first, ALIGNED)
    source = payload + wide(data, ALIGNED)
    row_stride = wide(row_bytes.to(tl.int64), True)

    if form == VALUES:
        place = tl.arange(0, TILE_BLOCKS * HALF_PADDED * 2)
        total = tl.zeros([TILE_BLOCKS * HALF_PADDED * 2], tl.float32)
        for row in tl.range(0, ROWS):
            values = (source + row * row_stride).to(tl.pointer_type(VALUE_TYPE)) + first
            total += to_float32(tl.load(values + place, mask=place < left, other=0))
        tl.store(target + place, from_float32(total * factor, output), mask=place < left)
    else:
        block = tl.arange(0, TILE_BLOCKS)
        exists = block < blocks - first_block
        column = tl.arange(0, HALF_PADDED)[None, :]
        mask = exists[:, None] & (column < HALF)
        low = tl.zeros([TILE_BLOCKS, HALF_PADDED], tl.float32)
        high = tl.zeros([TILE_BLOCKS, HALF_PADDED], tl.float32)
        codes = source + first_block * CODE_BYTES + (block[:, None] * CODE_BYTES + column)
        step = payload.to(tl.pointer_type(tl.int16)) + step_start
        step = step + tl.where(form == ROW_STEP, 0, first_block + block)
        for row in tl.range(0, ROWS, loop_unroll_factor=4 if ALIGNED else 1):
            received = codes + row * row_stride
            packed = tl.load(received, mask=mask, other=0).to(tl.int32)
            steps = to_float32(tl.load(step + row * (row_stride // 2), mask=exists, other=0))
            # A code times a step is exact, so the fused product and sum are the plain ones.
            if BITS == 4:
                low = tl.fma(code_value(packed & 0xF, HALF_RANGE), steps[:, None], low)
                high = tl.fma(code_value(packed >> 4, HALF_RANGE), steps[:, None], high)
            else:
                upper = tl.load(received + HALF, mask=mask, other=0).to(tl.int32)
                low = tl.fma(code_value(packed, HALF_RANGE), steps[:, None], low)
                high = tl.fma(code_value(upper, HALF_RANGE), steps[:, None], high)
        offset, low_mask, high_mask = element_masks(
            column, block[:, None], left, BLOCK, HALF, HALF_PADDED
        )
        tl.store(target + offset, from_float32(low * factor, output), mask=low_mask)
        tl.store(target + HALF + offset, from_float32(high * factor, output), mask=high_mask)


@triton.jit
def from_float32(value: tl.tensor, output: tl.tensor) -> tl.tensor:
    """Round to the dtype of ``output``; bfloat16 as int16."""
    if output.dtype.element_ty == tl.int16:
        is_nan = magnitude_bits(value) > INFINITY_BITS
        value = tl.where(is_nan, NAN_BFLOAT16, round_to_bfloat16(value))
    return value.to(output.dtype.element_ty)

"""Compensate, encode, pack, and update the residual, in one pass over the gradient."""

from __future__ import annotations

import triton
import triton.language as tl

from loco_fsdp_kernels.blocks import (
    INFINITY_BITS,
    NAN_BFLOAT16,
    block_steps,
    encode,
    inverse_of,
    largest_bits,
    to_float32,
)
from loco_fsdp_kernels.residuals import load_residual, store_residual
from loco_fsdp_kernels.segments import VALUES, element_masks, load_segment, wide


@triton.jit(do_not_specialize=["row_stride", "row_bytes", "tiles_per_row"])
def compress_kernel(  # noqa: PLR0915
    x: tl.tensor,
    segments: tl.tensor,
    tiles: tl.tensor,
    payload: tl.tensor,
    residual: tl.tensor,
    residual_steps: tl.tensor,
    nonfinite: tl.tensor,
    errors: tl.tensor,
    loss_scale: tl.tensor,
    row_stride: tl.tensor,
    row_bytes: tl.tensor,
    tiles_per_row: tl.tensor,
    code_step: tl.tensor,
    residual_step: tl.tensor,
    gain: tl.tensor,
    rest: tl.tensor,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """One program: one tile of one row. See ``loco_fsdp_kernels.compress``.

    bfloat16 tensors come as int16. ``rest`` is ``1 - gain``. None stands for what is not there.
    """
    HALF: tl.constexpr = BLOCK // 2
    CODE_BYTES: tl.constexpr = BLOCK * BITS // 8
    program = tl.program_id(0)
    tile = program % tiles_per_row
    row = (program // tiles_per_row).to(tl.int64)
    start, numel, data, step_start, form, residual_start, first_block, blocks = load_segment(
        segments, tiles, tile, TILE_BLOCKS
    )
    first = first_block * BLOCK
    left = wide(tl.minimum(numel - first, TILE_BLOCKS * BLOCK).to(tl.int32), ALIGNED)
    source = x + wide(row * row_stride + start + first, ALIGNED)
    target = payload + wide(row * row_bytes + data, ALIGNED)
    if errors is not None:
        figures = errors + program.to(tl.int64) * 2

    if form == VALUES:
        place = tl.arange(0, TILE_BLOCKS * HALF_PADDED * 2)
        values = tl.load(source + place, mask=place < left)
        tl.store(target.to(x.dtype) + first + place, values, mask=place < left)
        if errors is not None:
            tl.store(figures + tl.arange(0, 2), 0.0)
    else:
        block = tl.arange(0, TILE_BLOCKS)
        exists = block < blocks - first_block
        column = tl.arange(0, HALF_PADDED)[None, :]
        mask = exists[:, None] & (column < HALF)
        offset, low_mask, high_mask = element_masks(
            column, block[:, None], left, BLOCK, HALF, HALF_PADDED
        )
        low = to_float32(tl.load(source + offset, mask=low_mask, other=0))
        high = to_float32(tl.load(source + HALF + offset, mask=high_mask, other=0))
        if residual is not None:
            # Blocks are whole here: their padding is 0, and comes out as 0.
            old_block = residual_start + row * blocks + first_block
            old = residual + old_block * BLOCK + offset
            old_steps = residual_steps + old_block + block if residual_steps is not None else None
            kept = exists & (residual_start >= 0)
            kept_mask = mask & (residual_start >= 0)
            e_low, e_high = load_residual(old, old_steps, residual_step, kept_mask, kept, HALF)
            low += scaled(e_low, loss_scale, kept_mask)
            high += scaled(e_high, loss_scale, kept_mask)

        largest = largest_bits(low, high)
        good = largest < INFINITY_BITS
        bad = exists & (largest >= INFINITY_BITS)
        if errors is not None:
            tl.store(figures + 1, square_sum(low, high, good[:, None]))
        steps = block_steps(low, high, column, largest, code_step, BITS, HALF)
        inverse = inverse_of(steps)[:, None]
        low_value, low_code = encode(low, steps[:, None], inverse, BITS, code_step is None)
        high_value, high_code = encode(high, steps[:, None], inverse, BITS, code_step is None)
        codes = target + first_block * CODE_BYTES + (block[:, None] * CODE_BYTES + column)
        store_codes(codes, low_code, high_code, bad[:, None], mask, BITS, HALF)
        row_steps = payload.to(tl.pointer_type(tl.int16)) + (row * (row_bytes // 2) + step_start)
        if code_step is None:
            step_bits = tl.where(bad, NAN_BFLOAT16, steps.to(tl.int32, bitcast=True) >> 16)
            tl.store(row_steps + first_block + block, step_bits.to(tl.int16), mask=exists)
        else:
            # The step is there already; one bad block spoils it for the whole row.
            tl.store(row_steps + block * 0, NAN_BFLOAT16, mask=bad)
        tl.atomic_add(nonfinite + block * 0, 1, mask=bad, sem="relaxed")

        # A code times a step is exact, so the fused product and sum are the plain ones.
        low_error = tl.fma(low_value, steps[:, None] * -1.0, low)
        high_error = tl.fma(high_value, steps[:, None] * -1.0, high)
        if errors is not None:
            tl.store(figures, square_sum(low_error, high_error, good[:, None]))
        if residual is not None:
            low = e_low * rest + unscaled(low_error, loss_scale) * gain
            high = e_high * rest + unscaled(high_error, loss_scale) * gain
            kept = kept & good
            store_residual(old, old_steps, residual_step, low, high, column, kept_mask, kept, HALF)


@triton.jit
def scaled(e: tl.tensor, loss_scale: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """``e`` in the units of the gradient; ``loss_scale`` is a pointer or None.

    0 where masked, also if the scale is infinite.
    """
    if loss_scale is not None:
        e = tl.where(mask, e * tl.load(loss_scale), 0.0)
    return e


@triton.jit
def unscaled(error: tl.tensor, loss_scale: tl.tensor) -> tl.tensor:
    """``error`` in the units of the residual."""
    if loss_scale is not None:
        error = error * tl.div_rn(1.0, tl.load(loss_scale))
    return error


@triton.jit
def store_codes(
    codes: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    bad: tl.tensor,
    mask: tl.tensor,
    BITS: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    """Pack and store codes, 0 in bad blocks.

    Args:
        codes: pointers ``[K, HALF]`` to bytes, those of the first half with 8 bits.
        low: int32 ``[K, HALF]``, codes of the first halves in the low byte.
        high: of the second halves.
        bad: ``[K, 1]``.
        mask: ``[K, HALF]``, what to store.
        BITS: of a code.
        HALF: elements in half a block.

    """
    if BITS == 4:
        packed = tl.where(bad, 0, (low & 0xF) | (high << 4))
        tl.store(codes, packed.to(tl.uint8), mask=mask)
    else:
        tl.store(codes, tl.where(bad, 0, low).to(tl.uint8), mask=mask)
        tl.store(codes + HALF, tl.where(bad, 0, high).to(tl.uint8), mask=mask)


@triton.jit
def square_sum(low: tl.tensor, high: tl.tensor, good: tl.tensor) -> tl.tensor:
    """Sum of squares over the good blocks, float64."""
    low = tl.where(good, low, 0.0).to(tl.float64)
    high = tl.where(good, high, 0.0).to(tl.float64)
    return tl.sum(low * low + high * high)

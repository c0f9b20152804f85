"""Reading and writing tiles of the residual, in each of its storages.

The storage is told by the dtype: int8 codes (with a step a block, or one constant step), bfloat16
(as int16), float32. Halves of blocks as in ``blocks``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loco_fsdp_kernels.blocks import (
    INFINITY_BITS,
    LARGEST_BFLOAT16,
    block_steps,
    code_value,
    encode,
    inverse_of,
    largest_bits,
    round_to_bfloat16,
    to_float32,
)


@triton.jit
def load_residual(
    halves: tl.tensor,
    steps: tl.tensor,
    constant_step: tl.tensor,
    mask: tl.tensor,
    exists: tl.tensor,
    HALF: tl.constexpr,
) -> tl.tensor:
    """Return the float32 halves ``[K, HALF]``; 0 where masked.

    Args:
        halves: pointers ``[K, HALF]`` to the first half of each block.
        steps: pointers ``[K]`` to the step of each block; None if there are none.
        constant_step: float, the step of all blocks; None if each has its own.
        mask: ``[K, HALF]``, what to read.
        exists: ``[K]``, which blocks to read.
        HALF: elements in half a block.

    """
    low = tl.load(halves, mask=mask, other=0)
    high = tl.load(halves + HALF, mask=mask, other=0)
    if low.dtype == tl.int8:
        if constant_step is None:
            used = to_float32(tl.load(steps, mask=exists, other=0))[:, None]
        else:
            used = constant_step
        low = code_value(low.to(tl.int32) & 0xFF, 128) * used
        high = code_value(high.to(tl.int32) & 0xFF, 128) * used
    return to_float32(low), to_float32(high)


@triton.jit
def store_residual(
    halves: tl.tensor,
    steps: tl.tensor,
    constant_step: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    column: tl.tensor,
    mask: tl.tensor,
    exists: tl.tensor,
    HALF: tl.constexpr,
) -> None:
    """Store float32 halves, except blocks that hold a NaN or an infinity: they keep the old.

    Arguments as in ``load_residual``; ``column`` as in ``block_steps``.
    """
    largest = largest_bits(low, high)
    finite = exists & (largest < INFINITY_BITS)
    mask = mask & finite[:, None]
    kind: tl.constexpr = halves.dtype.element_ty
    if kind == tl.int8:
        used = block_steps(low, high, column, largest, constant_step, 8, HALF)
        if constant_step is None:
            tl.store(steps, (used.to(tl.int32, bitcast=True) >> 16).to(tl.int16), mask=finite)
        inverse = inverse_of(used)[:, None]
        _, low_code = encode(low, used[:, None], inverse, 8, constant_step is None)
        _, high_code = encode(high, used[:, None], inverse, 8, constant_step is None)
        tl.store(halves, low_code.to(tl.int8), mask=mask)
        tl.store(halves + HALF, high_code.to(tl.int8), mask=mask)
    elif kind == tl.int16:
        low = tl.minimum(tl.maximum(low, -LARGEST_BFLOAT16), LARGEST_BFLOAT16)
        high = tl.minimum(tl.maximum(high, -LARGEST_BFLOAT16), LARGEST_BFLOAT16)
        tl.store(halves, round_to_bfloat16(low).to(tl.int16), mask=mask)
        tl.store(halves + HALF, round_to_bfloat16(high).to(tl.int16), mask=mask)
    else:
        tl.store(halves, low, mask=mask)
        tl.store(halves + HALF, high, mask=mask)

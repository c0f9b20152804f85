"""Device functions on tiles of blocks: numbers to bits and back, with the bits of the reference.

A tile is held as two halves ``[K, B / 2]``, elements 0 to B/2 - 1 of its K blocks and the others,
because that is how 4-bit codes are packed: no element ever has to change threads.

Everything here gives the same bits with and without fused multiply-add; ``tl.fma`` is called only
where the product is exact, or where the proof beside it allows both roundings.
"""

from __future__ import annotations

import triton
import triton.language as tl

INFINITY_BITS = tl.constexpr(0x7F800000)  # of float32; a larger magnitude is a NaN
NAN_BFLOAT16 = tl.constexpr(0x7FC0)
SMALLEST_NORMAL_BITS = tl.constexpr(0x00800000)
LARGEST_BFLOAT16 = tl.constexpr(3.3895313892515355e38)


@triton.jit
def to_float32(raw: tl.tensor) -> tl.tensor:
    """Widen float32, float16 or bfloat16; the last one comes as its bits, in int16.

    The interpreter has no bfloat16 arithmetic, and as integers all devices agree.
    """
    if raw.dtype == tl.int16:
        raw = (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return raw.to(tl.float32)


@triton.jit
def round_to_bfloat16(value: tl.tensor) -> tl.tensor:
    """Bits of the nearest bfloat16, ties to even, in an int32; NaN gives anything."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@triton.jit
def code_value(raw: tl.tensor, HALF_RANGE: tl.constexpr) -> tl.tensor:
    """Code in the low bits of an int32 (the others are 0) as float32.

    With its sign bit flipped it is code + HALF_RANGE; as low bits of the float32 2^23 that is
    2^23 + HALF_RANGE + code. Cheaper than sign extension and conversion.
    """
    shifted = (raw ^ (0x4B000000 + HALF_RANGE)).to(tl.float32, bitcast=True)
    return shifted - (8388608.0 + HALF_RANGE)


@triton.jit
def magnitude_bits(value: tl.tensor) -> tl.tensor:
    """Bits of the absolute value of a float32, which order as it does, infinity and NaN on top."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def largest_bits(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """Largest ``magnitude_bits`` of each block, ``[K]``."""
    return tl.max(tl.maximum(magnitude_bits(low), magnitude_bits(high)), axis=1)


@triton.jit
def block_steps(
    low: tl.tensor,
    high: tl.tensor,
    column: tl.tensor,
    largest: tl.tensor,
    constant_step: tl.tensor,
    BITS: tl.constexpr,
    HALF: tl.constexpr,
) -> tl.tensor:
    """Step of each block, float32 ``[K]``; for blocks that are not finite, any.

    Args:
        low: float32 ``[K, HALF]``, first half of each block.
        high: its second half.
        column: int32 ``[1, HALF]``, 0, 1, 2 and so on.
        largest: their ``largest_bits``.
        constant_step: float, the step of all blocks; None: each its own, as in ``BlockCodec``.
        BITS: of a code.
        HALF: elements in half a block.

    """
    HALF_RANGE: tl.constexpr = 2 ** (BITS - 1)
    TOP: tl.constexpr = LARGEST_BFLOAT16 / HALF_RANGE
    if constant_step is not None:
        steps = tl.full(largest.shape, constant_step, tl.float32)
    else:
        # The first of the largest decides the sign. Its place is 2 * index, + 1 if negative.
        low_place = 2 * column - (low.to(tl.int32, bitcast=True) >> 31)
        high_place = 2 * (column + HALF) - (high.to(tl.int32, bitcast=True) >> 31)
        place = tl.where(magnitude_bits(high) == largest[:, None], high_place, 4 * HALF)
        place = tl.where(magnitude_bits(low) == largest[:, None], low_place, place)
        sign = tl.min(place, axis=1) << 31
        extreme = (largest | sign).to(tl.float32, bitcast=True)
        bits = round_to_bfloat16(extreme * (-1.0 / HALF_RANGE)) << 16
        # Steps below the smallest normal float32 are 0 on every device.
        bits = tl.where((bits & 0x7FFFFFFF) < SMALLEST_NORMAL_BITS, 0, bits)
        steps = bits.to(tl.float32, bitcast=True)
        # Rounding up to bfloat16 must not push the decoded extreme over the float32 range.
        steps = tl.minimum(tl.maximum(steps, -TOP), TOP)
    return steps


@triton.jit
def inverse_of(steps: tl.tensor) -> tl.tensor:
    """``1 / steps``, 0 for 0: so that everything divided by a step of 0 gets the code 0."""
    return tl.where(steps == 0.0, 0.0, tl.div_rn(1.0, tl.where(steps == 0.0, 1.0, steps)))


@triton.jit
def encode(
    h: tl.tensor, steps: tl.tensor, inverse: tl.tensor, BITS: tl.constexpr, IN_RANGE: tl.constexpr
) -> tl.tensor:
    """``clamp(round_half_even(h / steps))``, twice: as float32, and in the low byte of an int32.

    ``inverse``: of ``inverse_of``. ``IN_RANGE``: h is about within the range of the codes.

    No division is needed, because a step has 8 significant bits and a half-integer k + 1/2 in
    range at most 8, so their product is exact. ``near`` is a multiple of 1/2 within about 1/4 of
    the quotient; ``h - near * steps`` is then exact, and ``exact`` lies on the side of k + 1/2, or
    on it, where the quotient lies: the two differ by more than half a unit in the last place
    unless h is (k + 1/2) * steps. Adding and taking away 1.5 * 2^23 (1.5 * 2^22) rounds
    to integers (multiples of 1/2), ties to even.
    """
    HALF_RANGE: tl.constexpr = 2 ** (BITS - 1)
    guess = h * inverse
    if not IN_RANGE:
        guess = tl.minimum(tl.maximum(guess, -HALF_RANGE - 1.0), HALF_RANGE + 1.0)
    near = (guess + 6291456.0) - 6291456.0
    exact = tl.fma(tl.fma(near, steps * -1.0, h), inverse, near)
    shifted = tl.minimum(tl.maximum(exact, -HALF_RANGE * 1.0), HALF_RANGE - 1.0) + 12582912.0
    return shifted - 12582912.0, shifted.to(tl.int32, bitcast=True)

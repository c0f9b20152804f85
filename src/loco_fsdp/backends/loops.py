"""The CPU kernels as loops, compiled by numba at their first call and kept on disk.

Everything that is compiled is in this file, since numba compiles anew when the file changes, and
only then. Gradients come as the integers that hold their bits: ``bits << shift`` is a float32,
with shift 0 for float32 (int32) and 16 for bfloat16 (uint16). No fast math and no fused
multiply-add, so that the results are the reference's bit for bit.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from loco_fsdp.tiles import Form

F32, I32, U64 = np.float32, np.int32, np.uint64
MAGNITUDE = np.int32(2**31 - 1)
SIGN = np.int32(-(2**31))
INFINITY_BITS = np.int32(0x7F800000)
NAN_BFLOAT16 = np.uint16(0x7FC0)
LARGEST_BFLOAT16 = F32(3.3895313892515355e38)
SMALLEST_NORMAL = F32(2.0**-126)
RESIDUAL_HALF_RANGE = F32(128.0)
GROUP_NUMEL = 1024  # worked on together, so that one block's arithmetic hides another's latency
VALUES, BLOCK_STEPS = int(Form.VALUES), int(Form.BLOCK_STEPS)

Array = NDArray[Any]  # of float32, or of the integers that hold bits
Scalar = Any  # float32, a place in an array (uint64), or bits


def jit(function: Any) -> Any:
    """Compile at the first call; keep the result on disk if there is a folder for it."""
    options: Any = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no folder can be written: each process compiles for itself
        return numba.njit(**options)(function)


def _bitcast(source: Any, target: Any) -> Any:
    def cast(typing_context: Any, value: Scalar) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], context.get_value_type(target))

        return target(source), generate

    return intrinsic(cast)


as_float = _bitcast(types.int32, types.float32)
as_bits = _bitcast(types.float32, types.int32)


@jit
def round_to_bfloat16(value: Scalar) -> Scalar:
    """Bits of ``value`` rounded half to even to a bfloat16, as uint16; one NaN for all."""
    bits = as_bits(value)
    if bits & MAGNITUDE > INFINITY_BITS:
        return NAN_BFLOAT16
    return np.uint16((bits + I32(0x7FFF) + ((bits >> I32(16)) & I32(1))) >> I32(16))


@jit
def as_bfloat16(bits: Scalar) -> Scalar:
    """The bfloat16 that has these bits, as float32."""
    return as_float(I32(bits) << I32(16))


@jit
def read_floats(source: Array, at: Scalar, count: int, shift: int, out: Array) -> None:
    """``count`` floats from ``source[at]`` on, in order; the rest of ``out`` becomes 0."""
    flat = out.reshape(-1)
    if shift == 0:
        for i in range(count):
            flat[i] = as_float(I32(source[at + U64(i)]))
    else:
        for i in range(count):
            flat[i] = as_bfloat16(source[at + U64(i)])
    for i in range(count, flat.size):
        flat[i] = F32(0.0)


@jit
def write_floats(values: Array, out: Array, at: Scalar, count: int, shift: int) -> None:
    """The first ``count`` of ``values`` to ``out[at]`` and on."""
    flat = values.reshape(-1)
    if shift == 0:
        for i in range(count):
            out[at + U64(i)] = as_bits(flat[i])
    else:
        for i in range(count):
            out[at + U64(i)] = round_to_bfloat16(flat[i])


@jit
def is_finite(value: Scalar) -> Scalar:
    """Neither NaN nor infinite."""
    return as_bits(value) & MAGNITUDE < INFINITY_BITS


@jit
def signed_extremes(blocks: Array, extremes: Array) -> None:
    """Per block, the first element of largest magnitude; some NaN if it holds one."""
    for k in range(blocks.shape[0]):
        # As signed integers the largest positive float is largest, as unsigned the most negative.
        signed, unsigned = I32(0), np.uint32(0)
        for i in range(blocks.shape[1]):
            bits = as_bits(blocks[k, i])
            signed = max(signed, bits)
            unsigned = max(unsigned, np.uint32(bits))
        negative = I32(unsigned & np.uint32(MAGNITUDE)) if unsigned >> 31 else I32(0)
        extreme = as_float(signed if signed > negative else negative | SIGN)
        if signed == negative:
            for i in range(blocks.shape[1]):
                if as_bits(blocks[k, i]) & MAGNITUDE == signed:
                    extreme = blocks[k, i]
                    break
        extremes[k] = extreme


@jit
def block_step(extreme: Scalar, half_range: Scalar) -> Scalar:
    """``-extreme / half_range`` as a bfloat16, by the rules of ``BlockCodec``."""
    step = as_bfloat16(round_to_bfloat16(extreme / -half_range))
    largest = LARGEST_BFLOAT16 / half_range
    step = min(max(step, -largest), largest)
    return F32(0.0) if abs(step) < SMALLEST_NORMAL else step


@jit
def choose_steps(blocks: Array, half_range: Scalar, static_step: Scalar, steps: Array) -> int:
    """Steps of blocks, NaN for those that are not finite, whose elements become 0.

    ``static_step`` is 0 if each block has its own. Returns the number of non-finite blocks.
    """
    nonfinite = 0
    signed_extremes(blocks, steps)
    for k in range(blocks.shape[0]):
        if not is_finite(steps[k]):
            nonfinite += 1
            steps[k] = F32(np.nan)
            blocks[k, :] = F32(0.0)
        else:
            steps[k] = block_step(steps[k], half_range) if static_step == 0 else static_step
    return nonfinite


@jit
def round_to_codes(blocks: Array, steps: Array, half_range: Scalar, codes: Array) -> None:
    """``clamp(round_half_even(h / step))``, as floats, never -0; 0 where the step is 0 or NaN."""
    low, high = -half_range, half_range - F32(1.0)
    for k in range(blocks.shape[0]):
        divisor = steps[k] if abs(steps[k]) > 0 else F32(np.inf)
        for i in range(blocks.shape[1]):
            # Adding 0 makes +0 of -0: the reference's codes are integers.
            codes[k, i] = min(max(np.rint(blocks[k, i] / divisor), low), high) + F32(0.0)


@jit
def write_codes(codes: Array, bits: Scalar, out: Array, at: Scalar) -> None:
    """Codes to bytes: one each, or code i and code i + B/2 in the nibbles of byte i."""
    for k in range(codes.shape[0]):
        if bits == 8:
            for i in range(codes.shape[1]):
                out[at + U64(i)] = np.uint8(I32(codes[k, i]))
            at += U64(codes.shape[1])
        else:
            half = codes.shape[1] // 2
            for i in range(half):
                low, high = I32(codes[k, i]), I32(codes[k, half + i])
                out[at + U64(i)] = np.uint8((low & I32(15)) | (high << I32(4)))
            at += U64(half)


@jit
def add_codes(
    packed: Array, at: Scalar, bits: int, steps: Array, step_at: int, stride: int, total: Array
) -> None:
    """Add decoded blocks to ``total``; ``stride`` from one step to the next, 0 if all share it."""
    count, size = total.shape
    half = size // 2
    for k in range(count):
        step = as_bfloat16(steps[step_at + k * stride])
        if bits == 8:
            for i in range(size):
                total[k, i] += F32(np.int8(packed[at + U64(i)])) * step
            at += U64(size)
        else:
            for i in range(half):
                code = I32(np.int8(packed[at + U64(i)]))
                # The low nibble is shifted up and down again, which extends its sign.
                total[k, i] += F32(I32(code << I32(28)) >> I32(28)) * step
                total[k, half + i] += F32(code >> I32(4)) * step
            at += U64(half)


@jit
def read_residual(
    stored: Array, steps: Array, place: int, static_step: Scalar, shift: int, e: Array
) -> None:
    """Blocks from ``place`` on as float32; ``steps`` is empty if the step is static."""
    count, size = e.shape
    at = U64(place * size)
    if shift >= 0:
        read_floats(stored, at, e.size, shift, e)
        return
    for k in range(count):
        step = as_bfloat16(steps[place + k]) if steps.size else static_step
        for i in range(size):
            e[k, i] = F32(stored[at + U64(i)]) * step
        at += U64(size)


@jit
def write_residual(
    blocks: Array,
    stored: Array,
    steps: Array,
    place: int,
    static_step: Scalar,
    shift: int,
    codes: Array,
    new_steps: Array,
) -> None:
    """Store blocks; one with a NaN or an infinity leaves what is stored as it is."""
    count, size = blocks.shape
    choose_steps(blocks, RESIDUAL_HALF_RANGE, static_step, new_steps)
    if shift < 0:
        round_to_codes(blocks, new_steps, RESIDUAL_HALF_RANGE, codes)
    at = U64(place * size)
    for k in range(count):
        if is_finite(new_steps[k]):
            if shift < 0:
                for i in range(size):
                    stored[at + U64(i)] = np.int8(I32(codes[k, i]))
                if steps.size:
                    steps[place + k] = round_to_bfloat16(new_steps[k])
            elif shift == 0:
                for i in range(size):
                    stored[at + U64(i)] = as_bits(blocks[k, i])
            else:
                for i in range(size):  # rounding up must not make an infinity
                    value = min(max(blocks[k, i], -LARGEST_BFLOAT16), LARGEST_BFLOAT16)
                    stored[at + U64(i)] = round_to_bfloat16(value)
        at += U64(size)


@jit
def compensate(h: Array, e: Array, scaled: bool, loss_scale: Scalar) -> None:
    """Add the residual to the gradient, which carries the loss scale if there is one."""
    for k in range(h.shape[0]):
        if scaled:
            for i in range(h.shape[1]):
                h[k, i] += e[k, i] * loss_scale
        else:
            for i in range(h.shape[1]):
                h[k, i] += e[k, i]


@jit
def next_residual(
    e: Array, h: Array, codes: Array, steps: Array, gain: Scalar, scaled: bool, loss_scale: Scalar
) -> None:
    """``(1 - gain) * e + gain * (h - decoded) / loss_scale``, into ``h``; NaN if a step is."""
    new, old = F32(gain), F32(1.0 - gain)
    for k in range(h.shape[0]):
        step = steps[k]
        if scaled:
            unscale = F32(1.0) / loss_scale
            for i in range(h.shape[1]):
                error = (h[k, i] - codes[k, i] * step) * unscale
                h[k, i] = e[k, i] * old + error * new
        else:
            for i in range(h.shape[1]):
                h[k, i] = e[k, i] * old + (h[k, i] - codes[k, i] * step) * new


@jit
def measure(h: Array, codes: Array, steps: Array, lanes: Array) -> None:
    """Add (h - decoded)^2 and h^2 of finite blocks, per place in a block: in a fixed order."""
    for k in range(h.shape[0]):
        if is_finite(steps[k]):
            for i in range(h.shape[1]):
                error, value = np.float64(h[k, i] - codes[k, i] * steps[k]), np.float64(h[k, i])
                lanes[0, i] += error * error
                lanes[1, i] += value * value


@jit
def compress_tiles(
    first: int,
    last: int,
    x: Array,
    payload: Array,
    values: Array,
    steps: Array,
    residual: Array,
    residual_steps: Array,
    segments: Array,
    tiles: Array,
    errors: Array,
    row_numel: int,
    row_bytes: int,
    bits: Scalar,
    size: int,
    tile_blocks: int,
    shift: int,
    residual_shift: int,
    code_step: Scalar,
    residual_step: Scalar,
    gain: Scalar,
    scaled: bool,
    loss_scale: Scalar,
) -> int:
    """Do tiles ``first`` to ``last``, counted over all rows; return the non-finite blocks."""
    group = max(1, GROUP_NUMEL // size)
    h_all, e_all = np.empty((group, size), F32), np.empty((group, size), F32)
    codes_all, steps_all = np.empty((group, size), F32), np.empty(group, F32)
    new_steps = np.empty(group, F32)
    lanes = np.zeros((2, size if errors.size else 0))
    half_range, code_bytes, nonfinite = F32(1 << (bits - 1)), size * bits // 8, 0
    for task in range(first, last):
        row, tile = task // tiles.size, task % tiles.size
        start, numel, data, step_at, form, memory, first_tile, blocks = segments[tiles[tile]]
        begin = (tile - first_tile) * tile_blocks
        end = min(begin + tile_blocks, blocks)
        start, data = start + row * row_numel, data + row * row_bytes
        step_at += row * (row_bytes // 2)
        if form == VALUES:
            at, left, right = data // x.itemsize, begin * size, min(end * size, numel)
            values[at + left : at + right] = x[start + left : start + right]
            continue
        lanes[:] = 0.0
        for block in range(begin, end, group):
            count, left = min(group, end - block), block * size
            h, e, codes, own = h_all[:count], e_all[:count], codes_all[:count], steps_all[:count]
            read_floats(x, U64(start + left), min(count * size, numel - left), shift, h)
            place = memory + row * blocks + block
            if memory >= 0:
                read_residual(residual, residual_steps, place, residual_step, residual_shift, e)
                compensate(h, e, scaled, loss_scale)
            nonfinite += choose_steps(h, half_range, code_step, own)
            round_to_codes(h, own, half_range, codes)
            write_codes(codes, bits, payload, U64(data + block * code_bytes))
            for k in range(count):
                if form == BLOCK_STEPS:
                    steps[step_at + block + k] = round_to_bfloat16(own[k])
                elif not is_finite(own[k]):
                    steps[step_at] = NAN_BFLOAT16
            if errors.size:
                measure(h, codes, own, lanes)
            if memory >= 0:
                next_residual(e, h, codes, own, gain, scaled, loss_scale)
                write_residual(
                    h, residual, residual_steps, place, residual_step, residual_shift, codes,
                    new_steps[:count],
                )  # fmt: skip
        if errors.size:
            errors[task, 0], errors[task, 1] = lanes[0].sum(), lanes[1].sum()
    return nonfinite


@jit
def reduce_tiles(
    first: int,
    last: int,
    payload: Array,
    values: Array,
    steps: Array,
    segments: Array,
    tiles: Array,
    output: Array,
    rows: int,
    row_bytes: int,
    bits: Scalar,
    size: int,
    tile_blocks: int,
    values_shift: int,
    shift: int,
    factor: Scalar,
) -> None:
    """Decode and sum tiles ``first`` to ``last`` of all rows into ``output``."""
    group = max(1, GROUP_NUMEL // size)
    total_all, part_all = np.empty((group, size), F32), np.empty((group, size), F32)
    code_bytes = size * bits // 8
    for tile in range(first, last):
        start, numel, data, step_at, form, _, first_tile, blocks = segments[tiles[tile]]
        begin = (tile - first_tile) * tile_blocks
        end = min(begin + tile_blocks, blocks)
        stride = 1 if form == BLOCK_STEPS else 0
        for block in range(begin, end, group):
            count, left = min(group, end - block), block * size
            numel_here = min(count * size, numel - left)
            total, part = total_all[:count], part_all[:count]
            total[:] = F32(0.0)
            for row in range(rows):
                at = data + row * row_bytes
                if form == VALUES:
                    at = at // values.itemsize + left
                    read_floats(values, U64(at), numel_here, values_shift, part)
                    total += part
                else:
                    at += block * code_bytes
                    own = step_at + row * (row_bytes // 2) + block * stride
                    add_codes(payload, U64(at), bits, steps, own, stride, total)
            total *= factor
            write_floats(total, output, U64(start + left), numel_here, shift)

"""One contract for every codec, then what is special to each."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from loco_fsdp.codecs import (
    CODECS,
    LARGEST_BFLOAT16,
    RESIDUAL_CODECS,
    SMALLEST_NORMAL,
    BlockCodec,
    Codec,
    StaticCodec,
    pack,
    signed_extreme,
    unpack,
)
from loco_fsdp.config import LoCoConfig
from strategies import BITS, FLOAT32_MAX, KINDS, NONFINITE, gradients, seeds, values_of_kind

RESIDUAL_BITS = 8


def cases() -> Iterator[Any]:
    """Every codec of the two tables, at each number of bits: new ones are found here."""
    settings: dict[str, Any] = {"static_scale": 4.0, "static_residual_scale": 50.0}
    for name, make in CODECS.items():
        for bits in BITS:
            config = LoCoConfig.from_dict({"scale": name, "bits": bits, **settings})
            yield pytest.param(make(config), bits, id=f"{name}-{bits}")
    for name, make in RESIDUAL_CODECS.items():
        config = LoCoConfig.from_dict({"scale": name, **settings})
        yield pytest.param(make(config), RESIDUAL_BITS, id=f"{name}-residual")


CASES = list(cases())
every_codec = pytest.mark.parametrize(("codec", "bits"), CASES)
every_residual_codec = pytest.mark.parametrize(
    ("codec", "bits"), [case for case in CASES if str(case.id).endswith("residual")]
)
every_bits = pytest.mark.parametrize("bits", BITS)


def blocks(**options: Any) -> st.SearchStrategy[Tensor]:
    """Blocks ``[R, B]``, float32."""
    numel = st.sampled_from((16, 18, 128, 130))
    return gradients(numel=numel, dtypes=(torch.float32,), **options)


def bits_of(values: Tensor) -> Tensor:
    """Float32 as its bits, -0.0 taken as 0.0."""
    return (values + 0.0).view(torch.int32)


# Every codec


@every_codec
@given(h=blocks())
def test_codes_and_steps_are_what_the_wire_can_hold(codec: Codec, bits: int, h: Tensor) -> None:
    before = h.clone()
    codes, steps = codec.encode(h)
    assert torch.equal(h, before)
    assert codes.dtype == torch.int8 and codes.shape == h.shape
    assert int(codes.min()) >= -(2 ** (bits - 1)) and int(codes.max()) <= 2 ** (bits - 1) - 1
    assert steps.dtype == torch.float32 and steps.shape == h.shape[:-1]
    assert torch.equal(steps.to(torch.bfloat16).float(), steps)
    assert not codes[steps == 0].any()
    # What was sent decodes to the same bits as what the sender had.
    sent = codec.decode(codes, steps.to(torch.bfloat16))
    assert torch.equal(sent.view(torch.int32), codec.decode(codes, steps).view(torch.int32))


@every_codec
@given(h=blocks())
def test_decoded_value_is_the_nearest_level(codec: Codec, bits: int, h: Tensor) -> None:
    """No code is nearer than the one chosen, beyond the rounding of the division."""
    codes, steps = codec.encode(h)
    decoded = codec.decode(codes, steps)
    all_codes = torch.arange(-(2 ** (bits - 1)), 2 ** (bits - 1)).to(torch.int8)
    levels = codec.decode(all_codes.expand(h.shape[0], -1), steps)
    error = (h.double() - decoded.double()).abs()
    best = (h.double().unsqueeze(-1) - levels.double().unsqueeze(-2)).abs().amin(-1)
    assert bool((error <= best + h.double().abs() * 2.0**-22).all())


@every_codec
@pytest.mark.parametrize("kind", KINDS)
@given(seed=seeds)
def test_finite_in_finite_out(codec: Codec, bits: int, kind: str, seed: int) -> None:
    h = values_of_kind(kind, (4, 128), seed)
    h[0, ::2], h[0, 1::2] = FLOAT32_MAX, -FLOAT32_MAX
    decoded = codec.decode(*codec.encode(h))
    assert bool(decoded.isfinite().all())
    assert bool((h - decoded).isfinite().all())


@every_codec
def test_zeros_are_exact(codec: Codec, bits: int) -> None:
    """Field case 70: a block of zeros, also beside one that is not, decodes to exact zeros."""
    h = torch.randn(3, 128)
    h[1] = 0.0
    codes, steps = codec.encode(h)
    decoded = codec.decode(codes, steps)
    assert not codes[1].any() and not decoded[1].any()
    assert bool(decoded.isfinite().all())
    assert torch.equal(codec.encode(-torch.zeros(128))[0], torch.zeros(128, dtype=torch.int8))


@every_codec
@pytest.mark.parametrize("value", NONFINITE, ids=str)
@pytest.mark.parametrize("position", [0, 63, 127])
def test_nonfinite_block_decodes_to_nan(
    codec: Codec, bits: int, position: int, value: float
) -> None:
    """Field case 54: one NaN or infinity makes its whole block NaN and leaves the next alone."""
    h = torch.ones(2, 128)
    clean = codec.encode(h)
    h[1, position] = value
    codes, steps = codec.encode(h)
    assert bool(steps[1].isnan()) and not codes[1].any()
    assert bool(codec.decode(codes, steps)[1].isnan().all())
    assert torch.equal(codes[0], clean[0][0]) and torch.equal(steps[0], clean[1][0])


@every_codec
@given(h=blocks(rows=st.integers(2, 5), nonfinite=True))
def test_blocks_do_not_depend_on_each_other(codec: Codec, bits: int, h: Tensor) -> None:
    codes, steps = codec.encode(h)
    for index, block in enumerate(h):
        alone_codes, alone_steps = codec.encode(block)
        assert torch.equal(alone_codes, codes[index])
        assert torch.equal(alone_steps.view(torch.int32), steps[index].view(torch.int32))


@every_residual_codec
@given(h=blocks())
def test_storing_again_what_was_read_changes_nothing(codec: Codec, bits: int, h: Tensor) -> None:
    """A block that keeps its residual is decoded and encoded again: the same bits."""
    codes, steps = codec.encode(h)
    again_codes, again_steps = codec.encode(codec.decode(codes, steps))
    assert torch.equal(again_codes, codes)
    assert torch.equal(again_steps.view(torch.int32), steps.view(torch.int32))


@every_codec
def test_same_bits_when_subnormals_are_flushed(codec: Codec, bits: int) -> None:
    """Devices that flush subnormals to zero agree with those that do not."""
    h = torch.stack([values_of_kind("subnormal", (128,), 1), values_of_kind("normal", (128,), 2)])
    codes, steps = codec.encode(h)
    with flushed_subnormals():
        flushed_codes, flushed_steps = codec.encode(h)
    assert torch.equal(flushed_codes, codes) and torch.equal(flushed_steps, steps)


@contextmanager
def flushed_subnormals() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


# The block codec


def float32(value: float) -> float:
    """Round a double to float32: exact for the quotient of two float32 (53 >= 2 * 24 + 2)."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def bfloat16(value: float) -> float:
    """Round a float32 to bfloat16, half to even."""
    raw = int(struct.unpack("<I", struct.pack("<f", value))[0])
    raw += 0x7FFF + (raw >> 16 & 1)
    return float(struct.unpack("<f", struct.pack("<I", raw & 0xFFFF0000))[0])


def model_of_block_codec(block: list[float], bits: int) -> tuple[list[int], float]:
    """Section 2 of the definition in Python numbers."""
    half = 2 ** (bits - 1)
    magnitudes = [abs(value) for value in block]
    m = block[magnitudes.index(max(magnitudes))]
    step = bfloat16(float32(-m / half))
    step = max(-LARGEST_BFLOAT16 / half, min(step, LARGEST_BFLOAT16 / half))
    if abs(step) < SMALLEST_NORMAL:
        return [0] * len(block), 0.0
    codes = [round(float32(value / step)) for value in block]
    return [max(-half, min(code, half - 1)) for code in codes], step


float32s = st.floats(width=32, allow_nan=False, allow_infinity=False)


@every_bits
@given(
    block=st.lists(
        st.one_of(float32s, st.sampled_from((0.0, 1.0, -1.0, 2.0**-126, 2.0**-123, -FLOAT32_MAX))),
        min_size=1,
        max_size=32,
    )
)
def test_block_codec_is_the_definition(bits: int, block: list[float]) -> None:
    codes, step = model_of_block_codec(block, bits)
    found_codes, found_step = BlockCodec(bits).encode(torch.tensor(block, dtype=torch.float32))
    assert found_codes.tolist() == codes
    assert found_step.item() == step
    decoded = BlockCodec(bits).decode(found_codes, found_step)
    assert decoded.tolist() == [float32(code * step) for code in codes]


@every_bits
def test_half_steps_round_to_even(bits: int) -> None:
    """Of every bfloat16 mantissa: a product with 1 / step instead of a division would fail."""
    half = 2 ** (bits - 1)
    places = torch.tensor([-half, *(k + 0.5 for k in range(-half, half - 1))])
    steps = torch.arange(128, 256) / 64
    codes, found = BlockCodec(bits).encode(steps.unsqueeze(-1) * places)
    assert torch.equal(found, steps)
    expected = [round(place) for place in places.tolist()]
    assert codes.tolist() == [expected] * len(steps)


@every_bits
@given(h=blocks())
def test_block_codec_is_antisymmetric(bits: int, h: Tensor) -> None:
    """Field case 71: Q(-x) = -Q(x), bit for bit, the 8-bit residual included."""
    codec = BlockCodec(bits)
    codes, steps = codec.encode(h)
    negative_codes, negative_steps = codec.encode(-h)
    assert torch.equal(negative_codes, codes)
    assert torch.equal(bits_of(negative_steps), bits_of(-steps))
    assert torch.equal(
        bits_of(codec.decode(negative_codes, negative_steps)), bits_of(-codec.decode(codes, steps))
    )


@every_bits
@given(h=blocks())
def test_block_codec_error_is_at_most_half_a_step(bits: int, h: Tensor) -> None:
    """Except near the extreme of the opposite sign, which the range -2^(b-1)..2^(b-1)-1 cuts."""
    half = 2 ** (bits - 1)
    codec = BlockCodec(bits)
    codes, steps = codec.encode(h)
    step = steps.double().unsqueeze(-1)
    error = (h.double() - codec.decode(codes, steps).double()).abs()
    place = torch.where(step == 0, 0.0, h.double() / step)  # in steps: extreme at -half
    rounding = h.double().abs() * 2.0**-23
    # Rounding the step to bfloat16 moves the extreme by 2^-8 of its distance, at the most; the
    # clamp that keeps the decoded extreme in float32 by as much again.
    assert bool((place.abs() <= half * (1 + 2.0**-7)).all())
    beyond = (place - (half - 1)).clamp(min=0.5) * step.abs()
    sent = (steps != 0).unsqueeze(-1).expand_as(h)
    at_extreme = (-half - place).clamp(min=0.5) * step.abs()
    assert bool((error <= torch.maximum(beyond, at_extreme) + rounding)[sent].all())
    # A block without a step keeps back everything, and that is nearly nothing.
    assert bool((h.abs() < half * SMALLEST_NORMAL * (1 + 2.0**-8))[~sent].all())


@every_bits
@given(h=blocks())
def test_extreme_gets_the_most_negative_code(bits: int, h: Tensor) -> None:
    codes, steps = BlockCodec(bits).encode(h)
    first = h.abs().argmax(-1, keepdim=True)
    extreme_codes = codes.gather(-1, first).squeeze(-1)
    assert bool((extreme_codes[steps != 0] == -(2 ** (bits - 1))).all())


@every_bits
@given(seed=seeds, exponent=st.integers(-100, 100))
def test_power_of_two_moves_only_the_step(bits: int, seed: int, exponent: int) -> None:
    """A loss scale that is a power of two changes no code."""
    h = torch.randn(4, 128, generator=torch.Generator().manual_seed(seed))
    codes, steps = BlockCodec(bits).encode(h)
    scaled_codes, scaled_steps = BlockCodec(bits).encode(h * 2.0**exponent)
    assert torch.equal(scaled_codes, codes)
    assert torch.equal(scaled_steps, steps * 2.0**exponent)


@every_bits
def test_subnormal_block_has_no_step(bits: int) -> None:
    """Below the smallest normal float32 a step is 0, at it it is not."""
    half = 2 ** (bits - 1)
    for factor, sent in ((0.99, False), (2.0**-20, False), (1.0, True), (1.01, True)):
        h = torch.full((1, 16), factor * half * SMALLEST_NORMAL)
        codes, steps = BlockCodec(bits).encode(h)
        assert bool((steps != 0).all()) == sent
        assert bool(codes.any()) == sent
        assert bool(BlockCodec(bits).decode(codes, steps).isfinite().all())


@given(h=gradients(dtypes=(torch.float32,), numel=st.sampled_from((2, 16, 130)), nonfinite=True))
def test_signed_extreme_is_the_first_of_largest_magnitude(h: Tensor) -> None:
    """The CPU's path without argmax gives what the definition gives."""
    definition = h.gather(-1, h.abs().argmax(-1, keepdim=True)).squeeze(-1)
    found = signed_extreme(h)
    assert torch.equal(found.isnan(), h.isnan().any(-1))
    assert torch.equal(found.nan_to_num(), definition.nan_to_num())
    # Row by row: a tie in one row must not decide which path the others take.
    alone = torch.stack([signed_extreme(row) for row in h])
    assert torch.equal(found.nan_to_num(), alone.nan_to_num())


def test_first_of_a_tie_gives_the_sign() -> None:
    tie = torch.tensor([[0.5, 1.0, -1.0, 0.0], [0.5, -1.0, 1.0, 0.0]])
    assert signed_extreme(tie).tolist() == [1.0, -1.0]
    codes, steps = BlockCodec(4).encode(tie)
    assert steps.tolist() == [-0.125, 0.125]
    assert codes.tolist() == [[-4, -8, 7, 0], [4, -8, 7, 0]]


@every_bits
def test_no_one_sided_bias(bits: int) -> None:
    """Field case 71: mean error of 10^6 normal samples below 1e-3 of the largest."""
    codec = BlockCodec(bits)
    h = torch.randn(7813, 128, generator=torch.Generator().manual_seed(0))
    error = codec.decode(*codec.encode(h)) - h
    assert abs(float(error.double().mean())) < 1e-3 * float(h.abs().max())
    # The extreme comes back with equal size whichever its sign, exactly where its step is exact.
    amax = torch.zeros(2, 128)
    amax[0, 5], amax[1, 5] = 3.0, -3.0
    assert torch.equal(codec.decode(*codec.encode(amax)), amax)
    # +1 and -1 in equal number: each order leans to its own side, both together to none.
    ones = torch.ones(2, 128)
    ones[0, 1::2], ones[1, ::2] = -1.0, -1.0
    decoded = codec.decode(*codec.encode(ones))
    assert float(decoded.sum()) == 0.0
    assert torch.equal(decoded[0], -decoded[1])


@pytest.mark.parametrize(("bits", "expected"), [(4, 0.103), (8, 0.0064)])
def test_relative_error_on_gaussian_data(bits: int, expected: float) -> None:
    h = torch.randn(8000, 128, generator=torch.Generator().manual_seed(0))
    codec = BlockCodec(bits)
    error = float((codec.decode(*codec.encode(h)) - h).norm() / h.norm())
    assert error == pytest.approx(expected, rel=0.01)
    # Less than with the symmetric rule, max -> 2^(b-1) - 1.
    step = h.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    assert error < float(((h / step).round() * step - h).norm() / h.norm())


# The static codec


@pytest.mark.parametrize("codes_per_unit", [2.0**17, 1000.0, 3.0])
@every_bits
def test_static_codec_is_exact_to_half_a_step_in_range(bits: int, codes_per_unit: float) -> None:
    """And saturates out of range; its step is 1/s rounded to bfloat16, whatever the data."""
    half = 2 ** (bits - 1)
    codec = StaticCodec(bits, codes_per_unit)
    step = bfloat16(float32(1.0 / codes_per_unit))
    generator = torch.Generator().manual_seed(0)
    h = torch.empty(64, 128).uniform_(-half, half - 1, generator=generator) * step
    codes, steps = codec.encode(h)
    assert torch.equal(steps, torch.full((64,), step))
    error = (h.double() - codec.decode(codes, steps).double()).abs()
    assert bool((error <= step / 2 + h.double().abs() * 2.0**-23).all())
    far = codec.decode(*codec.encode(torch.tensor([[1e30, -1e30]])))
    assert far.tolist() == [[(half - 1) * step, -half * step]]


# Packing


def test_all_bytes_unpack_and_pack_to_themselves() -> None:
    """Field case 73: the sign of each nibble is extended, and none spoils its neighbour."""
    packed = torch.arange(256, dtype=torch.uint8).unsqueeze(-1)  # blocks of two codes
    codes = unpack(packed, 4)
    expected = [[n - 16 if n > 7 else n for n in (b & 15, b >> 4)] for b in range(256)]
    assert codes.tolist() == expected
    assert torch.equal(pack(codes, 4), packed)
    assert torch.equal(pack(unpack(packed, 8), 8), packed)
    assert unpack(packed, 8).flatten().tolist() == [*range(128), *range(-128, 0)]


def test_golden_nibbles() -> None:
    """Field case 72: code i in the low nibble of byte i of its block, code i + B/2 in the high."""
    codes = torch.tensor([1, -2, 7, -8], dtype=torch.int8)
    assert bytes(pack(codes, 4).tolist()).hex() == "718e"
    assert bytes(pack(codes, 8).tolist()).hex() == "01fe07f8"
    two_blocks = torch.stack([codes, -1 - codes])
    assert bytes(pack(two_blocks, 4).flatten().tolist()).hex() == "718e8e71"


@every_bits
@given(seed=seeds, half_block=st.integers(1, 100), rows=st.integers(0, 3))
def test_pack_loses_nothing(bits: int, seed: int, half_block: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    codes = torch.randint(low, high, (rows, 2, 2 * half_block), generator=generator)
    packed = pack(codes.to(torch.int8), bits)
    assert packed.shape == (rows, 2, math.ceil(2 * half_block * bits / 8))
    assert torch.equal(unpack(packed, bits), codes.to(torch.int8))

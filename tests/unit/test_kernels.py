"""Every backend gives the bits of the reference, and touches no byte that is not its own.

``Exchange`` compares payload, residual, figures and output of each call with the reference, and
looks at the markers around each buffer.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_calls import (
    BACKENDS,
    QUICK_BACKENDS,
    SCALES,
    Exchange,
    cut_into_segments,
    one_tensor,
    supports,
)
from loco_fsdp import LoCoConfig
from loco_fsdp.codecs import BlockCodec
from strategies import (
    BITS,
    FLOAT_DTYPES,
    KINDS,
    NONFINITE,
    RESIDUAL_DTYPES,
    configs,
    gradients,
    seeds,
    values_of_kind,
)

every_backend = pytest.mark.parametrize("backend", BACKENDS)
# Many examples are too many for Triton's interpreter: it gets a property test of its own size.
every_quick_backend = pytest.mark.parametrize("backend", QUICK_BACKENDS)
loss_scales = st.sampled_from((None, 1.0, 3.0, 2.0**-20, 65536.0))
factors = st.sampled_from((1.0, 1 / 3, 0.2, -2.0))


def draw_dtype(data: st.DataObject, backend: str) -> torch.dtype:
    return data.draw(st.sampled_from([d for d in FLOAT_DTYPES if supports(backend, d)]))


# Equal to the reference


def run_unit(
    backend: str, data: st.DataObject, config: LoCoConfig, most_rows: int, most_segments: int
) -> None:
    """Four calls on a unit with segments of all forms, the third with NaN and infinities."""
    dtype, rows = draw_dtype(data, backend), data.draw(st.integers(1, most_rows))
    tile_blocks = data.draw(st.sampled_from((1, 2, 8)))
    step = data.draw(st.sampled_from((1, 16)))  # 16: a layout that allows wide accesses
    most = min(300, (2 * tile_blocks + 1) * config.block_size) // step
    count = data.draw(st.integers(1, most_segments))
    numels = [step * data.draw(st.integers(0, most)) for _ in range(count)]
    forms = [data.draw(st.sampled_from(("codes", "codes", "values", "absent"))) for _ in numels]
    segments = cut_into_segments(numels, forms)
    forgetful = data.draw(st.sets(st.sampled_from([s.name for s in segments]), max_size=1))
    scale, factor = data.draw(loss_scales), data.draw(factors)
    unit = Exchange(backend, config, segments, rows, dtype, forgetful, tile_blocks)
    for call in range(4):
        x = data.draw(gradients(rows, unit.layout.row_numel, (dtype,), nonfinite=call == 2))
        payload = unit.compress(x, scale, measure=call == 1)
    unit.reduce(payload, factor, draw_dtype(data, backend))


@every_quick_backend
@settings(max_examples=100)
@given(data=st.data(), config=configs())
def test_unit_is_the_reference(backend: str, data: st.DataObject, config: LoCoConfig) -> None:
    run_unit(backend, data, config, most_rows=5, most_segments=6)


@pytest.mark.parametrize("residual_dtype", RESIDUAL_DTYPES)
@pytest.mark.parametrize("scale", SCALES)
@settings(max_examples=8)
@given(data=st.data())
def test_triton_unit_is_the_reference(scale: str, residual_dtype: str, data: st.DataObject) -> None:
    size = st.sampled_from((16, 18, 32, 50, 128, 130))
    fixed: Any = {"scale": scale, "residual_dtype": residual_dtype, "block_size": data.draw(size)}
    run_unit("triton", data, data.draw(configs(**fixed)), most_rows=2, most_segments=3)


@every_backend
@pytest.mark.parametrize("numel", [1, 15, 16, 129, 910, 2305, 4096])
def test_sizes_around_real_tiles(backend: str, numel: int) -> None:
    """With the tile size in use, whole and cut; two calls."""
    exchange = one_tensor(backend, LoCoConfig(), (2, numel))
    for call in range(2):
        payload = exchange.compress(values_of_kind("normal", (2, numel), call))
        exchange.reduce(payload, 0.5)


@every_backend
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_unit_of_the_default_shape(backend: str, bits: int, dtype: torch.dtype) -> None:
    """The backend's own tile size, an aligned layout, two rows."""
    if not supports(backend, dtype):
        pytest.skip(f"{dtype} is run by plain PyTorch")
    config = LoCoConfig.from_dict({"bits": bits})
    segments = cut_into_segments([3 * 2048 + 128, 48, 2048], ["codes", "values", "codes"])
    unit = Exchange(backend, config, segments, 2, dtype)
    assert unit.table.aligned
    for call in range(2):
        x = values_of_kind("normal", (2, unit.layout.row_numel), call).to(dtype)
        unit.reduce(unit.compress(x, measure=True), 0.5)


@every_backend
@pytest.mark.parametrize("residual_dtype", RESIDUAL_DTYPES)
@pytest.mark.parametrize("largest", [1.0, -1.0])
def test_signs_of_zeros(backend: str, residual_dtype: Any, largest: float) -> None:
    """Each sign of a zero in the gradient with each in the residual, and of the step."""
    exchange = one_tensor(backend, LoCoConfig(block_size=16, residual_dtype=residual_dtype), (1, 5))
    exchange.load("0", torch.tensor([[0.0, 0.0, 0.0, -0.0, -0.0]]))
    for _ in range(2):
        exchange.compress(torch.tensor([[largest, 0.0, -0.0, 0.0, -0.0]]))


@every_backend
@pytest.mark.parametrize("block_size", [96, 1024, 4098, 8192])
def test_large_and_uneven_blocks(backend: str, block_size: int) -> None:
    shape = (1, 2 * block_size - 40)
    exchange = one_tensor(backend, LoCoConfig(block_size=block_size), shape, tile_blocks=2)
    for call in range(2):
        exchange.reduce(exchange.compress(values_of_kind("normal", shape, call)), 1.0)


@every_quick_backend
@pytest.mark.parametrize("numel", [256 * 1024 + 130, 700_001])
def test_sizes_of_more_than_a_piece(backend: str, numel: int) -> None:
    """What is cut into pieces, or shared between threads, is the reference too."""
    for scale in SCALES:
        exchange = one_tensor(backend, LoCoConfig.from_dict({"scale": scale}), (2, numel))
        x = values_of_kind("normal", (2, numel), 0)
        x[1, 100] = torch.nan
        exchange.reduce(exchange.compress(x, measure=True), 0.5)


@every_backend
@pytest.mark.parametrize("exponent", [-126, -3, 90])
@pytest.mark.parametrize("bits", BITS)
def test_rounding_at_every_half(backend: str, bits: int, exponent: int) -> None:
    """All 128 steps of one exponent, times all k + 1/2 and the float32 beside it on each side."""
    half_range = 2 ** (bits - 1)
    halves = torch.arange(-half_range, half_range).float() + 0.5
    steps = (1 + torch.arange(128) / 128) * 2.0**exponent
    exact = steps[:, None] * halves
    sides = [exact.nextafter(torch.tensor(side)) for side in (-torch.inf, torch.inf)]
    block_size = 4 * 2 * half_range
    h = torch.zeros(128, block_size)
    h[:, 0] = -half_range * steps  # the first element of a block makes its step
    h[:, 1 : 1 + 6 * half_range] = torch.cat([exact, *sides], dim=1)
    h = h.clamp(-(half_range * steps)[:, None], (half_range * steps)[:, None])
    codes, found_steps = BlockCodec(bits).encode(h)
    assert torch.equal(found_steps, steps) and int(codes.max()) == half_range - 1
    config = LoCoConfig.from_dict({"bits": bits, "block_size": block_size})
    one_tensor(backend, config, (1, h.numel()), tile_blocks=128).compress(h.view(1, -1))


@every_backend
def test_first_extreme_decides_the_sign(backend: str) -> None:
    """+1 and -1 at every two places of a block, in either half."""
    places = torch.tensor([(i, j) for i in range(16) for j in range(16) if i != j])
    blocks = torch.zeros(len(places), 16)
    blocks.scatter_(1, places, torch.tensor([1.0, -1.0]).expand(len(places), -1))
    config, x = LoCoConfig(block_size=16), blocks.view(1, -1)
    one_tensor(backend, config, (1, x.numel()), tile_blocks=256).compress(x)


@every_backend
@pytest.mark.parametrize("kind", KINDS)
def test_every_magnitude(backend: str, kind: str) -> None:
    config = LoCoConfig(block_size=32, feedback="classic")
    exchange = one_tensor(backend, config, (2, 320), tile_blocks=16)
    for seed in range(2):
        exchange.reduce(exchange.compress(values_of_kind(kind, (2, 320), seed)), 1.0)


@every_backend
@pytest.mark.parametrize("bits", BITS)
def test_sums_are_taken_in_rank_order(backend: str, bits: int) -> None:
    """2^30 + 1 is 2^30 in float32, so the order of three ranks shows."""
    config = LoCoConfig.from_dict({"bits": bits, "feedback": "none"})
    big = 2.0**30
    for order, expected in (((big, 1.0, -big), 0.0), ((big, -big, 1.0), 1.0)):
        unit = Exchange(backend, config, cut_into_segments([1, 1], ["codes", "values"]), 3)
        payload = unit.compress(torch.tensor(order).unsqueeze(1).expand(3, 2).contiguous())
        assert unit.reduce(payload, 1.0).tolist() == [expected] * 2


# Bytes that are not theirs


@every_backend
@pytest.mark.parametrize("block_size", [16, 18])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("scale", SCALES)
def test_marker_bytes_stay_intact(backend: str, scale: str, bits: int, block_size: int) -> None:
    """Field case 67: 1 to 33 blocks side by side, the last one short in two cases of three."""
    chosen = {"scale": scale, "bits": bits, "block_size": block_size, "static_scale": 4.0}
    numels = [blocks * block_size - blocks % 3 for blocks in range(1, 34)]
    segments = cut_into_segments(numels, ["codes"] * 33)
    unit = Exchange(backend, LoCoConfig.from_dict(chosen), segments, 1, tile_blocks=8)
    unit.reduce(unit.compress(values_of_kind("normal", (1, sum(numels)), 0)), 1.0)


@every_backend
@pytest.mark.parametrize("garbage", [1e30, torch.nan])
@pytest.mark.parametrize("residual_dtype", RESIDUAL_DTYPES)
def test_memory_after_a_tensor_is_not_read(
    backend: str, residual_dtype: str, garbage: float
) -> None:
    """Field case 68: garbage behind the 2 elements of the last block reaches neither the step
    nor the residual; the wire's padding is 0."""
    config = LoCoConfig.from_dict({"residual_dtype": residual_dtype})
    unit = Exchange(backend, config, cut_into_segments([130, 126], ["codes", "values"]), 2)
    x = torch.full((2, 256), garbage)
    x[:, :130] = values_of_kind("normal", (2, 130), 0)
    for _ in range(2):
        codes = unit.layout.codes(unit.compress(x), 0)
    assert not codes[:, 64 + 2 : 128].any()


@every_backend
def test_no_elements_after_some(backend: str) -> None:
    """Field case 76: after a call with elements, a call with none is one of none."""
    for numels, form in (([200], "codes"), ([0], "codes"), ([], ""), ([40], "absent")):
        for dtype in FLOAT_DTYPES:
            if supports(backend, dtype):
                segments = cut_into_segments(numels, [form] * len(numels))
                unit = Exchange(backend, LoCoConfig(), segments, 2, dtype)
                x = torch.ones(2, unit.layout.row_numel, dtype=dtype)
                assert unit.reduce(unit.compress(x, measure=True), 1.0).dtype == dtype


# Zeros, signs, nibbles


@every_backend
@pytest.mark.parametrize("residual_dtype", RESIDUAL_DTYPES)
def test_zeros_stay_exact(backend: str, residual_dtype: str) -> None:
    """Field case 70: blocks of zeros, also with a residual, give no NaN and lose nothing."""
    config = LoCoConfig.from_dict({"residual_dtype": residual_dtype, "block_size": 32})
    exchange, zeros = one_tensor(backend, config, (2, 96)), torch.zeros(2, 96)
    assert not exchange.reduce(exchange.compress(zeros), 0.5).any()
    e = torch.zeros(2, 96)
    e[1, 32:64] = values_of_kind("normal", (1, 32), 0)
    exchange.load("0", e)
    for _ in range(3):
        output = exchange.reduce(exchange.compress(zeros), 0.5)
        assert not output[:32].any() and output[32:64].any() and not output[64:].any()


@every_quick_backend
@settings(max_examples=30)
@given(config=configs(scale="block"), seed=seeds, kind=st.sampled_from(KINDS[:4]))
def test_negation_negates(backend: str, config: LoCoConfig, seed: int, kind: str) -> None:
    """Field case 71: Q(-x) = -Q(x), the residual too, so that no side is favoured."""
    compare_signs(backend, config, values_of_kind(kind, (1, 200), seed))


@every_backend
@pytest.mark.parametrize("bits", BITS)
def test_no_side_is_favoured(backend: str, bits: int) -> None:
    """Field case 71: on normal values, and on +1 and -1 in equal number."""
    config = LoCoConfig.from_dict({"bits": bits, "feedback_gain": 1.0})
    x = torch.cat([values_of_kind("normal", (1, 128), 0), torch.ones(1, 128)], dim=1)
    x[0, 129::2] = -1.0
    compare_signs(backend, config, x)


def compare_signs(backend: str, config: LoCoConfig, x: torch.Tensor) -> None:
    """Two calls with ``x``, and two with ``-x``, whose results are the negated ones."""
    found = []
    for sign in (1.0, -1.0):
        exchange = one_tensor(backend, config, (1, x.shape[1]))
        outputs = [exchange.reduce(exchange.compress(sign * x), 1.0) for _ in range(2)]
        residual = exchange.residual() if config.feedback != "none" else torch.zeros(0)
        found.append([*outputs, residual])
    assert all(torch.equal(plus, -minus) for plus, minus in zip(*found, strict=True))


@every_backend
def test_golden_bytes(backend: str) -> None:
    """Field case 72: code i in the low nibble of byte i, code i + B/2 in the high one."""
    codes = [1, 7, -8, 0, 3, -1, 2, 5, -2, -7, 6, 0, -3, 1, -4, -5]
    exchange = one_tensor(backend, LoCoConfig(block_size=16), (1, 16))
    payload = exchange.compress(torch.tensor([codes]).float())
    assert bytes(payload[0, 16:24].tolist()).hex() == "e1976800d31fc2b5"
    assert exchange.reduce(payload, 1.0).tolist() == codes


@every_backend
@pytest.mark.parametrize("bits", BITS)
def test_every_byte_decodes(backend: str, bits: int) -> None:
    """Field case 73: all 256 values of a byte, signs extended, neighbours untouched."""
    size = 256 * 8 // bits
    config = LoCoConfig.from_dict({"bits": bits, "block_size": size})
    exchange = one_tensor(backend, config, (1, size))
    payload = torch.zeros(1, exchange.layout.row_bytes, dtype=torch.uint8)
    exchange.layout.codes(payload, 0)[0] = torch.arange(256, dtype=torch.uint8)
    exchange.layout.steps(payload, 0).fill_(1.0)
    raw = torch.arange(256).to(torch.uint8).view(torch.int8).int()
    halves = (raw << 28 >> 28, raw >> 4) if bits == 4 else (raw,)
    assert torch.equal(exchange.reduce(payload, 1.0).int(), torch.cat(halves))


@every_backend
def test_five_runs_give_the_same_bits(backend: str) -> None:
    """Field case 74: rounding is to nearest and deterministic; no random number is drawn."""
    x = values_of_kind("spread", (2, 500), 0)
    state = torch.random.get_rng_state()
    runs = []
    for _ in range(5):
        exchange = one_tensor(backend, LoCoConfig(), (2, 500))
        runs.append((exchange.compress(x), exchange.compress(x), exchange.residual()))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))
    assert torch.equal(torch.random.get_rng_state(), state)


# NaN, infinity, loss scale


@every_quick_backend
@pytest.mark.parametrize("residual_dtype", RESIDUAL_DTYPES)
@pytest.mark.parametrize("scale", SCALES)
@settings(max_examples=20)
@given(data=st.data(), loss_scale=loss_scales, value=st.sampled_from(NONFINITE))
def test_nonfinite_block_keeps_its_residual(
    backend: str,
    residual_dtype: str,
    scale: str,
    data: st.DataObject,
    loss_scale: float | None,
    value: float,
) -> None:
    """Field case 54: the reduced block is not finite, its residual keeps the old bits.

    The other blocks' residuals are those of the same call without the bad element.
    """
    config = data.draw(
        configs(residual_dtype=residual_dtype, scale=scale, block_size=16, feedback="classic")
    )
    kept = data.draw(gradients(2, 50, dtypes=(torch.float32,), kinds=KINDS[:4]))
    x = values_of_kind("normal", (2, 50), 0)
    dirty = x.clone()
    dirty[1, data.draw(st.integers(16, 31))] = value
    found, clean = (one_tensor(backend, config, (2, 50)) for _ in range(2))
    for exchange in (found, clean):
        exchange.load("0", kept)
    before = found.residual()
    payload = found.compress(dirty, loss_scale)
    clean.compress(x, loss_scale)
    bad = torch.zeros(2, 50, dtype=torch.bool)
    bad[1, 16:32] = True
    assert found.nonfinite == 1
    assert torch.equal(found.residual()[bad], before[bad])
    assert torch.equal(found.residual()[~bad], clean.residual()[~bad])
    output = found.reduce(payload, 0.5)
    assert bool(output[16:32].isnan().all())
    if scale == "block":
        assert bool(output[:16].isfinite().all()) and bool(output[32:].isfinite().all())


@every_backend
@pytest.mark.parametrize("residual_dtype", RESIDUAL_DTYPES)
def test_residual_stays_finite_under_a_run_of_overflows(backend: str, residual_dtype: str) -> None:
    """Gradients at the end of float32, four times, with either sign: nothing bad is stored."""
    config = LoCoConfig.from_dict({"residual_dtype": residual_dtype, "feedback": "classic"})
    exchange = one_tensor(backend, config, (1, 256))
    x = values_of_kind("huge", (1, 256), 0)
    for sign in (1.0, 1.0, -1.0, 1.0):
        exchange.compress(sign * x)
        assert bool(exchange.residual().isfinite().all())


@every_backend
@pytest.mark.parametrize("residual_dtype", RESIDUAL_DTYPES)
def test_infinite_loss_scale(backend: str, residual_dtype: str) -> None:
    """Blocks with memory are not finite, and keep it; those without do not notice."""
    config = LoCoConfig.from_dict({"residual_dtype": residual_dtype, "block_size": 16})
    segments = cut_into_segments([50, 30], ["codes", "codes"])
    unit = Exchange(backend, config, segments, 2, forgetful=["1"])
    unit.load("0", values_of_kind("normal", (2, 50), 0))
    payload = unit.compress(values_of_kind("normal", (2, 80), 1), torch.inf, measure=True)
    output = unit.reduce(payload, 1.0)
    assert bool(output[:50].isnan().all()) and bool(output[50:].isfinite().all())


@every_quick_backend
@settings(max_examples=20)
@given(config=configs(scale="block"), seed=seeds, exponent=st.integers(-20, 20))
def test_loss_scale_moves_only_the_steps(
    backend: str, config: LoCoConfig, seed: int, exponent: int
) -> None:
    """A power of two: same codes, same residual in unscaled units, as without a scaler."""
    plain, scaled = (one_tensor(backend, config, (2, 200)) for _ in range(2))
    factor = 2.0**exponent
    for call in range(3):
        x = values_of_kind("normal", (2, 200), seed + call)
        expected, payload = plain.compress(x), scaled.compress(x * factor, factor)
        layout = plain.layout
        assert torch.equal(layout.codes(payload, 0), layout.codes(expected, 0))
        assert torch.equal(layout.steps(payload, 0), layout.steps(expected, 0) * factor)
        if config.feedback != "none":
            assert torch.equal(scaled.residual(), plain.residual())

"""The kernels give the bits of the reference, and touch no byte that is not theirs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loco_fsdp import LoCoConfig, ResidualState, kernels, reference
from loco_fsdp.codecs import CODECS
from loco_fsdp.kernels import CallStats
from loco_fsdp.payload import PayloadLayout, single_segment
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

MARKER = 0xA5
CPU = torch.device("cpu")
loss_scales = st.sampled_from((None, 1.0, 3.0, 2.0**-20, 65536.0))
piece_sizes = st.sampled_from((1, 32, 100, 256 * 1024))


@contextmanager
def pieces_of(numel: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "PIECE_NUMEL", numel)
        yield


def zero_residual(config: LoCoConfig, rows: int, numel: int) -> ResidualState:
    state = ResidualState(config)
    state.allocate(rows, numel, CPU)
    return state


def no_stats(measure: bool = False) -> CallStats:
    zero = torch.zeros((), dtype=torch.float64)
    counter = torch.zeros((), dtype=torch.int64)
    return CallStats(counter, zero.clone(), zero.clone()) if measure else CallStats(counter)


@dataclass
class Marked:
    """Codes and steps cut out of marked memory, each part with marker bytes on both sides."""

    memory: Tensor
    codes: Tensor
    steps: Tensor

    def intact(self) -> bool:
        """Whether every byte outside codes and steps is still a marker."""
        self.codes.fill_(MARKER)
        self.steps.view(torch.uint8).fill_(MARKER)
        return bool((self.memory == MARKER).all())


def marked(rows: int, layout: PayloadLayout) -> Marked:
    code_bytes = layout.slots[0].data.stop - layout.slots[0].data.start
    step_bytes = 2 * layout.num_steps(layout.segments[0])
    start = 16 + code_bytes + 16
    start += start % 2  # a view as bfloat16 has to be aligned
    memory = torch.full((rows, start + step_bytes + 16 & ~1), MARKER, dtype=torch.uint8)
    steps = memory[:, start : start + step_bytes].view(torch.bfloat16)
    return Marked(memory, memory[:, 16 : 16 + code_bytes], steps)


def run_compress(
    x: Tensor,
    residual: ResidualState | None,
    config: LoCoConfig,
    loss_scale: Tensor | None = None,
    stats: CallStats | None = None,
) -> Tensor:
    """One call of the kernel, as the whole payload that the reference would give."""
    layout = single_segment(config, x.shape[1])
    payload = torch.zeros(x.shape[0], layout.row_bytes, dtype=torch.uint8)
    payload[:, :16] = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
    out = marked(x.shape[0], layout)
    stats = stats or no_stats()
    kernels.compress(x, residual, out.codes, out.steps, config, stats, loss_scale)
    layout.codes(payload, 0).copy_(out.codes)
    layout.steps(payload, 0).view(torch.int16).copy_(out.steps.view(torch.int16))
    assert out.intact()
    return payload


def run_decompress(
    payload: Tensor, numel: int, config: LoCoConfig, factor: float, dtype: torch.dtype
) -> Tensor:
    """One call of the kernel into a NaN-filled stretch of marked memory."""
    layout = single_segment(config, numel)
    memory = torch.full((numel + 32,), 1234.0, dtype=dtype)
    output = memory[16 : 16 + numel].fill_(torch.nan)
    codes, steps = layout.codes(payload, 0), layout.steps(payload, 0)
    kernels.decompress_sum(codes, steps, config, factor, output)
    assert bool((memory[:16] == 1234.0).all()) and bool((memory[16 + numel :] == 1234.0).all())
    return output.clone()


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    """Equal values and signs of zero; NaN equals NaN."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert torch.equal(found.isnan(), expected.isnan())
    found, expected = found.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0)
    assert torch.equal(found, expected) and torch.equal(found.signbit(), expected.signbit())


# Equal to the reference


@settings(max_examples=200)
@given(data=st.data(), config=configs(), piece=piece_sizes, scale=loss_scales)
def test_compress_is_the_reference(
    data: st.DataObject, config: LoCoConfig, piece: int, scale: float | None
) -> None:
    """Payload and residual over four calls, some with NaN and infinities, in pieces of any size."""
    dtype = data.draw(st.sampled_from(FLOAT_DTYPES))
    shape = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 300)))
    loss_scale = None if scale is None else torch.tensor(scale)
    residual, stored = zero_residual(config, *shape), zero_residual(config, *shape)
    with_feedback = config.feedback != "none"
    for call in range(4):
        x = data.draw(gradients(*shape, dtypes=(dtype,), nonfinite=call == 2))
        with pieces_of(piece):
            payload = run_compress(x, residual if with_feedback else None, config, loss_scale)
        e = stored.dense()
        h = reference.compensate(x, e, loss_scale)
        assert torch.equal(payload, reference.compress(h, config))
        if with_feedback:
            stored.load_dense(reference.update_residual(e, h, config, loss_scale))
        assert_same_bits(residual.dense(), stored.dense())


@given(
    data=st.data(),
    config=configs(),
    piece=piece_sizes,
    world_size=st.integers(1, 5),
    numel=st.integers(1, 300),
    factor=st.sampled_from((1.0, 1 / 3, 0.2, -2.0)),
    dtype=st.sampled_from(FLOAT_DTYPES),
)
def test_decompress_sum_is_the_reference(
    data: st.DataObject,
    config: LoCoConfig,
    piece: int,
    world_size: int,
    numel: int,
    factor: float,
    dtype: torch.dtype,
) -> None:
    """Every element of the output is written, nothing beside it."""
    nonfinite = data.draw(st.booleans())
    x = data.draw(gradients(world_size, numel, nonfinite=nonfinite))
    payload = reference.compress(x, config)
    rows = reference.decompress(payload, numel, config)
    with pieces_of(piece):
        output = run_decompress(payload, numel, config, factor, dtype)
    assert_same_bits(output, reference.reduce(rows, factor).to(dtype))


@given(
    values=gradients(rows=st.integers(1, 5), numel=st.integers(0, 300), nonfinite=True),
    factor=st.sampled_from((1.0, 1 / 3, 0.5)),
    dtype=st.sampled_from(FLOAT_DTYPES),
)
def test_sum_rows_is_the_reference(values: Tensor, factor: float, dtype: torch.dtype) -> None:
    """In float32, float64 rows in float64."""
    output = torch.full((values.shape[1],), torch.nan, dtype=dtype)
    kernels.sum_rows(values, factor, output)
    wide = values if values.dtype == torch.float64 else values.float()
    assert_same_bits(output, reference.reduce(wide, factor).to(dtype))


@pytest.mark.parametrize("bits", BITS)
def test_sums_are_taken_in_rank_order(bits: int) -> None:
    """2^30 + 1 is 2^30 in float32, so the order of three ranks shows."""
    config = LoCoConfig.from_dict({"bits": bits})
    big = 2.0**30
    for order, expected in (((big, 1.0, -big), 0.0), ((big, -big, 1.0), 1.0)):
        x = torch.tensor(order).unsqueeze(1)
        payload = reference.compress(x, config)
        assert run_decompress(payload, 1, config, 1.0, torch.float32).tolist() == [expected]
        output = torch.full((1,), torch.nan)
        kernels.sum_rows(x, 1.0, output)
        assert output.tolist() == [expected]


@pytest.mark.parametrize("numel", [1, 15, 16, 129, 910, 2305, 256 * 1024 + 130])
def test_sizes_around_real_pieces(numel: int) -> None:
    """With the piece size in use, whole and cut."""
    config = LoCoConfig()
    residual = zero_residual(config, 2, numel)
    e = torch.zeros(2, numel)
    for call in range(2):
        x = values_of_kind("normal", (2, numel), call)
        h = reference.compensate(x, e)
        payload = run_compress(x, residual, config)
        assert torch.equal(payload, reference.compress(h, config))
        e = residual.dense()
        rows = reference.decompress(payload, numel, config)
        output = run_decompress(payload, numel, config, 0.5, torch.float32)
        assert_same_bits(output, reference.reduce(rows, 0.5))


# Bytes that are not theirs


@pytest.mark.parametrize("block_size", [16, 18, 128])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("scale", sorted(CODECS))
def test_marker_bytes_stay_intact(scale: str, bits: int, block_size: int) -> None:
    """Field case 67: 1 to 33 blocks, buffers cut from marked memory (checked by the helpers)."""
    chosen = {"scale": scale, "bits": bits, "block_size": block_size, "static_scale": 4.0}
    config = LoCoConfig.from_dict(chosen)
    for blocks in range(1, 34):
        numel = blocks * block_size - blocks % 3  # the last block short in two cases of three
        residual = zero_residual(config, 2, numel)
        x = values_of_kind("normal", (2, numel), blocks)
        for _ in range(2):
            with pieces_of(8 * block_size):
                payload = run_compress(x, residual, config)
                run_decompress(payload, numel, config, 1.0, torch.float32)


@pytest.mark.parametrize("garbage", [1e30, torch.nan])
@pytest.mark.parametrize("residual_dtype", RESIDUAL_DTYPES)
def test_memory_after_the_gradient_is_not_read(residual_dtype: str, garbage: float) -> None:
    """Field case 68: garbage behind the 2 elements of the last block reaches neither the step
    nor the residual."""
    config = LoCoConfig.from_dict({"residual_dtype": residual_dtype})
    memory = torch.full((2, 256), garbage)
    memory[:, :130] = values_of_kind("normal", (2, 130), 0)
    states = [zero_residual(config, 2, 130) for _ in range(2)]
    payloads = []
    for state, x in zip(states, (memory[:, :130], memory[:, :130].clone()), strict=True):
        payloads.append([run_compress(x, state, config) for _ in range(2)])
    assert all(torch.equal(a, b) for a, b in zip(*payloads, strict=True))
    assert torch.equal(states[0].dense(), states[1].dense())


@given(config=configs(), seed=seeds, piece=piece_sizes)
def test_strides_do_not_matter(config: LoCoConfig, seed: int, piece: int) -> None:
    """Field case 69: non-contiguous gradients and outputs, as their contiguous copies."""
    memory = values_of_kind("normal", (8, 60), seed)
    views = [memory[::2], memory[:, ::2], memory.t(), memory[:1].expand(3, -1)]
    views += [memory[:4, :1].expand(-1, 50), memory.view(-1)[1:151].view(3, 50)]
    for view in views:
        states = [zero_residual(config, view.shape[0], view.shape[1]) for _ in range(2)]
        with pieces_of(piece):
            payload = run_compress(view, states[0], config)
            assert torch.equal(payload, run_compress(view.clone(), states[1], config))
        assert torch.equal(states[0].dense(), states[1].dense())
        numel = view.shape[1]
        layout, wide = single_segment(config, numel), torch.full((2 * numel,), 7.0)
        codes, steps = layout.codes(payload, 0), layout.steps(payload, 0)
        kernels.decompress_sum(codes, steps, config, 1.0, wide[::2])
        assert_same_bits(
            wide[::2].clone(), run_decompress(payload, numel, config, 1.0, torch.float32)
        )
        assert bool((wide[1::2] == 7.0).all())


@given(config=configs())
def test_no_elements_after_some(config: LoCoConfig) -> None:
    """Field case 76: after a call with elements, a call with none is one of none."""
    for numel in (200, 0):
        for dtype in FLOAT_DTYPES:
            x = torch.ones(3, numel, dtype=dtype)
            residual, stats = zero_residual(config, 3, numel), no_stats(measure=True)
            payload = run_compress(x, residual, config, stats=stats)
            assert payload.shape == (3, single_segment(config, numel).row_bytes)
            assert residual.dense().shape == (3, numel)
            output = run_decompress(payload, numel, config, 1.0, dtype)
            assert output.shape == (numel,) and output.dtype == dtype
            values = torch.full((numel,), torch.nan, dtype=dtype)
            kernels.sum_rows(x, 0.5, values)
            assert values.tolist() == [1.5] * numel
            assert int(stats.nonfinite_blocks) == 0


# NaN and infinity


@pytest.mark.parametrize("residual_dtype", RESIDUAL_DTYPES)
@pytest.mark.parametrize("scale", sorted(CODECS))
@pytest.mark.parametrize("value", NONFINITE, ids=str)
@given(data=st.data(), loss_scale=loss_scales)
def test_nonfinite_block_keeps_its_residual(
    residual_dtype: str, scale: str, value: float, data: st.DataObject, loss_scale: float | None
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
    found, clean = ResidualState(config), ResidualState(config)
    factor = None if loss_scale is None else torch.tensor(loss_scale)
    for state in (found, clean):
        state.load_dense(kept)
    before = found.dense()
    payload = run_compress(dirty, found, config, factor)
    run_compress(x, clean, config, factor)
    bad = torch.zeros(2, 50, dtype=torch.bool)
    bad[1, 16:32] = True
    assert bool(found.dense().isfinite().all())
    assert_same_bits(found.dense()[bad], before[bad])
    assert_same_bits(found.dense()[~bad], clean.dense()[~bad])
    output = run_decompress(payload, 50, config, 0.5, torch.float32)
    assert bool(output[16:32].isnan().all())
    if scale == "block":
        assert bool(output[:16].isfinite().all()) and bool(output[32:].isfinite().all())


@pytest.mark.parametrize("residual_dtype", RESIDUAL_DTYPES)
def test_residual_stays_finite_under_a_run_of_overflows(residual_dtype: str) -> None:
    """Gradients at the end of float32, four times, with either sign: nothing bad is stored."""
    config = LoCoConfig.from_dict({"residual_dtype": residual_dtype, "feedback": "classic"})
    residual = zero_residual(config, 1, 256)
    x = values_of_kind("huge", (1, 256), 0)
    for sign in (1.0, 1.0, -1.0, 1.0):
        run_compress(sign * x, residual, config)
        assert bool(residual.dense().isfinite().all())


# Loss scale


@given(config=configs(scale="block"), seed=seeds, exponent=st.integers(-20, 20))
def test_loss_scale_moves_only_the_steps(config: LoCoConfig, seed: int, exponent: int) -> None:
    """A power of two: same codes, same residual in unscaled units, as without a scaler."""
    plain, scaled = zero_residual(config, 2, 200), zero_residual(config, 2, 200)
    factor = torch.tensor(2.0**exponent)
    layout = single_segment(config, 200)
    for call in range(3):
        x = values_of_kind("normal", (2, 200), seed + call)
        expected = run_compress(x, plain, config)
        payload = run_compress(x * factor, scaled, config, factor)
        assert torch.equal(layout.codes(payload, 0), layout.codes(expected, 0))
        assert torch.equal(layout.steps(payload, 0), layout.steps(expected, 0) * factor)
        assert_same_bits(scaled.dense(), plain.dense())


# Figures


@given(data=st.data(), config=configs(), piece=piece_sizes)
def test_stats_are_those_of_the_call(data: st.DataObject, config: LoCoConfig, piece: int) -> None:
    """Error and norm over the finite blocks, the others counted; calls add up."""
    stats, counted = no_stats(measure=True), no_stats()
    bad_blocks, error, norm = 0, 0.0, 0.0
    codec, size = CODECS[config.scale](config), config.block_size
    for call in range(2):
        h = data.draw(gradients(3, 200, kinds=KINDS[:4], nonfinite=call == 1)).float()
        with pieces_of(piece):
            run_compress(h, None, config, stats=stats)
            run_compress(h, None, config, stats=counted)
        for block in h.split(size, dim=1):
            decoded = codec.decode(*codec.encode(block))
            good = block.isfinite().all(1)
            bad_blocks += int((~good).sum())
            error += float((block - decoded)[good].double().square().sum())
            norm += float(block[good].double().square().sum())
    assert int(stats.nonfinite_blocks) == int(counted.nonfinite_blocks) == bad_blocks
    assert stats.squared_error is not None and stats.squared_norm is not None
    assert float(stats.squared_error) == pytest.approx(error, rel=1e-9)
    assert float(stats.squared_norm) == pytest.approx(norm, rel=1e-9)
    assert stats.relative_error() == pytest.approx((error / norm) ** 0.5 if norm else 0.0)
    assert counted.squared_error is None and counted.relative_error() is None


def test_figures_do_not_change_the_result() -> None:
    config, x = LoCoConfig(), values_of_kind("spread", (2, 300), 0)
    states = [zero_residual(config, 2, 300) for _ in range(2)]
    asked: list[Any] = [no_stats(measure=True), no_stats()]
    payloads = [
        run_compress(x, state, config, stats=stats)
        for state, stats in zip(states, asked, strict=True)
    ]
    assert torch.equal(*payloads)
    assert torch.equal(states[0].dense(), states[1].dense())


def test_feedback_none_sends_without_memory() -> None:
    config = replace(LoCoConfig(), feedback="none")
    x = values_of_kind("normal", (2, 300), 0)
    first = run_compress(x, None, config)
    assert torch.equal(run_compress(x, None, config), first)
    assert torch.equal(first, reference.compress(x, config))

"""The definition itself: what it gives, and the identities that it has to keep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from loco_fsdp import LoCoConfig, ResidualState
from loco_fsdp.codecs import CODECS
from loco_fsdp.payload import single_segment
from loco_fsdp.reference import compensate, compress, decompress, reduce, update_residual
from strategies import BITS, FLOAT_DTYPES, NONFINITE, configs, gradients, seeds

EXACT = LoCoConfig(residual_dtype="float32", block_size=16)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# compress and decompress


@given(h=gradients(nonfinite=True), config=configs())
def test_each_block_is_coded_on_its_own(h: Tensor, config: LoCoConfig) -> None:
    """Decoding a payload gives what the codec gives block by block, short last block included."""
    codec = CODECS[config.scale](config)
    blocks = h.float().split(config.block_size, dim=1)
    expected = torch.cat([codec.decode(*codec.encode(block)) for block in blocks], dim=1)
    if config.scale == "static":  # one step a row: NaN anywhere is NaN everywhere
        expected[~h.float().isfinite().all(1)] = torch.nan
    found = decompress(compress(h, config), h.shape[1], config)
    assert found.shape == h.shape and found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@given(h=gradients(), config=configs())
def test_rows_do_not_depend_on_each_other(h: Tensor, config: LoCoConfig) -> None:
    payload = compress(h, config)
    for row in range(h.shape[0]):
        assert torch.equal(compress(h[row : row + 1], config)[0], payload[row])


@given(h=gradients(), config=configs())
def test_any_dtype_as_its_float32(h: Tensor, config: LoCoConfig) -> None:
    assert torch.equal(compress(h, config), compress(h.float(), config))


def test_elements_at_the_boundary_of_two_ranks() -> None:
    """Field case 2: 9 elements per destination; 8 of rank 0 and 0 of rank 1 share no byte."""
    h = torch.arange(-9.0, 9.0).view(2, 9)
    for bits in BITS:
        config = LoCoConfig.from_dict({"bits": bits})
        decoded = decompress(compress(h, config), 9, config)
        assert float((decoded - h).abs().max()) <= 9 / 2**bits  # half a step
        other = h.clone()
        other[0, 8] = 5.0
        payload = compress(other, config)
        assert torch.equal(payload[1], compress(h, config)[1])
        assert not torch.equal(payload[0], compress(h, config)[0])


@pytest.mark.parametrize("numel", [577, 385, *range(1, 34)])
def test_no_size_is_refused(numel: int) -> None:
    """Field case 3: shares of a 2305-element weight on 4 and 6 ranks, and every small size."""
    h = normal(4, numel)
    layout = single_segment(LoCoConfig(), numel)
    payload = compress(h)
    assert payload.shape == (4, layout.row_bytes)
    decoded = decompress(payload, numel)
    assert decoded.shape == h.shape
    bound = h.abs().amax(1, keepdim=True) * 0.127
    assert bool(((decoded - h).abs() <= bound).all())


@pytest.mark.parametrize("garbage", [1e30, torch.nan])
@pytest.mark.parametrize("scale", sorted(CODECS))
def test_memory_after_the_last_element_is_not_read(scale: str, garbage: float) -> None:
    """Field case 68: 130 elements, the last block holds 2, garbage behind them."""
    config = LoCoConfig.from_dict({"scale": scale, "static_scale": 4.0})
    memory = torch.full((2, 256), garbage)
    memory[:, :130] = normal(2, 130)
    clean = memory[:, :130].clone()
    payload = compress(memory[:, :130], config)
    assert torch.equal(payload, compress(clean, config))
    last = decompress(payload, 130, config)[:, 128:]
    assert bool(((last - clean[:, 128:]).abs() <= 0.127).all())
    # Padding is zero on the wire: codes beyond the second of the last block, and the fill.
    codes = single_segment(config, 130).codes(payload, 0)[:, 64:]
    assert not (codes[:, :2] & 0xF0).any() and not codes[:, 2:].any()


@given(config=configs(), seed=seeds)
def test_strides_do_not_matter(config: LoCoConfig, seed: int) -> None:
    """Field case 69: every second row or column, transposed, expanded, at an odd offset."""
    memory = normal(40, 60, seed=seed)
    views = {
        "rows": memory[::2],
        "columns": memory[:, ::2],
        "transposed": memory.t(),
        "expanded": memory[:1].expand(3, -1),
        "expanded column": memory[:4, :1].expand(-1, 50),
        "offset": memory.view(-1)[1 : 1 + 3 * 50].view(3, 50),
    }
    for name, view in views.items():
        assert torch.equal(compress(view, config), compress(view.clone(), config)), name
        contiguous = view.contiguous()
        e = contiguous * 0.125
        new = update_residual(e, view, config)
        assert torch.equal(new, update_residual(e, contiguous, config)), name


@given(config=configs())
def test_no_elements_after_some(config: LoCoConfig) -> None:
    """Field case 76: a row of none is a header, and everything else is empty."""
    compress(torch.ones(3, 200), config)
    for dtype in FLOAT_DTYPES:
        payload = compress(torch.empty(3, 0, dtype=dtype), config)
        assert payload.shape == (3, 16)
        assert bytes(payload[0].tolist()) == single_segment(config, 0).header
        decoded = decompress(payload, 0, config)
        assert decoded.shape == (3, 0) and decoded.dtype == torch.float32
    assert update_residual(torch.empty(3, 0), torch.empty(3, 0), config).shape == (3, 0)
    assert reduce(torch.empty(3, 0), 0.5).shape == (0,)


def test_wrong_payload_is_refused() -> None:
    payload = compress(torch.ones(2, 200))
    wrong: list[tuple[Any, int, LoCoConfig, str]] = [
        (payload.float(), 200, LoCoConfig(), "torch.float32"),
        (payload[0], 200, LoCoConfig(), r"\(160,\)"),
        (payload[:, :-16], 200, LoCoConfig(), r"\(2, 144\).*wanted torch.uint8 \[W, 160\]"),
        (payload, 300, LoCoConfig(), r"for 300 elements a row"),
        (payload, 199, LoCoConfig(), "header of another layout.*199 codes"),
        (payload, 200, LoCoConfig(bits=8, block_size=64), r"8 bits, block size 64"),
    ]
    for tensor, numel, config, message in wrong:
        with pytest.raises(ValueError, match=message):
            decompress(tensor, numel, config)


# compensate, update_residual, reduce


def test_compensate_adds_in_float32() -> None:
    """Field case 61: a bfloat16 gradient does not cut the residual that is added to it."""
    x = torch.tensor([[1.0, 256.0]], dtype=torch.bfloat16)
    e = torch.tensor([[2.0**-12, 0.5]])
    h = compensate(x, e)
    assert h.dtype == torch.float32 and h.tolist() == [[1 + 2.0**-12, 256.5]]
    assert compensate(x, e, torch.tensor(8.0)).tolist() == [[1 + 2.0**-9, 260.0]]


@given(h=gradients(dtypes=(torch.float32,), kinds=("normal", "ties", "zeros")), config=configs())
def test_residual_is_a_moving_average_of_the_error(h: Tensor, config: LoCoConfig) -> None:
    e = h.flip(0) * 0.3
    error = h - decompress(compress(h, config), h.shape[1], config)
    expected = (1 - config.gain) * e.double() + config.gain * error.double()
    torch.testing.assert_close(
        update_residual(e, h, config).double(), expected, rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("value", NONFINITE, ids=str)
@given(config=configs(block_size=16))
def test_nonfinite_block_keeps_its_residual(value: float, config: LoCoConfig) -> None:
    """Field case 54: the old bits in that block, an update in all others, nothing non-finite."""
    h, e = normal(2, 50), normal(2, 50, seed=1)
    clean = update_residual(e, h, config)
    h[1, 20] = value
    found = update_residual(e, h, config)
    assert torch.equal(found[1, 16:32], e[1, 16:32])
    assert torch.equal(found[0], clean[0])
    assert torch.equal(found[1, :16], clean[1, :16]) and torch.equal(found[1, 32:], clean[1, 32:])


def test_reduce_sums_in_rank_order() -> None:
    """In float32 from rank 0 on, then the factor."""
    big = torch.tensor([[1e8], [1.0], [-1e8]])
    assert reduce(big, 1.0).item() == 0.0  # 1e8 + 1 is 1e8 in float32
    assert reduce(big[[0, 2, 1]], 1.0).item() == 1.0
    assert reduce(big[[0, 2, 1]], 0.25).item() == 0.25


# Conservation: nothing is lost, only delayed

gains = st.one_of(st.sampled_from((0.2, 1.0)), st.floats(2.0**-10, 1.0))
moderate = ("normal", "ties", "zeros")


def conserves(
    xs: list[Tensor], e: Tensor, config: LoCoConfig, scales: list[float] | None = None
) -> None:
    """Assert ``sum decoded + e_K / gain = sum x + e_0 / gain``, element by element, to 1e-5.

    Relative to the sum of magnitudes. With ``scales``, ``x_k`` is sent as ``scales[k] * x_k``.
    """
    gain = config.gain
    total, magnitude = e.double() / gain, e.double().abs() / gain
    sent = torch.zeros_like(total)
    for index, x in enumerate(xs):
        scale = None if scales is None else torch.tensor(scales[index])
        factor = 1.0 if scale is None else float(scale)
        h = compensate(x * factor, e, scale)
        sent += decompress(compress(h, config), h.shape[1], config).double() / factor
        e = update_residual(e, h, config, scale)
        total += x.double()
        magnitude += x.double().abs()
    left = sent + e.double() / gain
    assert bool(((left - total).abs() <= 1e-5 * magnitude).all())


@given(data=st.data(), gain=gains, steps=st.integers(1, 25), config=configs(feedback="classic"))
def test_conservation(data: st.DataObject, gain: float, steps: int, config: LoCoConfig) -> None:
    """For every codec, gain, number of steps and shape, saturating static codes included."""
    config = replace(config, feedback="moving_average", feedback_gain=gain)
    shape = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 150)))
    exponent = data.draw(st.integers(-40, 40))
    xs = [
        data.draw(gradients(*shape, dtypes=FLOAT_DTYPES[:3], kinds=moderate)).float()
        * 2.0**exponent
        for _ in range(min(steps, 3))
    ]
    e = gain * 2.0**exponent * normal(*shape)
    conserves([xs[step % len(xs)] for step in range(steps)], e, config)


@given(seed=seeds, scales=st.lists(st.sampled_from((1.0, 3.0, 1024.0, 65536.0)), min_size=2))
def test_conservation_while_the_loss_scale_changes(seed: int, scales: list[float]) -> None:
    """The residual is in unscaled units, so the sum holds in those."""
    xs = [normal(2, 70, seed=seed + step) for step in range(len(scales))]
    conserves(xs, torch.zeros(2, 70), EXACT, scales)


@given(seed=seeds, world_size=st.integers(1, 5), numel=st.integers(1, 60), gain=gains)
def test_conservation_of_the_average(seed: int, world_size: int, numel: int, gain: float) -> None:
    """On the owner, with the mean of the ranks' residuals."""
    config = replace(EXACT, feedback_gain=gain)
    residuals = [torch.zeros(world_size, numel) for _ in range(world_size)]
    sent = torch.zeros(world_size, numel, dtype=torch.float64)
    total, magnitude = torch.zeros_like(sent), torch.zeros_like(sent)
    for step in range(12):
        received = []
        for rank in range(world_size):
            x = normal(world_size, numel, seed=seed + 10 * step + rank)
            h = compensate(x, residuals[rank])
            received.append(decompress(compress(h, config), numel, config))
            residuals[rank] = update_residual(residuals[rank], h, config)
            total += x.double() / world_size
            magnitude += x.double().abs() / world_size
        for owner in range(world_size):
            sent[owner] += reduce(torch.stack([r[owner] for r in received]), 1 / world_size)
    left = sent + torch.stack(residuals).double().mean(0) / gain
    assert bool(((left - total).abs() <= 1e-5 * magnitude).all())


# Zeros


@pytest.mark.parametrize("residual_dtype", ["int8", "bfloat16", "float32"])
def test_rows_of_an_embedding_that_are_not_used_stay_zero(residual_dtype: str) -> None:
    """Field case 70: 1000 x 64, 3 rows used, 2 ranks, 5 steps; rank 0 has none in the last two."""
    config = LoCoConfig.from_dict({"residual_dtype": residual_dtype})
    used = torch.zeros(1000, 64, dtype=torch.bool)
    used[[3, 500, 998]] = True
    states = [ResidualState(config) for _ in range(2)]
    for state in states:
        state.load_dense(torch.zeros(2, 32000))
    for step in range(5):
        received = []
        for rank, state in enumerate(states):
            x = normal(1000, 64, seed=2 * step + rank) * used
            if rank == 0 and step >= 3:
                x = torch.zeros(1000, 64)
            h = compensate(x.view(2, 32000), state.dense())
            received.append(decompress(compress(h, config), 32000, config))
            state.load_dense(update_residual(state.dense(), h, config))
        both = torch.stack(received)
        output = torch.stack([reduce(both[:, owner], 0.5) for owner in range(2)]).view(1000, 64)
        assert not output[~used].any() and bool(output.isfinite().all())
        assert all(not state.dense().view(1000, 64)[~used].any() for state in states)


def test_zero_gradient_sends_what_was_kept_back() -> None:
    """Field case 70: nothing but the residual is sent, and it gets smaller by what was sent."""
    e = normal(2, 100) * 0.1
    h = compensate(torch.zeros(2, 100), e)
    assert torch.equal(h, e)
    new = update_residual(e, h, EXACT)
    sent = decompress(compress(h, EXACT), 100, EXACT)
    torch.testing.assert_close(new, e - EXACT.gain * sent, rtol=0, atol=1e-7)
    assert float(sent.norm()) > 0.9 * float(e.norm())

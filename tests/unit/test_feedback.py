"""The residual: the rule that updates it, and what its three storages keep."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from loco_fsdp import LoCoConfig, ResidualState
from loco_fsdp.codecs import CODECS, LARGEST_BFLOAT16, RESIDUAL_CODECS
from loco_fsdp.feedback import ResidualBuffer, next_residual, to_blocks
from strategies import (
    FLOAT32_MAX,
    FLOAT_DTYPES,
    NONFINITE,
    RESIDUAL_DTYPES,
    configs,
    gradients,
    seeds,
)

every_storage = pytest.mark.parametrize("residual_dtype", RESIDUAL_DTYPES)
CPU = torch.device("cpu")
GAINS = (2.0**-20, 0.1, 0.2, 1 / 3, 0.5, 1.0)


def config_of(residual_dtype: str, **settings: Any) -> LoCoConfig:
    return LoCoConfig.from_dict({"residual_dtype": residual_dtype, **settings})


def stored(values: Tensor, config: LoCoConfig) -> Tensor:
    """What a residual of the block codec should hold of ``values`` ``[W, N]``."""
    if config.residual_dtype == "float32":
        return values
    if config.residual_dtype == "bfloat16":
        return values.clamp(-LARGEST_BFLOAT16, LARGEST_BFLOAT16).to(torch.bfloat16).float()
    if values.shape[1] == 0:
        return values
    size, codec = config.block_size, RESIDUAL_CODECS[config.scale](config)
    parts = [codec.decode(*codec.encode(part)) for part in values.split(size, dim=1)]
    return torch.cat(parts, dim=1)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


# The rule


def float32(value: float) -> float:
    """Round to float32: exact for products and sums of two float32 (53 >= 2 * 24 + 2)."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


small = st.floats(-(2.0**100), 2.0**100, width=32)


@pytest.mark.parametrize("gain", GAINS)
@given(pairs=st.lists(st.tuples(small, small), min_size=1, max_size=40))
def test_next_residual_rounds_each_operation(gain: float, pairs: list[tuple[float, float]]) -> None:
    """Two products and a sum, each rounded to float32; 1 - gain in double. No fused operation."""
    keep, take = float32(1.0 - gain), float32(gain)
    expected = [float32(float32(e * keep) + float32(error * take)) for e, error in pairs]
    e, error = torch.tensor(pairs, dtype=torch.float32).unbind(1)
    assert next_residual(e, error, gain).tolist() == expected


def test_classic_keeps_the_error_and_nothing_else() -> None:
    e, error = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(next_residual(e, error, 1.0), error)
    assert torch.equal(next_residual(e, error, 0.0), e)


# Blocks


@given(
    rows=st.integers(0, 3), numel=st.integers(0, 100), size=st.sampled_from((16, 18)), seed=seeds
)
def test_blocks_hold_the_rows_and_zeros(rows: int, numel: int, size: int, seed: int) -> None:
    x = torch.randn(rows, numel, generator=torch.Generator().manual_seed(seed))
    count = -(-numel // size)
    blocks = to_blocks(x, 0, count, size)
    assert blocks.shape == (rows, count, size)
    flat = blocks.flatten(1)
    assert torch.equal(flat[:, :numel], x) and not flat[:, numel:].any()
    for first in range(count):  # the same blocks in two parts
        parts = to_blocks(x, 0, first, size), to_blocks(x, first, count, size)
        assert torch.equal(torch.cat(parts, dim=1), blocks)


def test_whole_blocks_are_a_view() -> None:
    """No copy of the gradient is made but for a short last block."""
    x = torch.randn(2, 100)
    assert to_blocks(x, 1, 6, 16).data_ptr() == x[:, 16:].data_ptr()
    assert to_blocks(x, 6, 7, 16).data_ptr() != x[:, 96:].data_ptr()


# The storages


@every_storage
@pytest.mark.parametrize("scale", sorted(CODECS))
@pytest.mark.parametrize("shape", [(1, 1), (4, 130), (3, 1024), (2, 0)], ids=str)
def test_bytes_are_as_planned(residual_dtype: str, scale: str, shape: tuple[int, int]) -> None:
    config = config_of(residual_dtype, scale=scale)
    state = ResidualState(config)
    assert state.num_bytes() == 0 and state.shape is None
    state.allocate(*shape, CPU)
    assert state.shape == shape
    assert state.num_bytes() == ResidualState.planned_bytes(*shape, config)
    assert state.num_bytes() >= {"int8": 1, "bfloat16": 2, "float32": 4}[residual_dtype] * (
        shape[0] * shape[1]
    )
    assert not state.dense().any()


def test_at_most_1_02_bytes_per_element() -> None:
    for numel in (128, 12_800, 100_001, 50257 * 768):
        assert ResidualState.planned_bytes(8, numel, LoCoConfig()) <= 1.02 * 8 * numel
    assert ResidualState.planned_bytes(8, 12_800, LoCoConfig(feedback="none")) == 0


@every_storage
@given(data=st.data())
def test_load_and_dense(residual_dtype: str, data: st.DataObject) -> None:
    """``dense`` gives what the storage can hold, and loading that again changes no bit."""
    config = data.draw(
        configs(residual_dtype=residual_dtype, scale="block", feedback="moving_average")
    )
    values = data.draw(gradients(numel=st.integers(0, 400)))
    state = ResidualState(config)
    state.load_dense(values)
    assert state.shape == tuple(values.shape)
    dense = state.dense()
    assert dense.dtype == torch.float32
    assert same_bits(dense, stored(values.float(), config))
    assert bool(dense.isfinite().all())
    assert state.norm() == pytest.approx(float(dense.double().norm()), rel=1e-6)
    state.load_dense(dense)
    assert same_bits(state.dense(), dense)
    if config.residual_dtype == "int8" and values.numel():
        # Half a step; at the cut end of the range 1.25, and 1.5 where the step is clamped too.
        step = values.float().abs().amax(1, keepdim=True) / 128
        floor = 128 * 2.0**-126  # below, int8 blocks hold zeros
        assert bool(((dense - values.float()).abs() <= 1.51 * step + floor).all())


@every_storage
@given(data=st.data())
def test_states_in_one_buffer_are_those_alone(residual_dtype: str, data: st.DataObject) -> None:
    """Loading, reading and forgetting one touches no other, whatever the sizes."""
    config = data.draw(configs(residual_dtype=residual_dtype, feedback="classic"))
    sizes = data.draw(st.dictionaries(st.sampled_from("abcd"), st.integers(0, 300), min_size=1))
    rows = data.draw(st.integers(1, 4))
    buffer = ResidualBuffer(config, rows, sizes, CPU)
    alone = {name: ResidualState(config) for name in sizes}
    shared = {name: ResidualState(config) for name in sizes}
    for name, numel in sizes.items():
        shared[name].move(buffer, name)
        values = data.draw(gradients(rows, numel, dtypes=(torch.float32,)))
        for state in (alone[name], shared[name]):
            state.load_dense(values)
    forgotten = data.draw(st.sampled_from(sorted(sizes)))
    alone[forgotten].reset()
    shared[forgotten].reset()
    for name, state in shared.items():
        assert same_bits(state.dense(), alone[name].dense())
        assert state.norm() == alone[name].norm() and state.num_bytes() == alone[name].num_bytes()
    held = buffer.data.nbytes + buffer.steps.nbytes
    assert held == sum(state.num_bytes() for state in shared.values())


@every_storage
def test_near_the_largest_float32(residual_dtype: str) -> None:
    """Rounding up to bfloat16 gives no infinity, nor does an int8 block."""
    values = torch.tensor([[FLOAT32_MAX, -FLOAT32_MAX, 1.0], [-FLOAT32_MAX, 0.0, FLOAT32_MAX]])
    state = ResidualState(config_of(residual_dtype))
    state.load_dense(values)
    dense = state.dense()
    assert bool(dense.isfinite().all())
    largest = FLOAT32_MAX if residual_dtype == "float32" else LARGEST_BFLOAT16
    assert dense[0, 0].item() == largest and dense[1, 0].item() == -largest


def test_float32_storage_is_exact() -> None:
    """Field case 61: a residual that needs more than 8 bits of mantissa is not cut."""
    values = torch.tensor([[1 + 2.0**-12, -(2.0**-126), 2.0**-149, 3.0e38, 1 / 3]])
    state = ResidualState(config_of("float32"))
    state.load_dense(values)
    assert same_bits(state.dense(), values)
    state.load_dense(values.double())
    assert same_bits(state.dense(), values)


@every_storage
def test_dense_is_a_copy(residual_dtype: str) -> None:
    state = ResidualState(config_of(residual_dtype))
    values = torch.ones(2, 256)
    state.load_dense(values)
    state.dense().zero_()
    values.zero_()
    assert torch.equal(state.dense(), torch.ones(2, 256))


@every_storage
def test_loading_a_tensor_of_a_graph_keeps_no_graph(residual_dtype: str) -> None:
    state = ResidualState(config_of(residual_dtype))
    state.load_dense(torch.ones(2, 256, requires_grad=True))
    assert not state.dense().requires_grad


@every_storage
def test_reset_forgets_and_keeps_the_memory(residual_dtype: str) -> None:
    state = ResidualState(config_of(residual_dtype))
    state.reset()  # before the first use: nothing to forget
    assert state.shape is None
    state.load_dense(torch.randn(2, 300))
    held = state.num_bytes()
    state.reset()
    assert state.shape == (2, 300) and state.num_bytes() == held
    assert same_bits(state.dense(), torch.zeros(2, 300)) and state.norm() == 0.0


# What is refused


@every_storage
@pytest.mark.parametrize("bad", NONFINITE, ids=str)
def test_nonfinite_values_are_not_loaded(residual_dtype: str, bad: float) -> None:
    """Nor is anything beside them: not into a fresh state, not into a used one."""
    values = torch.ones(2, 300)
    values[1, 299] = bad
    fresh, used = ResidualState(config_of(residual_dtype)), ResidualState(config_of(residual_dtype))
    used.load_dense(torch.full((2, 300), 0.5))
    for state in (fresh, used):
        with pytest.raises(ValueError, match="NaN or infinite"):
            state.load_dense(values)
    assert fresh.shape is None and fresh.num_bytes() == 0
    assert torch.equal(used.dense(), torch.full((2, 300), 0.5))


@every_storage
def test_values_beyond_float32_are_not_loaded(residual_dtype: str) -> None:
    """Finite as float64, infinite in any storage."""
    state = ResidualState(config_of(residual_dtype))
    with pytest.raises(ValueError, match="float32"):
        state.load_dense(torch.full((2, 4), 1e300, dtype=torch.float64))
    assert state.shape is None


@every_storage
@pytest.mark.parametrize("shape", [(300,), (2, 3, 100), (2, 301), (3, 300), ()], ids=str)
def test_wrong_shape_is_not_loaded(residual_dtype: str, shape: tuple[int, ...]) -> None:
    state = ResidualState(config_of(residual_dtype))
    state.load_dense(torch.full((2, 300), 0.5))
    with pytest.raises(ValueError, match=r"The residual (is|holds) \["):
        state.load_dense(torch.ones(shape))
    assert torch.equal(state.dense(), torch.full((2, 300), 0.5))


def test_allocate_keeps_what_it_holds() -> None:
    state = ResidualState()
    state.load_dense(torch.full((2, 300), 0.5))
    state.allocate(2, 300, CPU)
    assert torch.equal(state.dense(), torch.full((2, 300), 0.5))
    with pytest.raises(ValueError, match=r"holds \[2, 300\].*gradient has \[2, 301\]"):
        state.allocate(2, 301, CPU)


def test_no_shape_before_the_first_use() -> None:
    for read in (ResidualState().dense, ResidualState().norm):
        with pytest.raises(RuntimeError, match="no shape yet"):
            read()


def test_no_feedback_keeps_no_residual() -> None:
    state = ResidualState(LoCoConfig(feedback="none"))
    with pytest.raises(ValueError, match='feedback="none" keeps no residual'):
        state.load_dense(torch.ones(2, 300))
    assert state.shape is None


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_any_float_dtype_is_loaded(dtype: torch.dtype) -> None:
    values = torch.tensor([[0.5, -0.25, 1.0]]).to(dtype)
    state = ResidualState(config_of("float32"))
    state.load_dense(values)
    assert torch.equal(state.dense(), values.float())

"""Where a parameter lies in the buffer, and which parameters are compressed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from loco_fsdp import LoCoConfig
from loco_fsdp.layout import (
    UnitParameter,
    exemption,
    exemptions,
    full_to_rows,
    rows_to_full,
    summarize,
    unit_layout,
)
from loco_fsdp.payload import PayloadLayout
from strategies import seeds


def sharded(name: str, shape: Sequence[int], world_size: int, shard_dim: int = 0) -> UnitParameter:
    """What FSDP makes of a parameter: chunks of ceil(d / W), the last ones padded."""
    chunk = list(shape)
    chunk[shard_dim] = math.ceil(shape[shard_dim] / world_size)
    return UnitParameter(name, tuple(shape), shard_dim, tuple(chunk))


def chunks_of(full: Tensor, world_size: int, dim: int) -> list[Tensor]:
    """FSDP's own rule for who owns what: ``torch.chunk``, empty ones for the ranks left over."""
    chunks = list(torch.chunk(full, world_size, dim))
    empty = full.narrow(dim, 0, 0)
    return chunks + [empty] * (world_size - len(chunks))


@given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    world_size=st.integers(1, 5),
    dim=st.integers(0, 3),
    seed=seeds,
)
def test_rows_hold_each_ranks_chunk(shape: list[int], world_size: int, dim: int, seed: int) -> None:
    """Row r is chunk r and zeros; and back. Any shard dim, uneven, fewer rows than ranks."""
    dim %= len(shape)
    parameter = sharded("p", shape, world_size, dim)
    full = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    rows = full_to_rows(full, parameter, world_size)
    assert rows.shape == (world_size, parameter.row_numel)
    for row, chunk in zip(rows, chunks_of(full, world_size, dim), strict=True):
        missing = parameter.chunk_shape[dim] - chunk.shape[dim]
        padded = F.pad(chunk, [0, 0] * (len(shape) - 1 - dim) + [0, missing])
        assert torch.equal(row.view(parameter.chunk_shape), padded)
    back = rows_to_full(rows, parameter)
    assert torch.equal(back, full) and back.is_contiguous()
    # What lies in the padding never gets into the parameter.
    padding = full_to_rows(torch.ones(shape), parameter, world_size) == 0
    assert torch.equal(rows_to_full(rows.masked_fill(padding, torch.nan), parameter), full)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,)], ids=str)
@pytest.mark.parametrize("world_size", [1, 3])
def test_empty_parameter(shape: tuple[int, ...], world_size: int) -> None:
    """Field case 76: a parameter without elements still has W rows, of none."""
    parameter = sharded("p", shape, world_size)
    rows = full_to_rows(torch.empty(shape), parameter, world_size)
    assert rows.shape == (world_size, 0)
    assert rows_to_full(rows, parameter).shape == shape


def test_odd_shapes_of_the_field() -> None:
    """Field cases 2 and 3: 9 elements per destination; 577 of 2305 with one row short of full."""
    assert sharded("p", (5, 3), 2).row_numel == 9
    four = sharded("p", (2305, 1), 4)
    assert four.row_numel == 577
    rows = full_to_rows(torch.arange(1.0, 2306.0).unsqueeze(1), four, 4)
    assert [int((row != 0).sum()) for row in rows] == [577, 577, 577, 574]
    assert rows[1, 0] == 578.0 and rows[3, 573] == 2305.0
    assert sharded("p", (2305, 1), 6).row_numel == 385


# Exemption

CONFIG = LoCoConfig(skip=("embed*", "layers.[01].router.weight"), min_numel=100)


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("layers.0.mlp.weight", (50, 20), None),
        ("layers.0.mlp.bias", (1000,), "1-D"),
        ("embed.weight", (50, 20), "skip 'embed*'"),
        ("Embed.weight", (50, 20), None),
        ("model.embed.weight", (50, 20), None),
        ("layers.1.router.weight", (50, 20), "skip 'layers.[01].router.weight'"),
        ("layers.2.router.weight", (50, 20), None),
    ],
)
def test_exemption_rules(name: str, shape: tuple[int, ...], reason: str | None) -> None:
    """1-D parameters and whole-name shell patterns, case included."""
    assert exemption(sharded(name, shape, 2), 1000, CONFIG, 2) == reason


def test_small_units_and_single_ranks_are_exempt() -> None:
    parameter = sharded("w", (9, 11), 2)
    assert exemption(parameter, 99, CONFIG, 2) == "unit below min_numel=100"
    assert exemption(parameter, 100, CONFIG, 2) is None
    assert exemption(sharded("w", (9, 11), 1), 100, CONFIG, 1) == "world size 1"
    # It is the unit that counts, with all its parameters.
    unit = [sharded("w", (9, 11), 2), sharded("b", (1,), 2)]
    assert exemptions(unit, CONFIG, 2) == {"b": "1-D"}
    assert set(exemptions(unit[:1], CONFIG, 2)) == {"w"}


@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    name=st.sampled_from(("embed.weight", "head.weight")),
)
def test_exemption_is_equal_on_all_meshes(shape: list[int], name: str) -> None:
    """Names and global shapes decide, never a local size: W and shard dim do not matter."""
    found = []
    for world_size in range(2, 9):
        for dim in range(len(shape)):
            unit = [sharded(name, shape, world_size, dim), sharded("x", (7, 9), world_size)]
            found.append(exemptions(unit, CONFIG, world_size))
    assert all(reasons == found[0] for reasons in found)


# The layout of one reduction

UNIT = [
    sharded("a.weight", (5, 3), 2),
    sharded("b.weight", (5, 3), 2),
    sharded("norm", (5,), 2),
    sharded("frozen", (5, 3), 2),
]
TRAINABLE = frozenset({"a.weight", "b.weight", "norm"})


def layout_of(in_buffer: set[str]) -> PayloadLayout:
    return unit_layout(
        UNIT,
        LoCoConfig(),
        exempt={"norm"},
        trainable=TRAINABLE,
        in_buffer=in_buffer,
        reduce_dtype=torch.bfloat16,
    )


def test_segments_follow_fsdps_order() -> None:
    layout = layout_of(set(TRAINABLE))
    found = [(s.name, s.numel, s.compressed, s.start) for s in layout.segments]
    assert found == [
        ("a.weight", 9, True, 0),
        ("b.weight", 9, True, 9),
        ("norm", 3, False, 18),
    ]
    assert layout.row_numel == 21
    assert layout.reduce_dtype == torch.bfloat16


def test_absent_parameter_keeps_its_place_on_the_wire() -> None:
    """Row size is that of all trainable parameters, the header that of those with a gradient."""
    only_a, only_b = layout_of({"a.weight"}), layout_of({"b.weight"})
    assert [s.start for s in only_a.segments] == [0, None, None]
    assert [s.start for s in only_b.segments] == [None, 0, None]
    assert only_a.row_numel == only_b.row_numel == 9
    everything = layout_of(set(TRAINABLE))
    assert only_a.row_bytes == only_b.row_bytes == everything.row_bytes
    assert len({only_a.header, only_b.header, everything.header}) == 3


def test_frozen_parameter_has_a_place_only_when_it_is_in_the_buffer() -> None:
    assert [s.name for s in layout_of({"frozen"}).segments][-1] == "frozen"
    assert "frozen" not in [s.name for s in layout_of({"norm"}).segments]


def test_summary_counts_reasons() -> None:
    assert summarize(["1-D", "1-D", "skip 'x'"]) == "1-D (2), skip 'x' (1)"
    assert summarize([]) == ""

"""Figures, the table, and residuals read and set by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from distributed.models import (
    TINY,
    Chain,
    Definition,
    Probe,
    full_gradients,
    gradient,
    gradients,
    local_gradients,
    residuals,
    same,
    shard,
    shard_probes,
)
from loco_fsdp import CommStats, LoCoConfig, attach, reference
from rank_pool import RankPool

SHAPES = {"w": (130, 7), "v": (5, 3), "bias": (7,)}


def count(config: LoCoConfig, policy: MixedPrecisionPolicy, steps: int) -> CommStats:
    model = shard(Probe(SHAPES), mp_policy=policy)
    handle = attach(model, config)
    for step in range(steps):
        model(gradients(SHAPES, step)).backward()
        handle.step()
    [stats] = handle.stats()
    norms = torch.stack([value.norm() for value in residuals(handle).values()])
    assert stats.residual_norm == pytest.approx(float(norms.norm()), rel=1e-6)
    return stats


# Over 3 ranks w has 44 rows of 7 for each, v 2 of 3 and bias 3: 308, 6 and 3 elements.
CODES = 3 * 64 + 64  # of w, 3 blocks, and of v, 1 block
STEPS = 2 * 4
HEADER = 16


def padded(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16


@pytest.mark.parametrize(
    ("dtype", "values"), [(torch.float32, 3 * 4), (torch.bfloat16, 3 * 2)], ids=str
)
def test_bytes(ranks: RankPool, dtype: torch.dtype, values: int) -> None:
    """Bytes that left each rank: the rows for the two others."""
    policy = MixedPrecisionPolicy(reduce_dtype=dtype)
    row_bytes = HEADER + padded(CODES) + padded(STEPS) + padded(values)
    for stats in ranks.run(count, 3, TINY, policy, 4):
        assert stats.unit == "root"
        assert stats.calls == 4
        assert stats.bytes_sent == 4 * 2 * row_bytes
        assert stats.bytes_bf16 == 4 * 2 * 317 * 2
        assert stats.bytes_fp32 == 4 * 2 * 317 * 4
        assert stats.relative_error is None
        assert stats.nonfinite_blocks == 0
    warm_up = LoCoConfig(min_numel=0, warmup_steps=2)
    whole_row = HEADER + padded(317 * dtype.itemsize)
    for stats in ranks.run(count, 3, warm_up, policy, 4):
        assert stats.bytes_sent == 2 * 2 * row_bytes + 2 * 2 * whole_row


def test_bytes_of_large_rows(ranks: RankPool) -> None:
    """At most 4.2 bits an element."""
    for sent, bf16 in ranks.run(count_large, 2):
        assert sent / (bf16 / 2) * 8 <= 4.2


def count_large() -> tuple[int, int]:
    shapes = {"w": (1000, 200)}
    model = shard(Probe(shapes))
    handle = attach(model, LoCoConfig())
    model(gradients(shapes, 0)).backward()
    [stats] = handle.stats()
    return stats.bytes_sent, stats.bytes_bf16


def measure_error() -> None:
    """The relative error of the last call, over all compressed parameters."""
    config = LoCoConfig(min_numel=0, error_stats=True)
    model = shard(Probe(SHAPES))
    handle = attach(model, config)
    assert handle.stats()[0].relative_error is None
    for step in range(2):
        errors, norms = [], []
        for name in ("w", "v"):
            rows = gradient(name, SHAPES[name], dist.get_rank(), step)
            rows = rows + handle.residual(name)
            rows = torch.cat([rows, torch.zeros(-rows.shape[0] % 2, rows.shape[1])]).view(2, -1)
            decoded = reference.decompress(reference.compress(rows, config), rows.shape[1], config)
            errors.append((rows - decoded).norm())
            norms.append(rows.norm())
        model(gradients(SHAPES, step)).backward()
        expected = torch.stack(errors).norm() / torch.stack(norms).norm()
        assert handle.stats()[0].relative_error == pytest.approx(float(expected), rel=1e-5)
        assert 0.05 < expected < 0.2


def test_relative_error(ranks: RankPool) -> None:
    ranks.run(measure_error, 2)


def inject(value: float, place: int) -> tuple[int, Tensor, bool]:
    """Rank 1 has one bad element in the first of four blocks; ones all around it."""
    shape, rank = (2, 256), dist.get_rank()
    model = shard(Probe({"w": shape}))
    handle = attach(model, TINY)
    model({"w": gradient("w", shape, rank, 0)}).backward()
    before = handle.residual("w")
    bad = torch.ones(shape)
    if rank == 1:
        bad[0, place] = value
    model.zero_grad()
    model({"w": bad}).backward()
    after = handle.residual("w")
    assert after.isfinite().all()
    kept = torch.equal(after[0, :128], before[0, :128])
    assert not torch.equal(after[1], before[1])
    return handle.stats()[0].nonfinite_blocks, full_gradients(model)["w"], kept


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_gradients_arrive(ranks: RankPool, value: float) -> None:
    """Field case 54: the whole block is non-finite at its owner, the residual keeps its value."""
    for place in (0, 63, 127):
        for rank, (blocks, found, kept) in enumerate(ranks.run(inject, 2, value, place)):
            assert not found[0, :128].isfinite().any()
            assert found[0, 128:].isfinite().all()
            assert found[1].isfinite().all()
            assert (blocks, kept) == ((1, True) if rank == 1 else (0, False))


def read_and_set(dtype: Any) -> None:
    """W = 2 pads the 5 rows of v to 6."""
    config = LoCoConfig(min_numel=0, residual_dtype=dtype)
    rank, shapes = dist.get_rank(), {"v": (5, 3), "w": (6, 40)}
    model, other = shard(Probe(shapes)), shard(Probe(shapes))
    handle = attach(model, config)
    assert same(residuals(handle), {name: torch.zeros(shape) for name, shape in shapes.items()})
    for step in range(3):
        model(gradients(shapes, step)).backward()
    kept = residuals(handle)
    assert all(value.dtype == torch.float32 for value in kept.values())
    # What was read can be set, bit for bit, and the next gradients are those of a straight run.
    copy = attach(other, config)
    for name, value in kept.items():
        copy.load_residual(name, value.double())
    assert same(residuals(copy), kept)
    for one in (model, other):
        one.zero_grad()
        one(gradients(shapes, 3)).backward()
    assert same(local_gradients(other), local_gradients(model))
    assert same(residuals(copy), residuals(handle))
    # Any values: stored as the storage can.
    values = gradient("any", (5, 3), rank, 0)
    handle.load_residual("v", values)
    tolerance = {"int8": 0.02, "bfloat16": 0.01, "float32": 0}[dtype]
    torch.testing.assert_close(handle.residual("v"), values, rtol=tolerance, atol=tolerance)
    # It is what the next reduction is compensated with.
    definition = Definition(2, config)
    for r, state in enumerate(definition.states):
        full = gradient("any", (5, 3), r, 0)
        state.load_dense(torch.cat([full, torch.zeros(1, 3)]).view(2, -1))
    model.zero_grad()
    model({"v": gradient("v", (5, 3), rank, 9)}).backward()
    expected = definition.reduce([gradient("v", (5, 3), r, 9) for r in range(2)])[rank]
    assert torch.equal(local_gradients(model)["v"], expected)


@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float32"])
def test_residual_round_trip(ranks: RankPool, dtype: str) -> None:
    ranks.run(read_and_set, 2, dtype)


def ask_for_wrong_names() -> None:
    model = shard_probes(Chain({"block": {"weight": (4, 4), "bias": (4,)}, "head": {"w": (3, 3)}}))
    handle = attach(model, LoCoConfig(min_numel=0, skip=("head.*",)))
    zeros = torch.zeros(4, 4)
    for use in (handle.residual, lambda name: handle.load_residual(name, zeros)):
        with pytest.raises(KeyError, match=r"block\.weights.*block\.weight"):
            use("block.weights")
        with pytest.raises(ValueError, match="1-D"):
            use("block.bias")
        with pytest.raises(ValueError, match=r"skip 'head\.\*'"):
            use("head.w")
    with pytest.raises(ValueError, match=r"\(4, 3\).*\(4, 4\)"):
        handle.load_residual("block.weight", torch.zeros(4, 3))
    with pytest.raises(ValueError, match="NaN"):
        handle.load_residual("block.weight", zeros * torch.nan)
    none = attach(model, dataclasses.replace(TINY, feedback="none"))
    with pytest.raises(ValueError, match="feedback"):
        none.residual("block.weight")


def test_wrong_names_and_values(ranks: RankPool) -> None:
    ranks.run(ask_for_wrong_names, 2)


def describe() -> str:
    model = shard_probes(
        Chain(
            {
                "block": {"weight": (256, 128), "bias": (256,)},
                "tiny": {"weight": (4, 4)},
                "head": {"w": (100, 64)},
            }
        )
    )
    return attach(model, LoCoConfig(skip=("head.*",))).describe()


def test_table(ranks: RankPool) -> None:
    """Unit, parameters, elements, compressed or why not, bytes before and after, residual."""
    [table, other] = ranks.run(describe, 2)
    assert table == other
    titles, _, *rows, _, total = table.splitlines()
    assert titles.split() == [
        *("unit", "parameters", "elements", "compressed"),
        *("before", "after", "residual"),
    ]
    found = {row.split()[0]: " ".join(row.split()[1:]) for row in [*rows, total]}
    # block: 128 rows of 128 and 128 values; 8192 code bytes, 256 step bytes, 512 value bytes.
    assert found == {
        "block": "2 33,024 yes, except 1-D (1) 64.5 KiB 8.8 KiB 32.5 KiB",
        "tiny": "1 16 unit below min_numel=4096 (1) 32 B 48 B 0 B",
        "head": "1 6,400 skip 'head.*' (1) 12.5 KiB 12.5 KiB 0 B",
        "total": "4 39,440 3.61x less 77.0 KiB 21.3 KiB 32.5 KiB",
    }

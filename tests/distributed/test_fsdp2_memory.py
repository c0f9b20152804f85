"""What LoCo holds: the residual that it announces, and nothing that grows with depth."""

from __future__ import annotations

import gc
import weakref
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile, record_function

from distributed.models import TINY, Probe, gradient, gradients, shard
from loco_fsdp import LoCoConfig, LoCoOptimizer, attach
from loco_fsdp.feedback import ResidualBuffer
from loco_fsdp.fsdp2_reduce import LoCoReduceScatter
from rank_pool import RankPool


def stack(widths: list[tuple[int, int]], **settings: Any) -> Any:
    """Linear layers, each a unit."""
    model = nn.Sequential(*(nn.Linear(one, two, bias=False) for one, two in widths))
    for layer in model:
        fully_shard(layer, **settings)
    return shard(model, **settings)


def alive(*dtypes: torch.dtype) -> dict[int, torch.UntypedStorage]:
    """Storages of all live tensors of some dtypes that Python knows, each once."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) is Tensor and t.dtype in dtypes]
    return {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}


def bytes_beside(earlier: dict[int, torch.UntypedStorage], *dtypes: torch.dtype) -> int:
    """Bytes that are alive now and were not then.

    What another test left, and autograd lets go of later, is in ``earlier``, which keeps it alive.
    """
    now = alive(*dtypes)
    return sum(storage.nbytes() for key, storage in now.items() if key not in earlier)


def measure_residuals(widths: list[tuple[int, int]]) -> float:
    """Residual bytes for each compressed unsharded parameter, measured over two steps."""
    before = alive(torch.int8, torch.bfloat16)
    model = stack(widths)
    handle = attach(model, TINY)
    announced = handle.memory_bytes()
    for step in range(2):
        model(gradient("x", (2, widths[0][0]), dist.get_rank(), step)).square().sum().backward()
    found = bytes_beside(before, torch.int8, torch.bfloat16)
    assert found == announced == handle.memory_bytes()
    del handle, model
    return announced / sum(one * two for one, two in widths)


@pytest.mark.parametrize("world_size", [2, 4])
def test_residual_is_one_byte_per_parameter(ranks: RankPool, world_size: int) -> None:
    """Field case 13: measured = announced, at most 1.02 bytes, whatever the world size."""
    equal = [(128, 128)] * 8
    one_large = [(32, 128), (128, 512), (512, 16)]  # the middle unit holds 84 % of it
    for widths in (equal, one_large):
        for ratio in ranks.run(measure_residuals, world_size, widths):
            assert 1.0 <= ratio <= 1.02


SHAPES = {"w": (64, 128), "table": (256, 128), "bias": (128,)}


def announce(config: LoCoConfig) -> tuple[int, int]:
    """Announced and really held bytes."""
    model = shard(Probe(SHAPES))
    handle = attach(model, config)
    announced = handle.memory_bytes()
    model(gradients(SHAPES, 0)).backward()
    states = [state for unit in handle.units for state in unit._residuals.values()]
    return announced, sum(state.num_bytes() for state in states)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (LoCoConfig(), 320 * (128 + 2)),
        (LoCoConfig(skip=("table",)), 64 * (128 + 2)),
        (LoCoConfig(min_numel=100_000), 0),
        (LoCoConfig(residual_dtype="float32"), 320 * 128 * 4),
        (LoCoConfig(residual_dtype="bfloat16"), 320 * 128 * 2),
        (LoCoConfig(scale="static"), 320 * 128),
        (LoCoConfig(feedback="none"), 0),
    ],
)
def test_announced_bytes(ranks: RankPool, config: LoCoConfig, wanted: int) -> None:
    """Field case 13: known before training; modules can opt out."""
    assert ranks.run(announce, 2, config) == [(wanted, wanted)] * 2


def run_out_of_memory() -> None:
    def allocate(*_: Any) -> None:
        raise MemoryError("no room")

    model = shard(nn.Sequential(shard(nn.Linear(8, 8))))
    attach(model, TINY)
    with (
        patch.object(ResidualBuffer, "__init__", allocate),
        pytest.raises(MemoryError, match="no room") as caught,
    ):
        model(torch.ones(1, 8)).sum().backward()
    assert caught.value.__notes__ == ["This happened in the reduction of FSDP unit '0'."]


def test_failing_allocation_names_the_unit(ranks: RankPool) -> None:
    """Field case 13: out of memory at the first backward says where."""
    ranks.run(run_out_of_memory, 2)


def freeze_half() -> None:
    model = nn.Sequential(nn.Linear(128, 128, bias=False), nn.Linear(128, 64, bias=False))
    model[1].requires_grad_(False)
    handle = attach(shard(model), TINY)
    assert "yes, except frozen (1)" in handle.describe()
    before = alive(torch.int8)
    for step in range(2):
        model(gradient("x", (2, 128), dist.get_rank(), step)).square().sum().backward()
    kept = handle.residual("0.weight")
    assert kept.any() and bytes_beside(before, torch.int8) == 128 * 128
    assert handle.memory_bytes() == 128 * (128 + 2)
    handle.load_residual("1.weight", torch.ones(64, 128))  # as if it were trained by now
    assert torch.equal(handle.residual("0.weight"), kept)
    assert torch.equal(handle.residual("1.weight"), torch.ones(64, 128))
    assert handle.memory_bytes() == (128 + 64) * (128 + 2)


def test_frozen_parameters_take_nothing(ranks: RankPool) -> None:
    """As beside adapters; room that is made later keeps what was there."""
    ranks.run(freeze_half, 2)


def train_and_drop() -> None:
    """Two steps, and a state that is saved and loaded."""
    model = stack([(128, 128)] * 2)
    optimizer = LoCoOptimizer(torch.optim.AdamW(model.parameters()), model, TINY)
    for step in range(2):
        model(gradient("x", (2, 128), dist.get_rank(), step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    kept = [weakref.ref(thing) for thing in (model, optimizer, optimizer.loco)]
    kept += [weakref.ref(module) for module in model]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)


def test_dropped_model_is_freed(ranks: RankPool) -> None:
    """Residuals, group and model go with the last reference, though hooks pointed to them."""
    ranks.run(train_and_drop, 2)


def measure_calls(depth: int) -> tuple[set[int], int]:
    """Bytes at the peak of each call, allocations of this thread, and of the residuals."""
    model = stack([(128, 128)] * depth, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    model.bfloat16()
    handle = attach(model, TINY)
    buffers: list[weakref.ref[Tensor]] = []
    most_alive = 0

    def call(self: Any, output_tensor: Tensor, input_tensor: Tensor, **kwargs: Any) -> None:
        nonlocal most_alive
        buffers.extend([weakref.ref(output_tensor), weakref.ref(input_tensor)])
        most_alive = max(most_alive, sum(buffer() is not None for buffer in buffers))
        with record_function("one call"):
            original(self, output_tensor, input_tensor, **kwargs)

    original = LoCoReduceScatter.__call__
    with patch.object(LoCoReduceScatter, "__call__", call):
        for step in range(2):
            x = gradient("x", (2, 128), dist.get_rank(), step).bfloat16()
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
                model(x).square().sum().backward()
    assert len(buffers) == 2 * 2 * depth
    # This call's input and output, and FSDP keeps the input of the one before.
    assert most_alive <= 4
    assert not any(buffer() is not None for buffer in buffers)
    events = profiled.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    peaks = {peak_in(mark, changes) for mark in events if mark.name() == "one call"}
    return peaks, handle.memory_bytes()


def peak_in(mark: Any, changes: list[tuple[int, int]]) -> int:
    now = peak = 0
    for at, change in changes:
        if mark.start_ns() <= at <= mark.start_ns() + mark.duration_ns():
            now += change
            peak = max(peak, now)
    return peak


def test_transient_memory_does_not_grow_with_depth(ranks: RankPool) -> None:
    """Field case 44: 8 and 32 equal layers, bfloat16 parameters, float32 reduction."""
    shallow, deep = (ranks.run(measure_calls, 2, depth) for depth in (8, 32))
    for (peaks, residual), (peaks_deep, residual_deep) in zip(shallow, deep, strict=True):
        # A few bytes may be another thread's.
        assert max(peaks_deep) <= max(peaks) + 256
        assert max(peaks) < 30 * 128 * 128  # float32 copies of one piece, here the whole gradient
        assert residual_deep == 4 * residual

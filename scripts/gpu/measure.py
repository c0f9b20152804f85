"""Timing: every contender in turn, round after round, and the median of each."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from time import perf_counter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from gpu.problems import CONFIG, WORLD_SIZE, Buffers, Call, Problem
from loco_fsdp.backends import eager
from loco_fsdp.feedback import ResidualBuffer
from loco_fsdp.kernels import CallStats, compress, fast_backend, reduce, work_table
from loco_fsdp.payload import PayloadLayout, Segment

MI = 2**20
MOST_ROUNDS = 25
UNFUSED_ELEMENTS = {"cpu": 16 * MI, "cuda": 256 * MI}
"""Unfused operations are not timed on more: on a CPU they would take most of the run."""
FLUSHED_BYTES = 256 * MI
"""Written before each call on a GPU: more than its L2 cache holds."""
FAST_NAMES = {"cpu": "compiled", "cuda": "triton"}


@dataclass(frozen=True)
class Measurement:
    """One line of the results; a figure that was not measured is None."""

    backend: str
    device: str
    op: str
    dtype: str
    elements: int
    threads: int
    seconds: float
    bytes_moved: float | None = None
    """By the count of ``Problem.num_bytes``."""
    copy_seconds: float | None = None
    ratio_to_copy: float | None = None
    share_of_copy_bandwidth: float | None = None
    ratio_to_eager: float | None = None
    """Seconds over those of the same work by unfused operations."""


def backends(device: torch.device) -> dict[str, Any]:
    """Name -> module of the backends that work on a device."""
    fast = fast_backend(device)
    return {"eager": eager} | ({FAST_NAMES[device.type]: fast} if fast is not None else {})


def problems(device: torch.device, sizes: list[int]) -> list[Problem]:
    """Both operations in both dtypes, of every size that memory has room for."""
    dtypes = (torch.float32, torch.bfloat16)
    every = [
        Problem(op, dtype, size, device)
        for size in sizes
        for op in ("compress", "reduce")
        for dtype in dtypes
    ]
    # Gradient, copy, payload, residual, and as much again to be a good neighbour.
    return [one for one in every if 24 * one.elements < free_bytes(device)]


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def measure(
    problem: Problem, budget_seconds: float, others: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[Measurement]:
    """Time every backend, its copy beside it; about ``budget_seconds`` for each contender.

    ``others``: name -> module of contenders that are not backends, such as ``torch_compile``.

    On a CPU small tensors stay in the cache, those of the copy too; on a GPU nothing does.
    """
    device, modules = problem.device, backends(problem.device) | dict(others)
    buffers = Buffers(problem)
    calls = {"copy": buffers.copy_call()}
    calls |= {name: buffers.backend_call(module) for name, module in modules.items()}
    # The unfused operations take about ten float32 copies of the gradient.
    rows = WORLD_SIZE if problem.op == "reduce" else 1
    if problem.elements <= UNFUSED_ELEMENTS[
        device.type
    ] and 48 * rows * problem.elements < free_bytes(device):
        calls["unfused"] = buffers.unfused_call()
    seconds = interleaved_medians(calls, device, budget_seconds)
    copied = problem.copied_bytes / seconds["copy"]
    unfused = seconds.get("unfused")
    for name in modules:
        yield Measurement(
            name,
            device.type,
            problem.op,
            str(problem.dtype).removeprefix("torch."),
            problem.elements,
            torch.get_num_threads(),
            seconds[name],
            bytes_moved=problem.num_bytes,
            copy_seconds=seconds["copy"],
            ratio_to_copy=seconds[name] / seconds["copy"],
            share_of_copy_bandwidth=problem.num_bytes / seconds[name] / copied,
            ratio_to_eager=None if unfused is None else seconds[name] / unfused,
        )


def interleaved_medians(
    calls: Mapping[str, Call], device: torch.device, budget_seconds: float
) -> dict[str, float]:
    """Median seconds of each warm call; slow calls skip the later rounds."""
    found: dict[str, list[float]] = {}
    rounds = {}
    for name, call in calls.items():
        seconds_of(call, device)  # it may compile, and touches new memory
        found[name] = [seconds_of(call, device)]
        rounds[name] = min(MOST_ROUNDS, int(budget_seconds / found[name][0]))
    for number in range(max(rounds.values())):
        for name, call in calls.items():
            if number < rounds[name]:
                found[name].append(seconds_of(call, device))
    return {name: median(times) for name, times in found.items()}


def seconds_of(call: Call, device: torch.device) -> float:
    """Seconds that one call takes; on a GPU those of its stream, with cold caches."""
    if device.type != "cuda":
        start = perf_counter()
        call()
        return perf_counter() - start
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # Writing this takes longer than a launch, so that the call does not wait for the host.
    _flushed(device).zero_()
    first.record()
    call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1000


@lru_cache
def _flushed(device: torch.device) -> Tensor:
    return torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=device)


def first_use(device: torch.device) -> float:
    """Seconds of the first compress and reduce in this process: imports, compilation, checks."""
    start = perf_counter()
    unit_call(device)()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter() - start


def host_call(device: torch.device, calls: int = 200) -> Measurement:
    """What the host does for one unit: look up its table, compress, reduce; no exchange.

    Fewer launches than a stream can queue, so that the host never waits for the GPU.
    """
    call = unit_call(device)
    for _ in range(3):
        call()
    times = []
    for _ in range(5):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = perf_counter()
        for _ in range(calls):
            call()
        times.append((perf_counter() - start) / calls)
    name, threads = list(backends(device))[-1], torch.get_num_threads()
    return Measurement(
        name, device.type, "host_call", "bfloat16", UNIT_ELEMENTS, threads, median(times)
    )


def _transformer_block() -> tuple[Segment, ...]:
    """Seven matrices and two norms, as in a decoder block, small."""
    segments, start = [], 0
    for index in range(9):
        is_norm = index in (0, 5)
        numel = 64 if is_norm else 4096
        segments.append(Segment(f"p{index}", numel, compressed=not is_norm, start=start))
        start += numel
    return tuple(segments)


UNIT = _transformer_block()
UNIT_ELEMENTS = WORLD_SIZE * sum(segment.numel for segment in UNIT)


def unit_call(device: torch.device) -> Call:
    """Compress and reduce ``UNIT`` through the library's own entry, as an exchange does."""
    layout = PayloadLayout(CONFIG, UNIT, torch.bfloat16)
    names = {segment.name for segment in UNIT if segment.compressed}
    sizes = {segment.name: segment.numel for segment in UNIT if segment.compressed}
    residuals = ResidualBuffer(CONFIG, WORLD_SIZE, sizes, device)
    x = torch.randn(WORLD_SIZE, layout.row_numel, device=device).bfloat16()
    payload = torch.zeros(WORLD_SIZE, layout.row_bytes, dtype=torch.uint8, device=device)
    output = torch.zeros(layout.row_numel, dtype=torch.bfloat16, device=device)
    stats = CallStats(torch.zeros((), dtype=torch.int64, device=device))

    def call() -> None:
        table = work_table(layout, residuals, names, device)
        compress(x, table, payload, stats)
        reduce(payload, table, output, 0.25)

    return call

"""The CPU backend: the loops of ``loops`` on torch's number of threads.

Every tile is worked on alone, so the number of threads does not change a bit.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loco_fsdp.backends import loops, numba_cache
from loco_fsdp.codecs import static_step
from loco_fsdp.config import LoCoConfig
from loco_fsdp.tiles import TileTable

SCALES = ("block", "static")
DTYPES = (torch.float32, torch.bfloat16)
TILE_NUMEL = 32 * 1024  # elements: work for about 30 microseconds
MIN_TILES = 4  # a thread takes: less work than that is done sooner than handed over
PARTS = 8  # for each thread

_SHIFTS = {torch.int8: -1, torch.float32: 0, torch.bfloat16: 16}
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.uint16}


def tile_blocks(block_size: int, device: torch.device) -> int:
    """Blocks in a tile."""
    return max(1, TILE_NUMEL // block_size)


def compress(
    x: Tensor,
    table: TileTable,
    payload: Tensor,
    residual: Tensor | None,
    residual_steps: Tensor | None,
    nonfinite: Tensor,
    errors: Tensor | None,
    loss_scale: Tensor | None,
    config: LoCoConfig,
) -> None:
    """See ``kernels.compress``."""
    if residual is None or residual_steps is None:
        residual = torch.empty(0, dtype=torch.int8, device="cpu")
        residual_steps = torch.empty(0, dtype=torch.bfloat16, device="cpu")
    is_static = config.scale == "static"
    counts = _in_threads(
        loops.compress_tiles,
        x.shape[0] * table.tiles.numel(),
        _flat(x),
        _flat(payload),
        _flat(payload.view(x.dtype)),
        _flat(payload.view(torch.bfloat16)),
        _flat(residual),
        _flat(residual_steps),
        table.segments.numpy(),
        table.tiles.numpy(),
        np.empty((0, 2)) if errors is None else errors.numpy(),
        x.shape[1],
        payload.shape[1],
        config.bits,
        config.block_size,
        table.tile_blocks,
        _SHIFTS[x.dtype],
        _SHIFTS[residual.dtype],
        np.float32(static_step(config.static_scale) if is_static else 0),
        np.float32(static_step(config.static_residual_scale) if is_static else 0),
        config.gain,
        loss_scale is not None,
        np.float32(0 if loss_scale is None else float(loss_scale)),
    )
    nonfinite += sum(counts)


def reduce(
    payload: Tensor,
    table: TileTable,
    output: Tensor,
    values_dtype: torch.dtype,
    factor: float,
    config: LoCoConfig,
) -> None:
    """See ``kernels.reduce``."""
    _in_threads(
        loops.reduce_tiles,
        table.tiles.numel(),
        _flat(payload),
        _flat(payload.view(values_dtype)),
        _flat(payload.view(torch.bfloat16)),
        table.segments.numpy(),
        table.tiles.numpy(),
        _flat(output),
        payload.shape[0],
        payload.shape[1],
        config.bits,
        config.block_size,
        table.tile_blocks,
        _SHIFTS[values_dtype],
        _SHIFTS[output.dtype],
        np.float32(factor),
    )


def _flat(tensor: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = tensor.view(-1).view(_BITS.get(tensor.dtype, tensor.dtype)).numpy()
    return array


def _in_threads(loop: Callable[..., Any], tiles: int, *arguments: Any) -> list[Any]:
    """Call ``loop(first, last, *arguments)`` over ranges that cover all tiles."""
    _prepare(loop, *arguments)
    threads = max(1, min(torch.get_num_threads(), tiles // MIN_TILES))
    if threads == 1:
        return [loop(0, tiles, *arguments)]
    # A thread takes one part after another, so that none waits for one whose core is busy.
    count = min(threads * PARTS, tiles // MIN_TILES)
    cuts = [tiles * part // count for part in range(count + 1)]
    parts = deque(pairwise(cuts))

    def work() -> list[Any]:
        results: list[Any] = []
        while True:
            try:
                part = parts.popleft()  # safe between threads
            except IndexError:
                return results
            results.append(loop(*part, *arguments))

    # The loops let go of Python's lock.
    pool = _pool(os.getpid(), threads - 1)
    waiting = [pool.submit(work) for _ in range(threads - 1)]
    results = work()
    for future in waiting:
        results += future.result()
    return results


_prepared: set[tuple[Any, ...]] = set()


def _prepare(loop: Callable[..., Any], *arguments: Any) -> None:
    types = (loop, *(a.dtype for a in arguments if isinstance(a, np.ndarray)))
    if types not in _prepared:
        numba_cache.prepare(loop, 0, 0, *arguments)
        _prepared.add(types)


@lru_cache(maxsize=4)
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    # A fork inherits the pool but not its threads: each process has its own.
    return ThreadPoolExecutor(threads, thread_name_prefix="loco_fsdp")

"""The two operations of an exchange as torch operators: ``loco::compress``, ``loco::reduce``.

Whoever calls them does not ask where the tensors are: the fastest backend that works on this
machine runs them, and all give the bits of ``reference``.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from loco_fsdp import _torch
from loco_fsdp.backends import eager
from loco_fsdp.config import LoCoConfig
from loco_fsdp.feedback import ResidualBuffer
from loco_fsdp.payload import PayloadLayout, Segment
from loco_fsdp.tiles import TileTable, tile_table

logger = logging.getLogger(__name__)

FAST_BACKENDS = {"cpu": "loco_fsdp.backends.compiled", "cuda": "loco_fsdp.backends.gpu"}
"""Device type -> module of its fast backend; it may fail to import."""


@dataclass
class CallStats:
    """What compress calls saw, as tensors on the gradient's device: no host sync."""

    nonfinite_blocks: Tensor
    """int64 0-d, added to."""
    measure: bool = False
    """Measure the rounding error too."""
    errors: Tensor | None = None
    """float64 ``[2]``: sums of (h - decoded)^2 and of h^2 in the last call, if measured."""

    def relative_error(self) -> float | None:
        """Norm of the error over norm of ``h``; 0 for a zero gradient, None if not measured."""
        if self.errors is None:
            return None
        error, norm = self.errors.tolist()
        return float((error / norm) ** 0.5) if norm else 0.0


@dataclass(frozen=True)
class WorkTable:
    """What one exchange reads and writes, on one device. From ``work_table``."""

    tiles: TileTable
    layout: PayloadLayout
    residuals: ResidualBuffer | None
    columns: int
    """Of the gradient: up to the last one that a segment lies in."""


def work_table(
    layout: PayloadLayout, residuals: ResidualBuffer | None, names: Collection[str], device: Any
) -> WorkTable:
    """Return the table for one exchange on ``device``.

    Args:
        layout: what is exchanged.
        residuals: the memory of residuals, or None.
        names: the segments whose residual is used and updated.
        device: of the gradient.

    Raises:
        ValueError: a residual has another size or block size than its segment.

    """
    blocks, columns = [], 0
    for segment in layout.segments:
        first = -1
        if residuals is not None and segment.compressed and segment.name in names:
            first = residuals.first_block.get(segment.name, -1)
            if first >= 0:
                _require_residual(residuals, layout, segment)
        blocks.append(first)
        if segment.start is not None:
            columns = max(columns, segment.start + segment.numel)
    backend = fast_backend(device)
    tile_blocks = (backend or eager).tile_blocks(layout.config.block_size, device)
    tiles = tile_table(layout, tuple(blocks), tile_blocks, device)
    return WorkTable(tiles, layout, residuals, columns)


def compress(
    x: Tensor,
    table: WorkTable,
    payload: Tensor,
    stats: CallStats,
    loss_scale: Tensor | None = None,
) -> None:
    """Compensate, encode and pack the segments of a gradient; update their residuals.

    Reads the gradient and each residual once, writes payload and residual once. Transient memory:
    on a CPU that can compile a few groups of 1024 elements a thread (or of one block, if that is
    longer), nothing on a GPU, and a few float32 copies of a piece of 256 Ki elements for plain
    PyTorch.

    Args:
        x: contiguous ``[W, N]``, row r for rank r, in the layout's ``reduce_dtype``.
        table: from ``work_table``, for the same device.
        payload: contiguous uint8 ``[W, row_bytes]``. With the static codec, it holds the steps.
        stats: counters, added to.
        loss_scale: float32 0-d; ``x`` carries this scale, the residual does not.

    Raises:
        ValueError: a tensor of another shape, dtype or device, or not contiguous. Nothing has
            been written then.

    """
    layout, residuals, device = table.layout, table.residuals, table.tiles.segments.device
    rows = x.shape[0] if residuals is None else residuals.rows
    _require("x", x, (rows, table.columns), layout.reduce_dtype, device)
    _require("payload", payload, (rows, layout.row_bytes), torch.uint8, device)
    _require("stats.nonfinite_blocks", stats.nonfinite_blocks, (), torch.int64, device)
    if loss_scale is not None:
        _require("loss_scale", loss_scale, (), torch.float32, device)
    errors = None
    if stats.measure:
        tiles = max(1, rows * table.tiles.tiles.numel())
        errors = torch.zeros(tiles, 2, dtype=torch.float64, device=device)
    torch.ops.loco.compress(
        x,
        *_operands(table),
        payload,
        None if residuals is None else residuals.data,
        None if residuals is None else residuals.steps,
        stats.nonfinite_blocks,
        errors,
        loss_scale,
        *_codec(layout.config),
        layout.config.gain,
    )
    if errors is not None:
        stats.errors = errors.sum(0)


def reduce(payload: Tensor, table: WorkTable, output: Tensor, factor: float) -> None:
    """Decode W received rows, sum them in rank order in float32, scale, and cast.

    Uncompressed segments of a float64 layout are summed in float64. Transient memory as for
    ``compress``.

    Args:
        payload: contiguous uint8 ``[W, row_bytes]``, the row of each rank.
        table: as for ``compress``.
        output: contiguous ``[N]``, any float dtype, written.
        factor: multiplies the sum.

    Raises:
        ValueError: a tensor of another shape, dtype or device, or not contiguous. Nothing has
            been written then.

    """
    layout, device = table.layout, table.tiles.segments.device
    _require("payload", payload, (payload.shape[0], layout.row_bytes), torch.uint8, device)
    _require("output", output, (table.columns,), output.dtype, device)
    torch.ops.loco.reduce(
        payload,
        *_operands(table),
        output,
        layout.reduce_dtype,
        factor,
        *_codec(layout.config),
    )


@lru_cache(maxsize=64)
def fast_backend(device: torch.device) -> Any:
    """Return the fast backend's module, or None; tried out once on each device.

    If it cannot be imported, fails, or gives other bits than plain PyTorch, one line is logged
    and plain PyTorch serves the device.
    """
    name = FAST_BACKENDS.get(device.type)
    if name is None:
        return None
    try:
        backend = import_module(name)
        with _torch.outside_modes():
            agrees = _agrees(backend, device)
        problem = None if agrees else "it does not give the reference's bits"
    except Exception as error:  # whatever is wrong with it, training goes on
        problem = f"{type(error).__name__}: {error}"
    if problem is None:
        return backend
    logger.warning(
        "Gradients on %s are compressed by plain PyTorch, which is right but several times "
        "slower: %s cannot be used (%s).", device, name, " ".join(problem.split())[:300]
    )  # fmt: skip
    return None


def _agrees(backend: Any, device: torch.device) -> bool:
    """Whether a backend gives the bits of plain PyTorch on a small gradient, twice in a row."""
    config = LoCoConfig()
    segments = (Segment("a", 300), Segment("b", 10, compressed=False, start=300))
    layout = PayloadLayout(config, segments)
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(2, 310, generator=generator, dtype=torch.float32, device="cpu").to(device)
    results = []
    for candidate in (eager, backend):
        residuals = ResidualBuffer(config, 2, {"a": 300}, device)
        tile_blocks = candidate.tile_blocks(config.block_size, device)
        table = tile_table(layout, (0, -1), tile_blocks, device)
        payload = torch.zeros(2, layout.row_bytes, dtype=torch.uint8, device=device)
        count = torch.zeros((), dtype=torch.int64, device=device)
        memory = (residuals.data, residuals.steps, count)
        for _ in range(2):
            candidate.compress(x, table, payload, *memory, None, None, config)
        output = torch.zeros(310, dtype=torch.float32, device=device)
        candidate.reduce(payload, table, output, torch.float32, 0.5, config)
        results.append((payload, *memory, output))
    return all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def _operands(table: WorkTable) -> tuple[Any, ...]:
    tiles = table.tiles
    return tiles.segments, tiles.tiles, tiles.tile_blocks, tiles.aligned


def _codec(config: LoCoConfig) -> tuple[Any, ...]:
    codec = (config.scale, config.bits, config.block_size)
    return (*codec, config.static_scale, config.static_residual_scale)


def _require(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise unless the kernels stay inside ``tensor``: they do not look at sizes themselves."""
    found = (tensor.shape, tensor.dtype, tensor.device)
    if found == (shape, dtype, device) and tensor.is_contiguous():
        return
    raise ValueError(
        f"{name} is {tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())} on "
        f"{tensor.device}: wanted a contiguous {dtype} {list(shape)} on {device}."
    )


def _require_residual(residuals: ResidualBuffer, layout: PayloadLayout, segment: Segment) -> None:
    found = residuals.sizes[segment.name], residuals.config.block_size, residuals.config.scale
    wanted = segment.numel, layout.config.block_size, layout.config.scale
    if found != wanted:
        raise ValueError(
            f"The residual of {segment.name or 'the input'} has rows of {found[0]} elements in "
            f"blocks of {found[1]} for the {found[2]} codec: wanted {wanted[0]}, {wanted[1]} and "
            f"{wanted[2]}, as the gradient."
        )


@lru_cache(maxsize=64)
def _config(
    scale: Any, bits: Any, block_size: int, static: float, static_residual: float, gain: float = 1.0
) -> LoCoConfig:
    """The settings that operators were given one by one."""
    return LoCoConfig(
        scale=scale,
        bits=bits,
        block_size=block_size,
        static_scale=static,
        static_residual_scale=static_residual,
        feedback="moving_average" if gain else "none",
        feedback_gain=gain or 1.0,
    )


def _backend_for(device: torch.device, scale: str, *dtypes: torch.dtype) -> Any:
    backend = fast_backend(device)
    if backend is None or scale not in backend.SCALES or not set(dtypes) <= set(backend.DTYPES):
        return eager
    return backend


def _compress(
    x: Tensor,
    segments: Tensor,
    tiles: Tensor,
    tile_blocks: int,
    aligned: bool,
    payload: Tensor,
    residual: Tensor | None,
    residual_steps: Tensor | None,
    nonfinite: Tensor,
    errors: Tensor | None,
    loss_scale: Tensor | None,
    *codec: Any,
) -> None:
    table = TileTable(segments, tiles, tile_blocks, aligned)
    memory = (residual, residual_steps, nonfinite, errors, loss_scale)
    config = _config(*codec)
    _backend_for(x.device, config.scale, x.dtype).compress(x, table, payload, *memory, config)


def _reduce(
    payload: Tensor,
    segments: Tensor,
    tiles: Tensor,
    tile_blocks: int,
    aligned: bool,
    output: Tensor,
    values_dtype: torch.dtype,
    factor: float,
    *codec: Any,
) -> None:
    table = TileTable(segments, tiles, tile_blocks, aligned)
    config = _config(*codec)
    backend = _backend_for(payload.device, config.scale, output.dtype, values_dtype)
    backend.reduce(payload, table, output, values_dtype, factor, config)


def _nothing(*_: Any) -> None:
    """Fake tensors have no values: the operators only write into their arguments."""


_TABLE = "Tensor segments, Tensor tiles, int tile_blocks, bool aligned"
_CODEC = "str scale, int bits, int block_size, float static_scale, float static_residual_scale"

torch.library.define(
    "loco::compress",
    f"(Tensor x, {_TABLE}, Tensor(a!) payload, Tensor(b!)? residual, Tensor(c!)? residual_steps, "
    f"Tensor(d!) nonfinite, Tensor(e!)? errors, Tensor? loss_scale, {_CODEC}, float gain) -> ()",
)
torch.library.define(
    "loco::reduce",
    f"(Tensor payload, {_TABLE}, Tensor(a!) output, "
    f"ScalarType values_dtype, float factor, {_CODEC}) -> ()",
)
for _name, _function in (("loco::compress", _compress), ("loco::reduce", _reduce)):
    torch.library.impl(_name, "default", _function)
    torch.library.register_fake(_name, _nothing)

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


def work_table(
    layout: PayloadLayout, residuals: ResidualBuffer | None, names: Collection[str], device: Any
) -> TileTable:
    """Return the table for one exchange on ``device``.

    Args:
        layout: what is exchanged.
        residuals: the memory of residuals, or None.
        names: the segments whose residual is used and updated.
        device: of the gradient.

    """
    first = residuals.first_block if residuals is not None else {}
    blocks = tuple(first.get(s.name, -1) if s.name in names else -1 for s in layout.segments)
    backend = fast_backend(device)
    tile_blocks = (backend or eager).tile_blocks(layout.config.block_size, device)
    return tile_table(layout, blocks, tile_blocks, device)


def compress(
    x: Tensor,
    table: TileTable,
    payload: Tensor,
    residuals: ResidualBuffer | None,
    config: LoCoConfig,
    stats: CallStats,
    loss_scale: Tensor | None = None,
) -> None:
    """Compensate, encode and pack the segments of a gradient; update their residuals.

    Reads the gradient and each residual once, writes payload and residual once. Transient memory:
    nothing beyond 64 KiB a thread on a CPU that can compile, nothing on a GPU, and a few float32
    copies of a piece of 256 Ki elements for plain PyTorch.

    Args:
        x: contiguous ``[W, N]``, row r for rank r; any float dtype.
        table: from ``work_table``, for the same device.
        payload: contiguous uint8 ``[W, row_bytes]``. With the static codec, it holds the steps.
        residuals: memory that the table's residuals are in, or None.
        config: settings of codec and feedback.
        stats: counters, added to.
        loss_scale: float32 0-d; ``x`` carries this scale, the residual does not.

    Raises:
        ValueError: a tensor is not contiguous or not on the gradient's device.

    """
    _require("x", x, x.device)
    _require("payload", payload, x.device)
    errors = None
    if stats.measure:
        tiles = max(1, x.shape[0] * table.tiles.numel())
        errors = torch.zeros(tiles, 2, dtype=torch.float64, device=x.device)
    torch.ops.loco.compress(
        x,
        *(table.segments, table.tiles, table.tile_blocks, table.aligned),
        payload,
        None if residuals is None else residuals.data,
        None if residuals is None else residuals.steps,
        stats.nonfinite_blocks,
        errors,
        loss_scale,
        *(config.scale, config.bits, config.block_size),
        *(config.static_scale, config.static_residual_scale, config.gain),
    )
    if errors is not None:
        stats.errors = errors.sum(0)


def reduce(
    payload: Tensor,
    table: TileTable,
    output: Tensor,
    values_dtype: torch.dtype,
    factor: float,
    config: LoCoConfig,
) -> None:
    """Decode W received rows, sum them in rank order in float32, scale, and cast.

    Args:
        payload: contiguous uint8 ``[W, row_bytes]``, the row of each rank.
        table: as for ``compress``.
        output: contiguous ``[N]``, any float dtype, written.
        values_dtype: of the gradient, in which uncompressed segments have travelled; float64 is
            summed in float64.
        factor: multiplies the sum.
        config: settings of the codec.

    Raises:
        ValueError: a tensor is not contiguous or not on the payload's device.

    """
    _require("payload", payload, payload.device)
    _require("output", output, payload.device)
    torch.ops.loco.reduce(
        payload,
        *(table.segments, table.tiles, table.tile_blocks, table.aligned),
        output,
        values_dtype,
        factor,
        *(config.scale, config.bits, config.block_size),
        *(config.static_scale, config.static_residual_scale),
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
        problem = None if _agrees(backend, device) else "it does not give the reference's bits"
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


def _require(name: str, tensor: Tensor, device: torch.device) -> None:
    if not tensor.is_contiguous() or tensor.device != device:
        raise ValueError(
            f"{name} has strides {tensor.stride()} for shape {tuple(tensor.shape)} on "
            f"{tensor.device}: wanted a contiguous tensor on {device}."
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

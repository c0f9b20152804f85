"""Where each parameter lies in an FSDP unit's flat gradient buffer.

The only file that knows FSDP's layout. ``buffer.view(W, -1)``: row r holds, for each parameter
with a gradient and in FSDP's order, the chunk that rank r owns, padded to the size of the largest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from loco_fsdp.config import LoCoConfig
from loco_fsdp.payload import PayloadLayout, Segment


@dataclass(frozen=True)
class UnitParameter:
    """One parameter of an FSDP unit, as it is before FSDP shards it."""

    name: str
    """Fully qualified name, the key of its residual."""
    shape: tuple[int, ...]
    shard_dim: int
    chunk_shape: tuple[int, ...]
    """Shape of one rank's chunk, padded: equal on all ranks."""

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return prod(self.shape)

    @property
    def row_numel(self) -> int:
        """Elements of one rank's padded chunk."""
        return prod(self.chunk_shape)


def exemption(
    parameter: UnitParameter, unit_numel: int, config: LoCoConfig, world_size: int
) -> str | None:
    """Say why a parameter travels uncompressed, or None if it is compressed.

    Looks only at what is equal on all ranks: name, shape before sharding, settings.
    """
    if world_size == 1:
        return "world size 1"
    if unit_numel < config.min_numel:
        return f"unit below min_numel={config.min_numel}"
    if len(parameter.shape) < 2:
        return "1-D"
    for pattern in config.skip:
        if fnmatchcase(parameter.name, pattern):
            return f"skip {pattern!r}"
    return None


def exemptions(
    parameters: Sequence[UnitParameter], config: LoCoConfig, world_size: int
) -> dict[str, str]:
    """Name -> reason, for the parameters of a unit that travel uncompressed."""
    unit_numel = sum(parameter.numel for parameter in parameters)
    found = {p.name: exemption(p, unit_numel, config, world_size) for p in parameters}
    return {name: reason for name, reason in found.items() if reason is not None}


def unit_layout(
    parameters: Sequence[UnitParameter],
    config: LoCoConfig,
    *,
    exempt: Collection[str],
    trainable: Collection[str],
    in_buffer: Collection[str],
    reduce_dtype: torch.dtype,
) -> PayloadLayout:
    """Return the wire layout of one reduction of a unit.

    Args:
        parameters: all parameters of the unit, in FSDP's order.
        config: settings.
        exempt: names that travel in full precision.
        trainable: names that have a place in the payload, so that its size is the same on all
            ranks whichever got a gradient.
        in_buffer: names that are in the gradient buffer of this reduction.
        reduce_dtype: type of the buffer.

    """
    segments = []
    start = 0
    for parameter in parameters:
        if parameter.name in in_buffer:
            place: int | None = start
            start += parameter.row_numel
        elif parameter.name in trainable:
            place = None
        else:
            continue
        compressed = parameter.name not in exempt
        segments.append(Segment(parameter.name, parameter.row_numel, compressed, place))
    return PayloadLayout(config, tuple(segments), reduce_dtype)


def rows_to_full(rows: Tensor, parameter: UnitParameter) -> Tensor:
    """Rows ``[W, row_numel]`` to the parameter's full shape, without FSDP's padding."""
    chunks = rows.view(rows.shape[0], *parameter.chunk_shape).unbind(0)
    dim = parameter.shard_dim
    return torch.cat(chunks, dim).narrow(dim, 0, parameter.shape[dim]).contiguous()


def full_to_rows(full: Tensor, parameter: UnitParameter, world_size: int) -> Tensor:
    """Undo ``rows_to_full``: the padding is 0."""
    dim, chunk = parameter.shard_dim, parameter.chunk_shape[parameter.shard_dim]
    missing = world_size * chunk - parameter.shape[dim]
    padded = F.pad(full, [0, 0] * (full.dim() - 1 - dim) + [0, missing])
    chunks = [padded.narrow(dim, rank * chunk, chunk) for rank in range(world_size)]
    return torch.stack([part.flatten() for part in chunks])


def summarize(reasons: Collection[str]) -> str:
    """``["1-D", "1-D", "skip 'x'"]`` as ``"1-D (2), skip 'x' (1)"``."""
    return ", ".join(f"{reason} ({count})" for reason, count in Counter(reasons).items())

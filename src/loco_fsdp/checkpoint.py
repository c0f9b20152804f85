"""Residuals to and from sharded tensors: what a checkpoint holds, and change of world size.

What has to survive is the pending correction, the mean of all ranks' residuals. It is saved as one
more tensor of each compressed parameter, shaped and sharded like the parameter, so it fits any
number of ranks. Values are in units of plain gradients: unscaled, and not divided by FSDP.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor, zeros

from loco_fsdp.codecs import LARGEST_BFLOAT16
from loco_fsdp.config import LoCoConfig, ResidualDtype, Scale
from loco_fsdp.kernels import reduce, work_table
from loco_fsdp.layout import full_to_rows, rows_to_full
from loco_fsdp.payload import single_segment
from loco_fsdp.unit import Unit

FORMAT_VERSION = 1

META = "loco_meta"
"""float64 ``[8]``: see `Meta`. In all modes."""

RESIDUAL = "loco_residual"
"""Mean of the ranks' residuals, with the parameter's shape and placements. ``mean``, ``exact``."""

ROWS = "loco_residual_rows"
"""float32 ``[ranks, *shape]``, sharded on dim 0: each rank's own residual. ``exact``."""

KEYS = (META, RESIDUAL, ROWS)

Entry = Mapping[str, Any]
"""What a checkpoint holds of one parameter: tensors under the names above."""

PIECE_NUMEL = 2**22
"""Elements that a rank sends at once when a mean is taken: bounds the memory that it needs."""


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter that LoCo may compress, as FSDP has sharded it now."""

    unit: Unit
    name: str
    tensor: DTensor
    divisor: float
    """FSDP divides gradients by it before the reduction: 1, except in float16."""
    replicas: dist.ProcessGroup | None
    """HSDP's group of replicas."""
    data_dims: int
    """How many of the tensor's mesh dimensions, the first ones, spread the data."""

    @property
    def ranks(self) -> int:
        """Ranks whose gradients are averaged: each has a residual of its own."""
        return self.unit.world_size * (1 if self.replicas is None else self.replicas.size())

    def rows_placements(self) -> list[Placement]:
        """Placements of ``loco_residual_rows``: its dim 0 goes over the data-parallel ranks."""
        others = self.tensor.placements[self.data_dims :]
        moved = [Shard(p.dim + 1) if isinstance(p, Shard) else p for p in others]
        return [Shard(0)] * self.data_dims + moved


@dataclass(frozen=True)
class Meta:
    """What a checkpoint says of the job that wrote it, in the order in which it is stored."""

    version: int
    steps: int
    """Optimizer steps that followed a reduction: warm-up and resets count them."""
    gain: float
    """The backlog is the residual divided by it."""
    bits: int
    block_size: int
    scale: int
    """Position in ``config.Scale``."""
    residual_dtype: int
    """Position in ``config.ResidualDtype``."""
    is_untouched: int
    """1: the inner optimizer had not done a step yet, its saved state is only a template."""

    @classmethod
    def of(cls, config: LoCoConfig, steps: int, is_untouched: bool) -> Meta:
        """Describe this job."""
        return cls(
            version=FORMAT_VERSION,
            steps=steps,
            gain=config.gain,
            bits=config.bits,
            block_size=config.block_size,
            scale=get_args(Scale).index(config.scale),
            residual_dtype=get_args(ResidualDtype).index(config.residual_dtype),
            is_untouched=int(is_untouched),
        )

    @classmethod
    def read(cls, entry: Entry) -> Meta | None:
        """Undo ``tensor()``; None if ``entry`` has none.

        Raises ``ValueError`` on a format version that this package does not know.
        """
        stored = entry.get(META)
        if not isinstance(stored, Tensor):  # flattened forms put {} where nothing was saved
            return None
        version, steps, gain, *others = stored.tolist()
        if version != FORMAT_VERSION:
            raise ValueError(
                f"The LoCo state of this checkpoint has format version {version:g}: wanted "
                f"{FORMAT_VERSION}. Load it with the loco_fsdp that wrote it, or take its "
                f"{', '.join(KEYS)} out to start with residuals of zero."
            )
        return cls(int(version), int(steps), gain, *map(int, others))

    def tensor(self, device: torch.device) -> Tensor:
        """As a tensor, since torch's flattened form of a state takes no strings."""
        # On the parameter's device: DCP refuses a state on several of them.
        return torch.tensor(astuple(self), dtype=torch.float64, device=device)


@torch.no_grad()
def collect(
    parameters: Sequence[ShardedParameter], meta: Meta, saved_ranks: int | None = None
) -> list[dict[str, Tensor]]:
    """Return what to save of each parameter. Collective over the ranks of their units.

    The memory it needs beside the result is the dense float32 residual of one parameter.

    Args:
        parameters: in the same order on all ranks.
        meta: says what job this is.
        saved_ranks: if given, ``loco_residual_rows`` is zeros with so many rows, to be loaded into.

    """
    entries = []
    # One that got its gradients on some ranks only has a residual on those ranks only.
    held = on_any_rank(parameters, [p.name in p.unit.held for p in parameters])
    for p in parameters:
        entry = {META: meta.tensor(p.tensor.to_local().device)}
        names, is_held = saved_keys(p.unit.config), p.name in held
        if RESIDUAL in names:
            entry[RESIDUAL] = _mean(p, is_held)
        if ROWS in names:
            entry[ROWS] = _own_row(p, is_held, saved_ranks or p.ranks)
        entries.append(entry)
    return entries


@torch.no_grad()
def restore(found: Iterable[tuple[ShardedParameter, Entry]]) -> None:
    """Load residuals that `collect` saved into units that hold zeros.

    Collective as `collect` is, for entries with the same names on all ranks. Any number of ranks,
    storage, block size and codec: values are dense in between. With another gain the residual is
    scaled so that the backlog, ``e / gain``, stays as it was. `validate` comes before it.
    """
    for p, entry in found:
        meta = Meta.read(entry)
        gain = p.unit.config.gain
        if meta is None or meta.gain == 0 or gain == 0:
            continue
        rows = _rows_of_own(p, entry[ROWS]) if _is_there(entry, ROWS) else None
        if rows is None and _is_there(entry, RESIDUAL):
            rows = _rows_of_mean(p, entry[RESIDUAL])
        if rows is not None and rows.any():
            p.unit.load_rows(p.name, rows * (gain / meta.gain / p.divisor))


@torch.no_grad()
def validate(found: Sequence[tuple[ShardedParameter, Entry]]) -> None:
    """Raise ``ValueError`` if an entry cannot be loaded. Collective as `collect` is.

    Its format version is another one, a tensor has a wrong shape, or, on any rank, a value that
    is not finite: then every rank raises.
    """
    for p, entry in found:
        Meta.read(entry)
        for key, wanted in ((RESIDUAL, [*p.tensor.shape]), (ROWS, ["ranks", *p.tensor.shape])):
            shape = list(entry[key].shape) if _is_there(entry, key) else wanted
            if len(shape) != len(wanted) or shape[-p.tensor.dim() :] != list(p.tensor.shape):
                text = ", ".join(map(str, wanted))
                raise ValueError(f"{key} of '{p.name}' has shape {shape}: wanted [{text}].")
    parameters = [p for p, _ in found]
    flawed = on_any_rank(parameters, [not _is_finite(entry) for _, entry in found])
    if flawed:
        raise ValueError(
            f"The saved residual of {', '.join(map(repr, sorted(flawed)))} holds a NaN or an "
            "infinity: take it out of the state to start it at zero."
        )


def saved_keys(config: LoCoConfig) -> tuple[str, ...]:
    """Names of the tensors that a checkpoint holds of each parameter."""
    if config.feedback == "none" or config.residual_checkpoint == "none":
        return (META,)
    return KEYS if config.residual_checkpoint == "exact" else (META, RESIDUAL)


def has_residual(entry: Entry) -> bool:
    """Tell whether an entry holds a residual in one of its forms."""
    return _is_there(entry, RESIDUAL) or _is_there(entry, ROWS)


def _is_there(entry: Entry, key: str) -> bool:
    return isinstance(entry.get(key), Tensor)


def _is_finite(entry: Entry) -> bool:
    """Tell whether what this rank has of the residual is finite."""
    stored = [entry[key] for key in (RESIDUAL, ROWS) if _is_there(entry, key)]
    local = [value.to_local() if isinstance(value, DTensor) else value for value in stored]
    return all(bool(value.isfinite().all()) for value in local)


def on_any_rank(parameters: Sequence[ShardedParameter], flags: Sequence[bool]) -> set[str]:
    """Names of the parameters whose flag is set on some rank that shares their residual."""
    together: dict[tuple[int, int], list[tuple[ShardedParameter, bool]]] = {}
    for p, flag in zip(parameters, flags, strict=True):
        together.setdefault((id(p.unit.group), id(p.replicas)), []).append((p, flag))
    names: set[str] = set()
    for members in together.values():  # a collective each, not one a unit
        unit, replicas = members[0][0].unit, members[0][0].replicas
        own = [flag for _, flag in members]
        found = torch.tensor(own, dtype=torch.int32, device=unit.device)
        for group in (unit.group, replicas):
            if group is not None and group.size() > 1:
                dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        names |= {p.name for (p, _), is_set in zip(members, found.tolist(), strict=True) if is_set}
    return names


def _mean(p: ShardedParameter, is_held: bool) -> Tensor:
    """This rank's shard of the mean over all ranks, as a DTensor like the parameter."""
    local = p.tensor.to_local()
    dtype: torch.dtype = getattr(torch, p.unit.config.residual_checkpoint_dtype)
    if is_held:
        parameter = p.unit.parameters[p.name]
        dim = parameter.shard_dim
        chunk = _mean_chunk(p).view(parameter.chunk_shape).narrow(dim, 0, local.shape[dim])
        if dtype == torch.bfloat16:
            chunk.clamp_(-LARGEST_BFLOAT16, LARGEST_BFLOAT16)  # rounding up gives inf
        mean = chunk.to(local.device, dtype, memory_format=torch.contiguous_format)
    else:
        mean = torch.zeros(local.shape, dtype=dtype, device=local.device)
    return _like(p.tensor, mean)


def _mean_chunk(p: ShardedParameter) -> Tensor:
    """The mean of what all ranks hold for this rank's chunk: float32 ``[row_numel]``."""
    if p.unit.world_size == 1:
        total = p.unit.rows(p.name)[0].clone()  # it may be the residual itself
    elif p.unit.config.residual_dtype == "int8":
        total = _sum_of_codes(p)
    else:
        total = _sum_of_floats(p)
    if p.replicas is not None:
        dist.all_reduce(total, group=p.replicas)
    return total.mul_(p.divisor / p.ranks)


def _sum_of_codes(p: ShardedParameter) -> Tensor:
    """Sum over the shard group of int8 residuals: they are rows of an 8-bit payload already."""
    unit = p.unit
    config = replace(unit.config, bits=8)
    layout = single_segment(config, unit.parameters[p.name].row_numel)
    payload = torch.zeros(unit.world_size, layout.row_bytes, dtype=torch.uint8, device=unit.device)
    if p.name in unit.held:
        codes, steps = unit.encoded(p.name)
        layout.codes(payload, 0).copy_(codes)
        layout.steps(payload, 0).copy_(steps)
    received = torch.empty_like(payload)
    dist.all_to_all_single(received, payload, group=unit.group)
    numel = layout.segments[0].numel
    total = torch.empty(numel, dtype=torch.float32, device=unit.device)
    table = work_table(layout, None, (), unit.device)
    reduce(received, table, total, 1.0)
    return total


def _sum_of_floats(p: ShardedParameter) -> Tensor:
    """Sum over the shard group of residuals in another storage, in pieces."""
    unit, rows = p.unit, p.unit.rows(p.name)
    total = torch.empty_like(rows[0])
    width = max(1, PIECE_NUMEL // unit.world_size)
    for start in range(0, rows.shape[1], width):
        piece = rows[:, start : start + width].contiguous()
        received = torch.empty_like(piece)
        dist.all_to_all_single(received, piece, group=unit.group)
        total[start : start + width] = received.sum(0)
    return total


def _own_row(p: ShardedParameter, is_held: bool, ranks: int) -> Tensor:
    """This rank's residual as its row of ``loco_residual_rows``."""
    mesh, placements = p.tensor.device_mesh, p.rows_placements()
    shape = torch.Size((ranks, *p.tensor.shape))
    if ranks == p.ranks and is_held:
        own = rows_to_full(p.unit.rows(p.name), p.unit.parameters[p.name]) * p.divisor
        local = own[None]
    else:
        empty = zeros(shape, dtype=torch.float32, device_mesh=mesh, placements=placements)
        local = empty.to_local()
    return DTensor.from_local(
        local.to(p.tensor.to_local().device),
        mesh,
        placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


def _rows_of_own(p: ShardedParameter, stored: Tensor) -> Tensor:
    """From ``loco_residual_rows``: the rows this rank got, times W' / W, as ``[W', row_numel]``."""
    inherited = _local(stored, p.tensor, p.rows_placements()).to(p.unit.device, torch.float32)
    full = inherited.sum(0) * (p.ranks / stored.shape[0])
    return full_to_rows(full, p.unit.parameters[p.name], p.unit.world_size)


def _rows_of_mean(p: ShardedParameter, stored: Tensor) -> Tensor:
    """From ``loco_residual``: the whole mean as float32 ``[W, row_numel]``, on every rank."""
    parameter, unit = p.unit.parameters[p.name], p.unit
    local = _local(stored, p.tensor, p.tensor.placements).to(unit.device)
    dim = parameter.shard_dim
    missing = parameter.chunk_shape[dim] - local.shape[dim]
    chunk = F.pad(local, [0, 0] * (local.dim() - 1 - dim) + [0, missing]).flatten()
    if unit.world_size == 1:
        return chunk[None].float()
    rows = chunk.new_empty(unit.world_size, chunk.numel())
    # As bytes: not every backend moves every float type.
    parts = [row.view(torch.uint8) for row in rows.unbind()]
    dist.all_gather(parts, chunk.view(torch.uint8), group=unit.group)
    return rows.float()


def _local(stored: Tensor, parameter: DTensor, placements: Sequence[Placement]) -> Tensor:
    """This rank's part of a tensor that is sharded somehow, or whole."""
    mesh = parameter.device_mesh
    if isinstance(stored, DTensor):
        if stored.device_mesh == mesh and tuple(stored.placements) == tuple(placements):
            return stored.to_local()
        stored = stored.full_tensor()
    whole = stored.to(parameter.to_local().device)
    return distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()


def _like(parameter: DTensor, local: Tensor) -> DTensor:
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )

"""Plain PyTorch, on any device, in pieces that stay in the cache: the backend that always runs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from loco_fsdp.codecs import CODECS, pack, unpack
from loco_fsdp.config import LoCoConfig
from loco_fsdp.feedback import load_blocks, next_residual, store_blocks, to_blocks
from loco_fsdp.reference import wire_steps
from loco_fsdp.tiles import Column, Form, TileTable

SCALES = tuple(CODECS)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PIECE_NUMEL = 256 * 1024  # float32 elements: 1 MiB, measured fastest on CPU


def tile_blocks(block_size: int, device: torch.device) -> int:
    """Blocks in a tile; this backend cuts its work by itself."""
    return max(1, PIECE_NUMEL // block_size)


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
    size = config.block_size
    codec = CODECS[config.scale](config)
    for segment in table.segments.tolist():
        columns = x[:, segment[Column.START] :][:, : segment[Column.NUMEL]]
        if segment[Column.FORM] == Form.VALUES:
            _values(payload, segment, x.dtype).copy_(columns)
            continue
        count, memory = segment[Column.BLOCKS], segment[Column.RESIDUAL]
        packed, steps = _codes(payload, segment, config), _steps(payload, segment)
        for rows, first, last in _pieces(x.shape[0], count, size):
            h = to_blocks(columns[rows], first, last, size).float()
            place, blocks = memory + rows.start * count + first, h.shape[0] * h.shape[1]
            e = None
            if residual is not None and memory >= 0:
                e = load_blocks(residual, residual_steps, place, blocks, config).view(h.shape)
                h = h + (e if loss_scale is None else e * loss_scale)
            codes, h_steps = codec.encode(h)
            packed[rows, first:last] = pack(codes, config.bits)
            nonfinite += h_steps.isnan().sum()
            if segment[Column.FORM] == Form.BLOCK_STEPS:
                steps[rows, first:last] = wire_steps(h_steps, last - first)
            else:
                # Of the pieces of a row, one with a NaN decides.
                known = steps[rows, :1].float()
                steps[rows, :1] = wire_steps(torch.cat([known, h_steps], dim=1), 1)
            if e is not None and residual is not None:
                error = h - codec.decode(codes, h_steps)
                new = next_residual(e, error, config.gain, loss_scale)
                new = torch.where(new.isfinite().all(-1, keepdim=True), new, e)
                store_blocks(new.flatten(0, 1), residual, residual_steps, place, config)
            if errors is not None:
                errors[0] += _squares(h, codec.decode(codes, h_steps))


def reduce(
    payload: Tensor,
    table: TileTable,
    output: Tensor,
    values_dtype: torch.dtype,
    factor: float,
    config: LoCoConfig,
) -> None:
    """See ``kernels.reduce``."""
    size = config.block_size
    codec = CODECS[config.scale](config)
    for segment in table.segments.tolist():
        out = output[segment[Column.START] :][: segment[Column.NUMEL]]
        if segment[Column.FORM] == Form.VALUES:
            _sum_rows(_values(payload, segment, values_dtype), factor, out)
            continue
        packed, steps = _codes(payload, segment, config), _steps(payload, segment)
        for _, first, last in _pieces(1, segment[Column.BLOCKS], size):
            total = payload.new_zeros(last - first, size, dtype=torch.float32)
            for row in range(payload.shape[0]):
                whole = segment[Column.FORM] == Form.ROW_STEP
                row_steps = steps[row, :1] if whole else steps[row, first:last]
                total += codec.decode(unpack(packed[row, first:last], config.bits), row_steps)
            part = out[first * size : last * size]
            part.copy_(total.mul_(factor).flatten()[: part.numel()])


def _values(payload: Tensor, segment: list[int], dtype: torch.dtype) -> Tensor:
    start = segment[Column.DATA]
    return payload[:, start : start + segment[Column.NUMEL] * dtype.itemsize].view(dtype)


def _codes(payload: Tensor, segment: list[int], config: LoCoConfig) -> Tensor:
    start, blocks = segment[Column.DATA], segment[Column.BLOCKS]
    code_bytes = config.block_size * config.bits // 8
    codes: Tensor = payload[:, start : start + blocks * code_bytes].unflatten(
        1, (blocks, code_bytes)
    )
    return codes


def _steps(payload: Tensor, segment: list[int]) -> Tensor:
    return payload.view(torch.bfloat16)[:, segment[Column.STEPS] :]


def _sum_rows(values: Tensor, factor: float, output: Tensor) -> None:
    wide = torch.promote_types(values.dtype, torch.float32)
    for piece, part in zip(values.split(PIECE_NUMEL, 1), output.split(PIECE_NUMEL), strict=True):
        total = torch.zeros(piece.shape[1], dtype=wide, device=values.device)
        for row in piece:
            total += row
        part.copy_(total.mul_(factor))


def _squares(h: Tensor, decoded: Tensor) -> Tensor:
    """Sums of (h - decoded)^2 and h^2 over the finite blocks: float64 ``[2]``."""
    # Blocks that are not finite have no error to speak of: they are counted on their own.
    error = torch.nan_to_num(h - decoded, nan=0.0, posinf=0.0, neginf=0.0)
    value = torch.where(decoded.isnan(), 0.0, h)
    return torch.stack([error.double().square().sum(), value.double().square().sum()])


def _pieces(rows: int, blocks: int, block_size: int) -> Iterator[tuple[slice, int, int]]:
    """Cut ``rows`` x ``blocks`` into pieces of at most about ``PIECE_NUMEL`` elements."""
    most = max(1, PIECE_NUMEL // block_size)
    if rows * blocks <= most:
        yield slice(0, rows), 0, blocks
        return
    for row in range(rows):
        for first in range(0, blocks, most):
            yield slice(row, row + 1), first, min(first + most, blocks)

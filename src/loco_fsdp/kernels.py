"""The operations of ``reference`` on one segment, in pieces that stay in the cache.

The same bits as the reference. Transient memory is a few float32 copies of one piece, whatever
the size of the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from loco_fsdp.codecs import CODECS, Codec, pack, unpack
from loco_fsdp.config import LoCoConfig
from loco_fsdp.feedback import ResidualState, from_blocks, next_residual, to_blocks
from loco_fsdp.reference import wire_steps

PIECE_NUMEL = 256 * 1024  # float32 elements: 1 MiB, measured fastest on CPU


@dataclass
class CallStats:
    """What one compress call saw, as 0-d tensors on the gradient's device: no host sync."""

    nonfinite_blocks: Tensor
    """int64."""
    squared_error: Tensor | None = None
    """float64, sum of (h - decoded)^2; None: not asked for."""
    squared_norm: Tensor | None = None
    """float64, sum of h^2."""

    def relative_error(self) -> float | None:
        """Norm of the error over norm of ``h``; 0 for a zero gradient, None if not measured."""
        if self.squared_error is None or self.squared_norm is None:
            return None
        norm = float(self.squared_norm)
        return (float(self.squared_error) / norm) ** 0.5 if norm else 0.0


def compress(
    x: Tensor,
    residual: ResidualState | None,
    codes: Tensor,
    steps: Tensor,
    config: LoCoConfig,
    stats: CallStats,
    loss_scale: Tensor | None = None,
) -> None:
    """Compensate, encode and pack one segment, and update its residual in place.

    Args:
        x: ``[W, N]``, float32, bfloat16, float16 or float64; any strides.
        residual: state of ``[W, N]``, or None to send without memory.
        codes: uint8 ``[W, blocks * B * bits / 8]``, written.
        steps: bfloat16 ``[W, num_steps]``, written.
        config: settings of codec and feedback.
        stats: counters, added to.
        loss_scale: float32 0-d; ``x`` carries this scale, the residual does not.

    """
    rows, numel = x.shape
    size, bits = config.block_size, config.bits
    count = -(-numel // size)
    codec = CODECS[config.scale](config)
    all_steps = torch.empty(rows, count, device=x.device)
    packed = codes.unflatten(1, (count, size * bits // 8)) if count else codes
    for part, first, last in _pieces(rows, count, size):
        h = to_blocks(x[part], first, last, size).float()
        e = None if residual is None else residual.read(part, first, last)
        if e is not None:
            h = h + (e if loss_scale is None else e * loss_scale)
        piece_codes, piece_steps = codec.encode(h)
        packed[part, first:last] = pack(piece_codes, bits)
        all_steps[part, first:last] = piece_steps
        if e is not None and residual is not None:
            error = h - codec.decode(piece_codes, piece_steps)
            residual.write(_next_blocks(e, error, piece_steps, config, loss_scale), part, first)
        if stats.squared_error is not None:
            _measure(h, codec.decode(piece_codes, piece_steps), stats)
    stats.nonfinite_blocks += all_steps.isnan().sum()
    steps.copy_(wire_steps(all_steps, steps.shape[1]))


def decompress_sum(
    codes: Tensor, steps: Tensor, config: LoCoConfig, factor: float, output: Tensor
) -> None:
    """Decode one segment of W received rows, sum them in rank order, scale, cast.

    Args:
        codes: uint8 ``[W, blocks * B * bits / 8]``.
        steps: bfloat16 ``[W, num_steps]``.
        config: settings of the codec.
        factor: multiplies the float32 sum.
        output: ``[N]``, any float dtype, written.

    """
    rows, numel = codes.shape[0], output.numel()
    size, bits = config.block_size, config.bits
    count = -(-numel // size)
    codec = CODECS[config.scale](config)
    packed = codes.unflatten(1, (count, size * bits // 8)) if count else codes
    for _, first, last in _pieces(1, count, size):
        total = torch.zeros(1, last - first, size, device=codes.device)
        for row in range(rows):
            total += _decode_row(codec, packed, steps, row, first, last, bits)
        from_blocks(total.mul_(factor), output.unsqueeze(0), first)


def sum_rows(values: Tensor, factor: float, output: Tensor) -> None:
    """Sum W full-precision rows ``[W, N]`` in rank order, scale, cast to ``output``.

    The sum is float32 (float64 for float64 rows).
    """
    wide = torch.promote_types(values.dtype, torch.float32)
    total = torch.zeros(values.shape[1], dtype=wide, device=values.device)
    for row in values:
        total += row
    output.copy_(total.mul_(factor))


def _next_blocks(
    e: Tensor, error: Tensor, steps: Tensor, config: LoCoConfig, loss_scale: Tensor | None
) -> Tensor:
    """Next residual blocks; those that would not be finite keep ``e``."""
    if loss_scale is None:
        # h and e are finite here unless the step is NaN, and then so is the error.
        keep = steps.isnan().unsqueeze(-1)
        new = next_residual(e, error, config.gain)
    else:
        new = next_residual(e, error * (1.0 / loss_scale), config.gain)
        keep = ~new.isfinite().all(-1, keepdim=True)
    return torch.where(keep, e, new)


def _decode_row(
    codec: Codec, packed: Tensor, steps: Tensor, row: int, first: int, last: int, bits: int
) -> Tensor:
    one = slice(row, row + 1)
    row_steps = steps[one] if steps.shape[1] < packed.shape[1] else steps[one, first:last]
    return codec.decode(unpack(packed[one, first:last], bits), row_steps)


def _measure(h: Tensor, decoded: Tensor, stats: CallStats) -> None:
    assert stats.squared_error is not None and stats.squared_norm is not None
    # Blocks that are not finite have no error to speak of: they are counted on their own.
    error = torch.nan_to_num(h - decoded, nan=0.0, posinf=0.0, neginf=0.0)
    norm = torch.where(decoded.isnan(), 0.0, h)
    stats.squared_error += error.double().square_().sum()
    stats.squared_norm += norm.double().square_().sum()


def _pieces(rows: int, blocks: int, block_size: int) -> Iterator[tuple[slice, int, int]]:
    """Cut ``rows`` x ``blocks`` into pieces of at most about ``PIECE_NUMEL`` elements."""
    most = max(1, PIECE_NUMEL // block_size)
    if blocks == 0:
        return
    if rows * blocks <= most:
        yield slice(0, rows), 0, blocks
        return
    for row in range(rows):
        for first in range(0, blocks, most):
            yield slice(row, row + 1), first, min(first + most, blocks)

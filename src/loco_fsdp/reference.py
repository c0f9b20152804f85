"""The definition of each operation in plain PyTorch, whole tensors at a time.

One flat reduce-scatter on rank n of W, with residual ``e[W, N]`` (arXiv 2407.04480):

    h       = x + e                                        compensate
    payload = compress(h)                                  encode
    e       = (1 - gain) * e + gain * (h - decoded)        residual; decoded = decompress(payload)
    out     = factor * sum over ranks of decoded rows      reduce, in rank order

Everything faster in this library has to give the same bits as this file, where any NaN equals any
other: a NaN's payload depends on the machine.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from loco_fsdp.codecs import CODECS, pack, unpack
from loco_fsdp.config import LoCoConfig
from loco_fsdp.feedback import next_residual, to_blocks
from loco_fsdp.payload import HEADER_BYTES, single_segment

NAN_BFLOAT16_BITS = 0x7FC0


def compress(h: Tensor, config: LoCoConfig | None = None) -> Tensor:
    """Encode ``h`` into one payload row per destination.

    Args:
        h: ``[W, N]``, any float dtype, e.g. ``[4, 1000]``; row r goes to rank r.
        config: settings of the codec.

    Returns:
        uint8 ``[W, bytes]``: header, codes, steps (see ``payload``); with 4 bits, B = 128 and
        N = 1000 that is 16 + 512 + 16 bytes.

    """
    config = config or LoCoConfig()
    layout = single_segment(config, h.shape[1])
    payload = torch.zeros(h.shape[0], layout.row_bytes, dtype=torch.uint8, device=h.device)
    header = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
    payload[:, :HEADER_BYTES] = header.to(h.device)
    if h.shape[1] == 0:
        return payload
    blocks = to_blocks(h.float(), 0, layout.num_blocks(layout.segments[0]), config.block_size)
    codes, steps = CODECS[config.scale](config).encode(blocks)
    layout.codes(payload, 0)[:] = rearrange(pack(codes, config.bits), "w block b -> w (block b)")
    layout.steps(payload, 0)[:] = wire_steps(steps, layout.num_steps(layout.segments[0]))
    return payload


def decompress(payload: Tensor, numel: int, config: LoCoConfig | None = None) -> Tensor:
    """Decode the rows that ``compress`` made.

    Args:
        payload: uint8 ``[W, bytes]``.
        numel: N, the elements of a row.
        config: the settings it was compressed with.

    Returns:
        float32 ``[W, N]``.

    Raises:
        ValueError: the payload's size or header does not fit ``numel`` and ``config``.

    """
    config = config or LoCoConfig()
    layout = single_segment(config, numel)
    if payload.dtype != torch.uint8 or payload.dim() != 2 or payload.shape[1] != layout.row_bytes:
        raise ValueError(
            f"payload is {payload.dtype} {tuple(payload.shape)}: wanted torch.uint8 "
            f"[W, {layout.row_bytes}] for {numel} elements a row ({layout.describe()})."
        )
    if any(bytes(row) != layout.header for row in payload[:, :HEADER_BYTES].tolist()):
        raise ValueError(f"payload has the header of another layout: wanted {layout.describe()}.")
    if numel == 0:
        return torch.zeros(payload.shape[0], 0, dtype=torch.float32, device=payload.device)
    code_bytes = config.block_size * config.bits // 8
    packed = rearrange(layout.codes(payload, 0), "w (block b) -> w block b", b=code_bytes)
    codec = CODECS[config.scale](config)
    blocks = codec.decode(unpack(packed, config.bits), layout.steps(payload, 0))
    return rearrange(blocks, "w block b -> w (block b)")[:, :numel]


def wire_steps(steps: Tensor, num_steps: int) -> Tensor:
    """Steps ``[W, blocks]`` as they are sent, bfloat16 ``[W, num_steps]``.

    A codec with one constant step sends it once a row, NaN if any block of the row is not finite.
    """
    if steps.shape[1] > num_steps:
        steps = steps.amax(1, keepdim=True)  # of equal values; NaN wins
    bits = steps.to(torch.bfloat16).view(torch.int16)
    # Which NaN a conversion gives depends on the machine; the wire has one.
    return torch.where(steps.isnan(), NAN_BFLOAT16_BITS, bits).view(torch.bfloat16)


def compensate(x: Tensor, e: Tensor, loss_scale: Tensor | None = None) -> Tensor:
    """Return ``h = x + e`` in float32; ``e`` is in unscaled units, ``x`` in scaled ones."""
    return x.float() + (e if loss_scale is None else e * loss_scale)


def update_residual(
    e: Tensor, h: Tensor, config: LoCoConfig, loss_scale: Tensor | None = None
) -> Tensor:
    """Return the next residual, before it is rounded to its storage.

    Args:
        e: float32 ``[W, N]``, the residual that ``h`` was compensated with.
        h: float32 ``[W, N]``, what was compressed.
        config: settings; ``config.gain`` is 1 for classic feedback.
        loss_scale: float32 0-d, the scale that ``h`` carries and ``e`` does not.

    A block whose result would hold a NaN or an infinity keeps its old residual.

    """
    if h.shape[1] == 0:
        return e
    size = config.block_size
    count = -(-h.shape[1] // size)
    old, blocks = to_blocks(e, 0, count, size), to_blocks(h, 0, count, size)
    codec = CODECS[config.scale](config)
    error = blocks - codec.decode(*codec.encode(blocks))
    new = next_residual(old, error, config.gain, loss_scale)
    finite = new.isfinite().all(-1, keepdim=True)
    return torch.where(finite, new, old).flatten(1)[:, : h.shape[1]]


def reduce(rows: Tensor, factor: float) -> Tensor:
    """Sum ``rows`` float32 ``[W, N]`` in rank order, starting from 0, then multiply: ``[N]``."""
    total = torch.zeros_like(rows[0])
    for row in rows:
        total = total + row
    return total * factor

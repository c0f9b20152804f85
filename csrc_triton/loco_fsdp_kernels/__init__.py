"""Triton kernels of loco_fsdp: one launch compresses a whole FSDP unit, one more reduces it.

Importing needs PyTorch alone; Triton is imported by the first call. The arguments are those of
``loco_fsdp.tiles.TileTable``; the result has the bits of ``loco_fsdp.reference``.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from loco_fsdp_kernels import launch

__all__ = ["compress", "reduce", "tile_blocks_for"]


def tile_blocks_for(block_size: int, device: torch.device) -> int:
    """Blocks of a tile that suit a device; make the table of tiles with it."""
    return launch.tile_blocks(block_size, launch.launch_of(launch.arch_of(device)))


def compress(
    x: Tensor,
    segments: Tensor,
    tiles: Tensor,
    payload: Tensor,
    residual: Tensor | None,
    residual_steps: Tensor | None,
    nonfinite: Tensor,
    errors: Tensor | None,
    loss_scale: Tensor | None,
    *,
    bits: int,
    block_size: int,
    code_step: float | None,
    residual_step: float | None,
    gain: float,
    tile_blocks: int,
    aligned: bool,
) -> None:
    """Compensate, encode and pack the segments of a unit, and update their residuals in place.

    Reads the gradient and the residual once, writes codes, steps and residual once; allocates
    nothing.

    Args:
        x: ``[W, R]``, float32, bfloat16 or float16, contiguous.
        segments: int64 ``[S, 8]``.
        tiles: int32 ``[T]``.
        payload: uint8 ``[W, row_bytes]``, contiguous; its codes, steps and values are written.
            With ``code_step`` the caller writes the step of each row, the kernel only a NaN.
        residual: int8, bfloat16 or float32 ``[blocks, B]``; None if no segment has one.
        residual_steps: bfloat16 ``[blocks]`` for int8 without ``residual_step``, else not read.
        nonfinite: int64 0-d, the number of blocks with NaN or infinity is added.
        errors: float64 ``[W * T, 2]``, written: per row and tile the sums of ``(h - decoded)^2``
            and ``h^2`` over finite blocks; None: not wanted.
        loss_scale: float32 0-d on the device of x, see ``loco_fsdp.feedback``; None is 1.
        bits: of a code, 4 or 8.
        block_size: B, even, from 16 to 8192.
        code_step: constant step, a bfloat16 value; None: from each block's largest element.
        residual_step: the same for the int8 residual.
        gain: of the feedback.
        tile_blocks: the tiles' size, a power of two.
        aligned: starts and sizes in the table are multiples of 16, B is one of 32.

    """
    programs = x.shape[0] * tiles.numel()
    if programs == 0:
        return
    compress_kernel = _module("compress_kernel").compress_kernel
    shape = launch.launch_of(launch.arch_of(x.device))
    aligned = aligned and x.shape[1] % 16 == 0
    has_steps = residual is not None and residual.dtype == torch.int8 and residual_step is None
    with torch.cuda.device_of(x):
        compress_kernel[(programs,)](
            _raw(x),
            segments,
            tiles,
            payload,
            _raw(residual),
            _raw(residual_steps) if has_steps else None,
            nonfinite,
            errors,
            loss_scale,
            x.shape[1],
            payload.shape[1],
            tiles.numel(),
            code_step,
            residual_step,
            _float32(gain),
            _float32(1.0 - gain),
            bits,
            block_size,
            launch.padded(block_size) // 2,
            tile_blocks,
            aligned,
            num_warps=launch.num_warps(block_size, tile_blocks, aligned, shape),
            enable_fp_fusion=False,
        )


def reduce(
    payload: Tensor,
    segments: Tensor,
    tiles: Tensor,
    output: Tensor,
    *,
    bits: int,
    block_size: int,
    factor: float,
    tile_blocks: int,
    aligned: bool,
    values_dtype: torch.dtype | None = None,
) -> None:
    """Decode the received rows, sum them in rank order, multiply, cast; allocates nothing.

    Args:
        payload: uint8 ``[W, row_bytes]``, contiguous.
        segments: int64 ``[S, 8]``.
        tiles: int32 ``[T]``.
        output: ``[N]``, float32, bfloat16 or float16, contiguous; written.
        bits: of a code, 4 or 8.
        block_size: B.
        factor: multiplies the float32 sum.
        tile_blocks: the tiles' size, a power of two.
        aligned: starts and sizes in the table are multiples of 16, B is one of 32.
        values_dtype: of the uncompressed segments; None: that of the output.

    """
    if tiles.numel() == 0:
        return
    module = _module("reduce_kernel")
    shape = launch.launch_of(launch.arch_of(payload.device))
    with torch.cuda.device_of(payload):
        module.reduce_kernel[(tiles.numel(),)](
            payload,
            segments,
            tiles,
            _raw(output),
            payload.shape[1],
            _float32(factor),
            payload.shape[0],
            module.VALUE_TYPES[values_dtype or output.dtype],
            bits,
            block_size,
            launch.padded(block_size) // 2,
            tile_blocks,
            aligned,
            num_warps=launch.num_warps(block_size, tile_blocks, aligned, shape),
            enable_fp_fusion=False,
        )


@lru_cache
def _module(name: str) -> Any:
    """One of the modules that need Triton."""
    try:
        return import_module(f"loco_fsdp_kernels.{name}")
    except ImportError as error:
        raise ImportError(
            f"loco_fsdp_kernels needs Triton, which cannot be imported ({error}). "
            "Install it with: pip install 'loco-fsdp[triton]'"
        ) from error


def _raw(tensor: Tensor | None) -> Tensor | None:
    """bfloat16 as its bits: what the kernels take."""
    if tensor is None or tensor.dtype != torch.bfloat16:
        return tensor
    return tensor.view(torch.int16)


def _float32(value: float) -> float:
    """Rounded to float32, so that it does not depend on how a launcher passes a double."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded

"""The compressed reduce-scatter over a plain process group."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor

from loco_fsdp import _torch
from loco_fsdp._torch import reduce_factor
from loco_fsdp.codecs import static_step
from loco_fsdp.config import LoCoConfig
from loco_fsdp.feedback import ResidualBuffer, ResidualState
from loco_fsdp.kernels import CallStats, compress, reduce, work_table
from loco_fsdp.payload import HEADER_BYTES, PayloadLayout, single_segment

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@torch.no_grad()
def compressed_reduce_scatter(
    output: Tensor,
    input: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    op: Any = dist.ReduceOp.AVG,
    config: LoCoConfig | None = None,
    state: ResidualState | None = None,
) -> None:
    """Reduce-scatter ``input`` at a few bits an element; a drop-in for ``reduce_scatter_tensor``.

    The whole tensor is compressed, whatever its size: ``skip`` and ``min_numel`` are rules about
    FSDP units. At W = 1 nothing is compressed: the output is the input times the factor.

    Args:
        output: N elements of any shape, strides and float dtype; rank r's share, written.
        input: ``W * N`` elements, any float dtype; the r-th N of them go to rank r.
        group: the process group, of W ranks; None is the default group. One uint8
            ``all_to_all_single`` runs on it and nothing else.
        op: ``ReduceOp.AVG``, ``SUM`` or ``PREMUL_SUM``, applied to the float32 sum.
        config: settings, equal on all ranks; defaults to the state's or to ``LoCoConfig()``.
        state: the residual of this tensor, updated; None sends without error feedback.

    Raises:
        ValueError: sizes that do not fit, a dtype or an op that is not supported, or a state
            made with another config. Nothing has been sent then.
        RuntimeError: the ranks use different settings, or the state is broken since an exchange
            failed. Ranks that give tensors of different sizes fail as in any other collective.

    """
    config = config or (state.config if state is not None else LoCoConfig())
    world_size = dist.get_world_size(group)
    _check_tensors(output, input, world_size)
    factor = reduce_factor(op, world_size)
    if state is not None:
        state.require_sound()
        if state.config != config:
            raise ValueError(f"state was made with {state.config}, this call uses {config}.")
    if world_size == 1:
        wide = torch.promote_types(input.dtype, torch.float32)
        output.copy_((input.to(wide) * factor).reshape(output.shape))
        return
    rows = rearrange(input.reshape(-1), "(w n) -> w n", w=world_size)
    result = output if output.is_contiguous() else torch.empty_like(output.contiguous())
    layout = replace(single_segment(config, rows.shape[1]), reduce_dtype=input.dtype)
    residuals = None
    if state is not None and config.feedback != "none":
        residuals = state.allocate(world_size, rows.shape[1], input.device)
    stats = CallStats(torch.zeros((), dtype=torch.int64, device=input.device))
    try:
        mismatch = exchange(
            result.view(-1), rows, layout, residuals, {""}, group=group, factor=factor, stats=stats
        )
        if mismatch:
            raise_mismatch("compressed_reduce_scatter", layout, group)
    except BaseException as error:
        if state is not None:  # it may have moved on while the gradient never arrived
            state.mark_broken(f"{type(error).__name__}: {error}")
        raise
    if result is not output:
        output.copy_(result)


def exchange(
    output: Tensor,
    rows: Tensor,
    layout: PayloadLayout,
    residuals: ResidualBuffer | None,
    names: Collection[str],
    *,
    group: dist.ProcessGroup | None,
    factor: float,
    stats: CallStats,
    loss_scale: Tensor | None = None,
) -> Tensor:
    """Compress, exchange and reduce the segments of ``layout``.

    Args:
        output: contiguous ``[N]``, any float dtype, written: the columns of the segments.
        rows: contiguous ``[W, N]`` gradient, row r for rank r.
        layout: where each segment lies in ``rows`` and on the wire.
        residuals: the memory of residuals, or None.
        names: segments whose residual is used; the others are sent without memory.
        group: process group of W ranks.
        factor: multiplies the float32 sums.
        stats: counters, added to.
        loss_scale: see ``kernels.compress``.

    Returns:
        bool 0-d on the device: some rank's header differs, so ``output`` is not to be used.
        Every rank sees all headers, so all agree. Transient memory: payload out and in, and
        what one call of the kernels needs.

    """
    table = work_table(layout, residuals, names, rows.device)
    payload = _empty_payload(rows.shape[0], layout, rows.device)
    compress(rows, table, payload, stats, loss_scale)
    received = torch.empty_like(payload)
    dist.all_to_all_single(received, payload, group=group)
    del payload
    reduce(received, table, output, factor)
    return (received[:, :HEADER_BYTES] != _header_on(layout.header, rows.device)).any()


def _empty_payload(rows: int, layout: PayloadLayout, device: torch.device) -> Tensor:
    # Zeros: padding between the parts must not carry old memory over the network, and segments
    # without a gradient travel as zeros.
    payload = torch.zeros(rows, layout.row_bytes, dtype=torch.uint8, device=device)
    payload[:, :HEADER_BYTES] = _header_on(layout.header, device)
    if layout.config.scale == "static":
        for index, segment in enumerate(layout.segments):
            if segment.compressed and segment.start is not None:
                layout.steps(payload, index).fill_(static_step(layout.config.static_scale))
    return payload


def raise_mismatch(unit: str, layout: PayloadLayout, group: dist.ProcessGroup | None) -> None:
    """Raise ``RuntimeError`` naming each rank's layout; all ranks of the group have to call it."""
    texts: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(texts, layout.describe(), group=group)
    listed = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(texts))
    raise RuntimeError(
        f"{unit}: the ranks sent gradients of different layouts, so nothing was reduced.\n"
        f"{listed}\nEvery rank has to use the same settings and to put the same parameters of a "
        "unit into one backward. For parameters used on some ranks only, call "
        "model.set_reduce_scatter_unused_params(True) (torch 2.13 or later), or shard them as "
        "units of their own that every rank runs."
    )


@lru_cache(maxsize=4096)
def _header_on(header: bytes, device: torch.device) -> Tensor:
    # Kept: copying it from pageable memory in each call would stall a GPU's stream.
    with _torch.outside_modes():
        return torch.frombuffer(bytearray(header), dtype=torch.uint8).to(device)


def _check_tensors(output: Tensor, source: Tensor, world_size: int) -> None:
    if world_size < 1:
        raise ValueError("group: this rank is not a member of it.")
    for name, tensor in (("output", output), ("input", source)):
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            kind = getattr(tensor, "layout", type(tensor).__name__)
            raise ValueError(f"{name} is a {kind}: wanted a dense tensor.")
        if tensor.dtype not in FLOAT_DTYPES:
            allowed = ", ".join(str(dtype) for dtype in FLOAT_DTYPES)
            raise ValueError(f"{name} is {tensor.dtype}: wanted one of {allowed}.")
    if source.numel() != world_size * output.numel():
        raise ValueError(
            f"input has {source.numel()} elements: wanted {world_size * output.numel()}, "
            f"{world_size} ranks times the {output.numel()} elements of output."
        )
    if source.device != output.device:
        raise ValueError(f"input is on {source.device}, output on {output.device}: wanted one.")
    if output.numel() and any(
        stride == 0 and size > 1 for size, stride in zip(output.shape, output.stride(), strict=True)
    ):
        raise ValueError("output is an expanded tensor: several elements share one memory cell.")

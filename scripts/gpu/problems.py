"""What is timed: compress and reduce of one tensor, its copy, and the unfused operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from loco_fsdp import LoCoConfig, reference
from loco_fsdp.codecs import CODECS, pack, unpack
from loco_fsdp.feedback import ResidualBuffer, load_blocks, next_residual, store_blocks, to_blocks
from loco_fsdp.payload import single_segment
from loco_fsdp.tiles import TileTable, tile_table

WORLD_SIZE = 4
"""Rows of the gradient that is compressed, and of the payload that is reduced."""

CONFIG = LoCoConfig()
"""4 bits, int8 residual, a step a block."""

Call = Callable[[], object]


@dataclass(frozen=True)
class Problem:
    """One operation on one tensor."""

    op: str
    """``compress`` or ``reduce``."""
    dtype: torch.dtype
    """Of the gradient, or of the reduced output."""
    elements: int
    """Of the gradient ``[W, N]`` that is compressed, or of the output ``[N]``."""
    device: torch.device

    @property
    def num_bytes(self) -> float:
        """Bytes that one pass has to move; steps, 2 in 128 elements, are not counted.

        Compress reads the gradient, reads and writes an int8 residual and writes codes: 6.5 bytes
        an element from float32, 4.5 from bfloat16. Reduce reads W codes and writes an element.
        """
        code_bytes = CONFIG.bits / 8
        if self.op == "compress":
            return self.elements * (self.dtype.itemsize + 2 + code_bytes)
        return self.elements * (WORLD_SIZE * code_bytes + self.dtype.itemsize)

    @property
    def copied_bytes(self) -> int:
        """Bytes that a copy of the tensor moves."""
        return 2 * self.elements * self.dtype.itemsize


class Buffers:
    """The memory of a problem, and the calls that are timed on it."""

    def __init__(self, problem: Problem) -> None:
        device, dtype, self.op = problem.device, problem.dtype, problem.op
        numel = problem.elements // (WORLD_SIZE if self.op == "compress" else 1)
        self.layout = replace(single_segment(CONFIG, numel), reduce_dtype=dtype)
        # The time does not depend on the values, so a short random stretch is repeated.
        stretch = torch.randn(min(problem.elements, 2**20), device=device).to(dtype)
        self.x = stretch.repeat(problem.elements // stretch.numel())
        self.copy = torch.zeros_like(self.x)
        self.payload = torch.zeros(
            WORLD_SIZE, self.layout.row_bytes, dtype=torch.uint8, device=device
        )
        if self.op == "compress":
            self.residuals = ResidualBuffer(CONFIG, WORLD_SIZE, {"": numel}, device)
            self.nonfinite = torch.zeros((), dtype=torch.int64, device=device)
        else:
            self.layout.codes(self.payload, 0).random_(256)
            self.layout.steps(self.payload, 0).fill_(1.0)
            self.output = self.x

    def copy_call(self) -> Call:
        """Copy the tensor, without allocating."""
        return lambda: self.copy.copy_(self.x)

    def backend_call(self, module: Any) -> Call:
        """The operation by one of ``loco_fsdp.backends``."""
        table = self._table(module)
        if self.op == "reduce":
            dtype = self.output.dtype
            return lambda: module.reduce(self.payload, table, self.output, dtype, 0.25, CONFIG)
        x = self.x.view(WORLD_SIZE, -1)
        memory = (self.residuals.data, self.residuals.steps, self.nonfinite, None, None)
        return lambda: module.compress(x, table, self.payload, *memory, CONFIG)

    def unfused_call(self) -> Call:
        """The operation as plain PyTorch on whole tensors, one pass over memory for each step."""
        return self._unfused_compress if self.op == "compress" else self._unfused_reduce

    def _table(self, module: Any) -> TileTable:
        blocks = module.tile_blocks(CONFIG.block_size, self.x.device)
        return tile_table(self.layout, (0,), blocks, self.x.device)

    def _packed(self) -> Tensor:
        code_bytes = CONFIG.block_size * CONFIG.bits // 8
        codes = self.layout.codes(self.payload, 0)
        return rearrange(codes, "w (block b) -> w block b", b=code_bytes)

    def _unfused_compress(self) -> None:
        codec, memory = CODECS[CONFIG.scale](CONFIG), self.residuals
        blocks = self.layout.num_blocks(self.layout.segments[0])
        e = load_blocks(memory.data, memory.steps, 0, WORLD_SIZE * blocks, CONFIG)
        e = e.view(WORLD_SIZE, blocks, -1)
        h = to_blocks(self.x.view(WORLD_SIZE, -1), 0, blocks, CONFIG.block_size).float() + e
        codes, steps = codec.encode(h)
        self._packed().copy_(pack(codes, CONFIG.bits))
        self.layout.steps(self.payload, 0).copy_(steps)
        new = next_residual(e, h - codec.decode(codes, steps), CONFIG.gain)
        store_blocks(new.flatten(0, 1), memory.data, memory.steps, 0, CONFIG)

    def _unfused_reduce(self) -> None:
        codec = CODECS[CONFIG.scale](CONFIG)
        codes = unpack(self._packed(), CONFIG.bits)
        rows = codec.decode(codes, self.layout.steps(self.payload, 0)).flatten(1)
        self.output.copy_(reference.reduce(rows[:, : self.output.numel()], 0.25))

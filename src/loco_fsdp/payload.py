"""The bytes on the wire: where each part of a payload row lies.

A row is what one rank sends to one other: a 16-byte header, the codes of all compressed segments,
their steps (bfloat16), and the full-precision segments. Every part starts on a multiple of 16
bytes. A segment is one parameter's share of the row. Format version 1.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from loco_fsdp.config import LoCoConfig

FORMAT_VERSION = 1
ALIGNMENT = 16  # bytes; enough for the widest vector load
HEADER_BYTES = 16

_CODEC_IDS = {"block": 1, "static": 2}  # never reuse a number: they are in saved bytes
_DTYPE_IDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.float64: 4}


@dataclass(frozen=True)
class Segment:
    """One parameter's share of a row."""

    name: str
    numel: int
    """Elements per row."""
    compressed: bool = True
    start: int | None = 0
    """First column in the row of the gradient buffer; None: not in the buffer (no gradient)."""


@dataclass(frozen=True)
class Slot:
    """Byte ranges of one segment in a payload row."""

    data: slice
    """Codes if the segment is compressed, else its values in the reduce dtype."""
    steps: slice


@dataclass(frozen=True)
class PayloadLayout:
    """Byte layout of the rows of one exchange, equal on every rank of the group."""

    config: LoCoConfig
    segments: tuple[Segment, ...]
    reduce_dtype: torch.dtype = torch.float32
    """Type in which the full-precision segments travel."""

    def num_blocks(self, segment: Segment) -> int:
        """Blocks in one row of a segment; the last may be short."""
        return -(-segment.numel // self.config.block_size)

    def num_steps(self, segment: Segment) -> int:
        """Steps stored for one row of a segment: one a block, or one in all if static."""
        blocks = self.num_blocks(segment)
        return blocks if self.config.scale == "block" else min(blocks, 1)

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """One slot per segment, in order."""
        return self._place()[0]

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one row, header included; a multiple of 16."""
        return self._place()[1]

    @cached_property
    def row_numel(self) -> int:
        """Columns of the gradient buffer that this layout reads."""
        return sum(segment.numel for segment in self.segments if segment.start is not None)

    @cached_property
    def header(self) -> bytes:
        """Format version, codec, bits, reduce dtype, block size, layout hash (8 bytes)."""
        config = self.config
        start = bytes([FORMAT_VERSION, _CODEC_IDS[config.scale], config.bits])
        start += bytes([_DTYPE_IDS[self.reduce_dtype]]) + config.block_size.to_bytes(4, "little")
        digest = hashlib.blake2b(self.describe().encode(), digest_size=8).digest()
        return start + digest

    def describe(self) -> str:
        """The layout in words: what the hash covers and what a mismatch error shows."""
        config = self.config
        parts = [f"{config.scale} codec, {config.bits} bits, block size {config.block_size}"]
        for segment in self.segments:
            form = "codes" if segment.compressed else str(self.reduce_dtype).removeprefix("torch.")
            absent = ", no gradient" if segment.start is None else ""
            parts.append(f"{segment.name or 'input'}: {segment.numel} {form}{absent}")
        return "; ".join(parts)

    def codes(self, payload: Tensor, index: int) -> Tensor:
        """View of the packed codes of segment ``index``: uint8 ``[W, blocks * code bytes]``."""
        return payload[:, self.slots[index].data]

    def steps(self, payload: Tensor, index: int) -> Tensor:
        """View of the steps of segment ``index``: bfloat16 ``[W, num_steps]``."""
        return payload[:, self.slots[index].steps].view(torch.bfloat16)

    def values(self, payload: Tensor, index: int) -> Tensor:
        """View of a full-precision segment: reduce dtype ``[W, numel]``."""
        return payload[:, self.slots[index].data].view(self.reduce_dtype)

    def _place(self) -> tuple[tuple[Slot, ...], int]:
        code_bytes = self.config.block_size * self.config.bits // 8
        wanted: list[tuple[str, int, int]] = []
        for index, segment in enumerate(self.segments):
            if segment.compressed:
                wanted.append(("codes", index, self.num_blocks(segment) * code_bytes))
                wanted.append(("steps", index, 2 * self.num_steps(segment)))
            else:
                wanted.append(("values", index, segment.numel * self.reduce_dtype.itemsize))
        offset = HEADER_BYTES
        places: dict[tuple[str, int], slice] = {}
        for part in ("codes", "steps", "values"):
            for kind, index, size in wanted:
                if kind == part:
                    places[part, index] = slice(offset, offset + size)
                    offset += size
            offset = -(-offset // ALIGNMENT) * ALIGNMENT
        nothing = slice(offset, offset)
        slots = tuple(
            Slot(places["codes", index], places["steps", index])
            if segment.compressed
            else Slot(places["values", index], nothing)
            for index, segment in enumerate(self.segments)
        )
        return slots, offset


def single_segment(config: LoCoConfig, numel: int) -> PayloadLayout:
    """The layout of a plain ``[W, numel]`` tensor: one compressed segment without a name."""
    return PayloadLayout(config, (Segment("", numel),))

"""Calls of one backend's kernels in marked memory, each compared with the reference."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loco_fsdp import reference
from loco_fsdp.codecs import CODECS, static_step
from loco_fsdp.config import LoCoConfig
from loco_fsdp.feedback import ResidualBuffer, ResidualState
from loco_fsdp.payload import PayloadLayout, Segment, single_segment
from loco_fsdp.tiles import TileTable, tile_table

MARKER = 0xA5
MARGIN = 64  # marker bytes on each side of a buffer
CPU = torch.device("cpu")
HAS_CUDA = torch.cuda.is_available()
STRANGERS = ("before", "behind")

BACKENDS = {
    "eager": ("loco_fsdp.backends.eager", "cuda" if HAS_CUDA else "cpu"),
    "compiled": ("loco_fsdp.backends.compiled", "cpu"),
    # Without a GPU, Triton's interpreter runs them: see conftest.py.
    "triton": ("loco_fsdp.backends.gpu", "cuda" if HAS_CUDA else "cpu"),
}
"""Name -> module, and the device that it is tested on."""
QUICK_BACKENDS = [name for name in BACKENDS if HAS_CUDA or name != "triton"]
SCALES = sorted(CODECS)


def supports(backend: str, dtype: torch.dtype) -> bool:
    """Whether the backend takes gradients of this dtype."""
    return dtype in import_module(BACKENDS[backend][0]).DTYPES


def cut_into_segments(numels: Sequence[int], forms: Sequence[str]) -> list[Segment]:
    """Segments one after the other; a form is ``codes``, ``values`` or ``absent``."""
    segments, start = [], 0
    for index, (numel, form) in enumerate(zip(numels, forms, strict=True)):
        place = None if form == "absent" else start
        segments.append(Segment(str(index), numel, form != "values", place))
        start += numel * (form != "absent")
    return segments


def marked(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A contiguous tensor of marker bytes, with some more before and behind it."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    memory = torch.full((2 * MARGIN + num_bytes,), MARKER, dtype=torch.uint8, device=device)
    return memory[MARGIN : MARGIN + num_bytes].view(dtype).view(torch.Size(shape))


def assert_margins(*tensors: Tensor) -> None:
    """The markers around tensors of ``marked`` are still there."""
    for tensor in tensors:
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        memory = memory.set_(tensor.untyped_storage())
        margins = torch.cat([memory[:MARGIN], memory[-MARGIN:]])
        assert bool((margins == MARKER).all()), "a byte beside a buffer was written"


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    """Equal values and signs of zero; NaN equals NaN."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert torch.equal(found.isnan(), expected.isnan())
    found, expected = found.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0)
    assert torch.equal(found, expected) and torch.equal(found.signbit(), expected.signbit())


@dataclass
class Exchange:
    """One rank's buffers and residuals for some segments, and the calls of a backend on them."""

    backend: str
    config: LoCoConfig
    segments: Sequence[Segment]
    rows: int
    dtype: torch.dtype = torch.float32
    forgetful: Collection[str] = ()
    """Segments that are sent without memory."""
    tile_blocks: int | None = None
    """Not the backend's own choice."""
    nonfinite: int = 0
    states: dict[str, ResidualState] = field(default_factory=dict)
    expected: dict[str, ResidualState] = field(default_factory=dict)
    """What the reference keeps, each segment alone."""

    def __post_init__(self) -> None:
        """Allocate the residuals, with a stranger's before and behind."""
        name, device = BACKENDS[self.backend]
        self.module: Any = import_module(name)
        self.device = torch.device(device)
        self.layout = PayloadLayout(self.config, tuple(self.segments), self.dtype)
        sizes = {s.name: s.numel for s in self.segments if self._has_memory(s)}
        sizes = {"before": 40, **sizes, "behind": 40}
        self.residuals = ResidualBuffer(self.config, self.rows, sizes, self.device)
        for name, numel in sizes.items():
            self.states[name], self.expected[name] = (ResidualState(self.config) for _ in range(2))
            self.states[name].move(self.residuals, name)
            self.expected[name].allocate(self.rows, numel, CPU)
            if name in STRANGERS and self.config.feedback != "none":
                self.load(name, torch.ones(self.rows, numel))

    @property
    def table(self) -> TileTable:
        """The table of tiles."""
        first = self.residuals.first_block
        blocks = tuple(first.get(s.name, -1) for s in self.segments)
        tile_blocks = self.tile_blocks
        if tile_blocks is None:
            tile_blocks = self.module.tile_blocks(self.config.block_size, self.device)
        return tile_table(self.layout, blocks, tile_blocks, self.device)

    def load(self, name: str, values: Tensor) -> None:
        """Set the residual of a segment, and the one expected."""
        self.states[name].load_dense(values)
        self.expected[name].load_dense(values)

    def residual(self, name: str = "0") -> Tensor:
        """Float32 ``[W, N]``."""
        return self.states[name].dense().cpu()

    def compress(self, x: Tensor, loss_scale: float | None = None, measure: bool = False) -> Tensor:
        """Compress ``x`` ``[W, N]`` and compare everything; return the payload."""
        scale = None if loss_scale is None else torch.tensor(loss_scale)
        table, source = self.table, marked(x.shape, x.dtype, self.device)
        source.copy_(x)
        payload = marked((self.rows, self.layout.row_bytes), torch.uint8, self.device)
        if self.config.scale == "static":
            for index, segment in enumerate(self.segments):
                if segment.compressed and segment.start is not None:
                    step = static_step(self.config.static_scale)
                    self.layout.steps(payload, index).fill_(step)
        expected, bad_blocks, sums = self._reference(x, payload.cpu().clone(), scale)
        nonfinite = torch.zeros((), dtype=torch.int64, device=self.device)
        tiles = max(1, self.rows * table.tiles.numel())
        errors = torch.zeros(tiles, 2, dtype=torch.float64, device=self.device)
        memory = (self.residuals.data, self.residuals.steps, nonfinite, errors if measure else None)
        scale = None if scale is None else scale.to(self.device)
        with np.errstate(all="ignore"):  # NumPy, which the interpreter uses, warns of overflow
            self.module.compress(source, table, payload, *memory, scale, self.config)
        assert torch.equal(payload.cpu(), expected)
        assert_margins(source, payload)
        assert int(nonfinite) == bad_blocks
        for name in self.states:
            assert_same_bits(self.residual(name), self.expected[name].dense())
        if measure:
            torch.testing.assert_close(errors.sum(0).cpu(), sums, rtol=1e-9, atol=0)
        self.nonfinite += bad_blocks
        return payload

    def reduce(self, payload: Tensor, factor: float, dtype: torch.dtype | None = None) -> Tensor:
        """Reduce received rows into marked memory and compare; return ``[N]`` in ``dtype``."""
        numel = sum(s.numel for s in self.segments if s.start is not None)
        output = marked((numel,), dtype or self.dtype, self.device)
        expected = output.cpu().clone()
        for index, segment in enumerate(self.segments):
            if segment.start is not None:
                part = expected[segment.start : segment.start + segment.numel]
                part.copy_(reference.reduce(self._decoded(payload.cpu(), index), factor))
        source = payload.to(self.device)
        with np.errstate(all="ignore"):
            self.module.reduce(source, self.table, output, self.dtype, factor, self.config)
        assert_same_bits(output.cpu(), expected)
        assert_margins(output)
        return output.cpu()

    def _has_memory(self, segment: Segment) -> bool:
        forgets = segment.name in self.forgetful or self.config.feedback == "none"
        return segment.compressed and not forgets

    def _reference(
        self, x: Tensor, payload: Tensor, scale: Tensor | None
    ) -> tuple[Tensor, int, Tensor]:
        """Write the payload; return it, the number of bad blocks and the sums of squares."""
        bad_blocks, sums = 0, torch.zeros(2, dtype=torch.float64)
        codec = CODECS[self.config.scale](self.config)
        for index, segment in enumerate(self.segments):
            if segment.start is None or segment.numel == 0:
                continue
            part = x[:, segment.start : segment.start + segment.numel]
            if not segment.compressed:
                self.layout.values(payload, index).copy_(part)
                continue
            state = self.expected.get(segment.name)
            e = None if state is None else state.dense()
            h = part.float() if e is None else reference.compensate(part, e, scale)
            alone = single_segment(self.config, segment.numel)
            sent = reference.compress(h, self.config)
            self.layout.codes(payload, index).copy_(alone.codes(sent, 0))
            # As bits: copying bfloat16 may change which NaN it is.
            steps = alone.steps(sent, 0).view(torch.int16)
            self.layout.steps(payload, index).view(torch.int16).copy_(steps)
            if state is not None and e is not None:
                state.load_dense(reference.update_residual(e, h, self.config, scale))
            for block in h.split(self.config.block_size, dim=1):
                good = block.isfinite().all(1)
                bad_blocks += int((~good).sum())
                error = block - codec.decode(*codec.encode(block))
                sums[0] += error[good].double().square().sum()
                sums[1] += block[good].double().square().sum()
        return payload, bad_blocks, sums

    def _decoded(self, payload: Tensor, index: int) -> Tensor:
        """Rows of one segment, decoded by the reference: float32, or float64 values."""
        segment = self.segments[index]
        if not segment.compressed:
            values = self.layout.values(payload, index)
            return values if values.dtype == torch.float64 else values.float()
        alone = single_segment(self.config, segment.numel)
        sent = reference.compress(torch.zeros(self.rows, segment.numel), self.config)
        alone.codes(sent, 0).copy_(self.layout.codes(payload, index))
        steps = self.layout.steps(payload, index).view(torch.int16)
        alone.steps(sent, 0).view(torch.int16).copy_(steps)
        return reference.decompress(sent, segment.numel, self.config)


def one_tensor(
    backend: str, config: LoCoConfig, shape: tuple[int, int], **options: Any
) -> Exchange:
    """An exchange of a plain ``[W, N]`` tensor."""
    return Exchange(backend, config, cut_into_segments([shape[1]], ["codes"]), shape[0], **options)

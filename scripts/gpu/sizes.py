"""Section of ``scripts/gpu_check``: tensors around 2^31 elements, and many small blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gpu.sections import GIB, require_memory
from kernel_calls import assert_same_bits
from loco_fsdp import LoCoConfig, ResidualState, reference
from loco_fsdp.backends import gpu
from loco_fsdp.feedback import ResidualBuffer
from loco_fsdp.payload import single_segment
from loco_fsdp.tiles import tile_table

FACTOR = 0.5


def check_sizes(
    device: torch.device, far: int = 2**31, margin: int = 65536, probe: int = 4096
) -> str:
    """Field case 66: just below, at and just beyond ``far`` elements in a row or in all rows."""
    require_memory(device, 16 * GIB if device.type == "cuda" else 0)
    shapes = [(1, far - margin), (1, far), (1, far + margin), (3, far // 2 + 65)]
    for rows, numel in shapes:
        Large(LoCoConfig(), rows, numel, far, probe, device).check()
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the next shape needs the room
    return ", ".join(f"{rows} x {numel}" for rows, numel in shapes) + " equal the reference"


def check_grid(device: torch.device, numel: int = 2**28, probe: int = 4096) -> str:
    """Field case 75: millions of blocks, more programs than a second grid axis could hold."""
    Large(LoCoConfig(block_size=32), 1, numel, numel // 2, probe, device).check()
    return f"{numel // 32} blocks of 32: no marker left"


class Large:
    """A bfloat16 gradient, and the stretches of it that are compared with the reference."""

    def __init__(
        self,
        config: LoCoConfig,
        rows: int,
        numel: int,
        far: int,
        probe: int,
        device: torch.device,
    ) -> None:
        self.config, self.rows, self.numel, self.far, self.probe = config, rows, numel, far, probe
        self.device = device
        self.layout = single_segment(config, numel)
        self.x = torch.empty(rows, numel, dtype=torch.bfloat16, device=device).normal_()
        self.residuals = ResidualBuffer(config, rows, {"": numel}, device)
        self.nonfinite = torch.zeros((), dtype=torch.int64, device=device)

    def check(self) -> None:
        """Two calls with memory, so that the residual is read too, and the sum of the rows."""
        payload = self._compress(first_block=0, fill=0x00)
        payload = self._compress(first_block=0, fill=0xFF)
        output = self._reduce(payload)
        for first, last in self._probes():
            self._check_probe(payload, output, first, last)
        del output
        # Whatever a call leaves as it was differs between these two.
        without = (self._compress(first_block=-1, fill=fill) for fill in (0x00, 0xFF))
        first_parts, second_parts = (self._parts(one) for one in without)
        if not all(map(torch.equal, first_parts, second_parts)):
            raise AssertionError(f"Some bytes of {self.rows} x {self.numel} were not written.")

    def _compress(self, first_block: int, fill: int) -> Tensor:
        payload = torch.full(
            (self.rows, self.layout.row_bytes), fill, dtype=torch.uint8, device=self.device
        )
        memory = (self.residuals.data, self.residuals.steps, self.nonfinite, None, None)
        gpu.compress(self.x, self._table(first_block), payload, *memory, self.config)
        return payload

    def _reduce(self, payload: Tensor) -> Tensor:
        output = torch.full((self.numel,), torch.nan, dtype=torch.bfloat16, device=self.device)
        gpu.reduce(payload, self._table(0), output, torch.bfloat16, FACTOR, self.config)
        if bool(output.isnan().any()):
            raise AssertionError(f"Some of {self.numel} outputs were not written.")
        return output

    def _table(self, first_block: int) -> Any:
        blocks = gpu.tile_blocks(self.config.block_size, self.device)
        return tile_table(self.layout, (first_block,), blocks, self.device)

    def _parts(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        return self.layout.codes(payload, 0), self.layout.steps(payload, 0).view(torch.int16)

    def _probes(self) -> Iterator[tuple[int, int]]:
        """Columns from a block's start: the first, the last, and those around element ``far``."""
        size, probe = self.config.block_size, self.probe
        starts = {0, self.numel - probe}
        starts |= {self.far - row * self.numel - probe // 2 for row in range(self.rows)}
        for start in sorted(starts):
            first = start // size * size
            if 0 <= first < self.numel:
                yield first, min(first + probe + size, self.numel)

    def _check_probe(self, payload: Tensor, output: Tensor, first: int, last: int) -> None:
        """The same stretch through the reference, alone: blocks know nothing of each other."""
        size, numel = self.config.block_size, last - first
        x = self.x[:, first:last].cpu()
        state = ResidualState(self.config)
        kept = state.allocate(self.rows, numel, torch.device("cpu"))
        for _ in range(2):
            e = state.dense()
            h = reference.compensate(x, e)
            state.load_dense(reference.update_residual(e, h, self.config))
        expected, layout = reference.compress(h, self.config), single_segment(self.config, numel)
        blocks = slice(first // size, -(-last // size))
        codes, steps = self._parts(payload)
        code_bytes = size * self.config.bits // 8
        place = f"columns {first} to {last} of {self.rows} x {self.numel}"
        for what, found, wanted in (
            (
                "codes",
                codes[:, blocks.start * code_bytes : blocks.stop * code_bytes],
                layout.codes(expected, 0),
            ),
            ("steps", steps[:, blocks], layout.steps(expected, 0).view(torch.int16)),
            ("residual", self.residuals.data.view(self.rows, -1, size)[:, blocks], kept.data),
            ("residual steps", self.residuals.steps.view(self.rows, -1)[:, blocks], kept.steps),
        ):
            if not torch.equal(found.cpu().flatten(), wanted.flatten()):
                raise AssertionError(f"Other {what} in {place}.")
        rows = reference.decompress(expected, numel, self.config)
        assert_same_bits(output[first:last].cpu(), reference.reduce(rows, FACTOR).bfloat16())

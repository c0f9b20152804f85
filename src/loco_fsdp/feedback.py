"""Error feedback: the rule that updates a residual, and its storage.

The residual ``e`` holds, in units of unscaled gradients, what rounding has kept back so far.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from loco_fsdp.codecs import LARGEST_BFLOAT16, RESIDUAL_CODECS, static_step
from loco_fsdp.config import LoCoConfig

_DTYPES = {"int8": torch.int8, "bfloat16": torch.bfloat16, "float32": torch.float32}


def next_residual(
    e: Tensor, error: Tensor, gain: float, loss_scale: Tensor | None = None
) -> Tensor:
    """``(1 - gain) * e + gain * error``: the moving average; classic feedback is gain 1.

    Two products and one sum, each rounded to float32; ``1 - gain`` is taken in double. No fused
    multiply-add, so that every backend gets the same bits. ``error`` carries ``loss_scale``
    (float32 0-d, None for 1), ``e`` does not.
    """
    if loss_scale is not None:
        error = error * (1.0 / loss_scale)
    return e * (1.0 - gain) + error * gain


def to_blocks(rows: Tensor, first: int, last: int, block_size: int) -> Tensor:
    """Blocks ``first`` to ``last`` of ``rows`` ``[R, N]`` as ``[R, last - first, B]``.

    A view if the row is long enough, else a copy whose last block is padded with zeros.
    """
    wanted = (last - first) * block_size
    part = rows[:, first * block_size : last * block_size]
    if part.shape[1] < wanted:
        part = F.pad(part, (0, wanted - part.shape[1]))
    blocks: Tensor = part.unflatten(1, (last - first, block_size))
    return blocks


class ResidualBuffer:
    """The residuals of some gradients in one piece of memory, so that one call updates all.

    A gradient ``[W, N]`` has W rows of ``ceil(N / B)`` whole blocks here, whatever N is; the
    padding is always 0.
    """

    def __init__(
        self, config: LoCoConfig, rows: int, sizes: Mapping[str, int], device: torch.device
    ) -> None:
        self.config = config
        self.rows = rows
        self.sizes = dict(sizes)
        self.first_block: dict[str, int] = {}
        """Name -> its first block, that of row 0."""
        blocks = 0
        for name, numel in sizes.items():
            self.first_block[name] = blocks
            blocks += rows * -(-numel // config.block_size)
        self.data = torch.zeros(
            blocks, config.block_size, dtype=_DTYPES[config.residual_dtype], device=device
        )
        """``[blocks, B]``: int8 codes, bfloat16 or float32."""
        coded = config.residual_dtype == "int8" and config.scale == "block"
        self.steps = torch.zeros(blocks if coded else 0, dtype=torch.bfloat16, device=device)
        """A step a block, if the codes have steps of their own."""

    @staticmethod
    def planned_bytes(rows: int, numel: int, config: LoCoConfig) -> int:
        """Bytes that a gradient of ``rows`` x ``numel`` elements takes."""
        coded = config.residual_dtype == "int8" and config.scale == "block"
        block = config.block_size * _DTYPES[config.residual_dtype].itemsize + 2 * coded
        return rows * -(-numel // config.block_size) * block

    def blocks(self, name: str) -> slice:
        """Where the blocks of one gradient are."""
        first = self.first_block[name]
        return slice(first, first + self.rows * -(-self.sizes[name] // self.config.block_size))


def load_blocks(
    data: Tensor, steps: Tensor | None, first: int, count: int, config: LoCoConfig
) -> Tensor:
    """Blocks of a ``ResidualBuffer`` as float32 ``[count, B]``."""
    blocks = data[first : first + count]
    if data.dtype != torch.int8:
        return blocks.float()
    if steps is not None and steps.numel():
        steps = steps[first : first + count]
    else:
        step = static_step(config.static_residual_scale)
        steps = torch.full((1,), step, dtype=torch.float32, device=data.device)
    return RESIDUAL_CODECS[config.scale](config).decode(blocks, steps)


def store_blocks(
    blocks: Tensor, data: Tensor, steps: Tensor | None, first: int, config: LoCoConfig
) -> None:
    """Store finite float32 blocks ``[K, B]`` in a ``ResidualBuffer`` from block ``first`` on."""
    last = first + blocks.shape[0]
    if data.dtype == torch.bfloat16:
        blocks = blocks.clamp(-LARGEST_BFLOAT16, LARGEST_BFLOAT16)  # rounding up gives inf
    elif data.dtype == torch.int8:
        blocks, block_steps = RESIDUAL_CODECS[config.scale](config).encode(blocks)
        if steps is not None and steps.numel():
            steps[first:last] = block_steps.to(torch.bfloat16)
    data[first:last] = blocks


class ResidualState:
    """The residual of one ``[W, N]`` gradient on this rank; its first use allocates it.

    Stored as int8 codes with a bfloat16 step a block (1 byte and 2/B an element), as bfloat16 or
    as float32, by ``config.residual_dtype``. Holds nothing with ``feedback="none"``.
    """

    def __init__(self, config: LoCoConfig | None = None) -> None:
        self.config = config or LoCoConfig()
        self._buffer: ResidualBuffer | None = None
        self._name = ""
        self._broken: str | None = None

    @property
    def shape(self) -> tuple[int, int] | None:
        """``(W, N)``, or None before the first use."""
        if self._buffer is None:
            return None
        return self._buffer.rows, self._buffer.sizes[self._name]

    def num_bytes(self) -> int:
        """Bytes held now."""
        return 0 if self.shape is None else self.planned_bytes(*self.shape, self.config)

    @staticmethod
    def planned_bytes(rows: int, numel: int, config: LoCoConfig) -> int:
        """Bytes that a residual of ``rows`` x ``numel`` elements will hold."""
        if config.feedback == "none":
            return 0
        return ResidualBuffer.planned_bytes(rows, numel, config)

    def mark_broken(self, reason: str) -> None:
        """Refuse use until ``reset`` or ``load_dense``: an exchange failed half way."""
        self._broken = reason

    def require_sound(self) -> None:
        """Raise ``RuntimeError`` if it is marked broken."""
        if self._broken is not None:
            raise RuntimeError(
                f"This residual is broken since an exchange failed ({self._broken}): it may be "
                "half updated. Call its reset() on every rank, or load_dense() what you have saved."
            )

    def move(self, buffer: ResidualBuffer, name: str) -> None:
        """Live in a buffer that holds other residuals too, with the values of now."""
        if self._buffer is not None:
            old, new = self._buffer.blocks(self._name), buffer.blocks(name)
            buffer.data[new] = self._buffer.data[old]
            buffer.steps[new] = self._buffer.steps[old]  # none are there if codes have no steps
        self._buffer, self._name = buffer, name

    def allocate(self, rows: int, numel: int, device: torch.device) -> ResidualBuffer:
        """Hold zeros of ``[rows, numel]``, unless that is what it holds; return the memory.

        Raises ``ValueError`` if it holds another shape.
        """
        if self._buffer is None:
            self.move(ResidualBuffer(self.config, rows, {"": numel}, device), "")
        if self.shape != (rows, numel):
            raise ValueError(
                f"The residual holds {list(self.shape or ())} elements but the gradient has "
                f"[{rows}, {numel}]: use one ResidualState per tensor."
            )
        return self._require_buffer()

    def dense(self) -> Tensor:
        """The residual as float32 ``[W, N]``, a copy.

        Raises ``RuntimeError`` before the first use, when the shape is not known.
        """
        return self._load(slice(0, self._require_buffer().rows)).clone()

    def load_dense(self, values: Tensor) -> None:
        """Store ``values`` ``[W, N]``, any float dtype, in the residual's own storage.

        Raises ``ValueError`` on a wrong shape or non-finite values; nothing is stored then.
        """
        if values.dim() != 2:
            raise ValueError(f"The residual is [W, N], got shape {tuple(values.shape)}.")
        values = values.detach().float()
        if not bool(values.isfinite().all()):
            raise ValueError("The residual to load holds NaN or infinite values (as float32).")
        if self.config.feedback == "none":
            raise ValueError('feedback="none" keeps no residual, so none can be loaded.')
        buffer = self.allocate(values.shape[0], values.shape[1], values.device)
        self._broken = None
        place, size = buffer.blocks(self._name), self.config.block_size
        count = (place.stop - place.start) // buffer.rows
        blocks = to_blocks(values.to(buffer.data.device), 0, count, size).flatten(0, 1)
        store_blocks(blocks, buffer.data, buffer.steps, place.start, self.config)

    def encoded(self) -> tuple[Tensor, Tensor]:
        """An int8 residual as it is stored, a view.

        uint8 ``[W, blocks * B]``, and its steps, bfloat16 ``[W, blocks]`` or ``[1, 1]`` for all.
        """
        buffer = self._require_buffer()
        place = buffer.blocks(self._name)
        codes = buffer.data[place].view(buffer.rows, -1).view(torch.uint8)
        if buffer.steps.numel():
            return codes, buffer.steps[place].view(buffer.rows, -1)
        step = static_step(self.config.static_residual_scale)
        return codes, torch.full((1, 1), step, dtype=torch.bfloat16, device=codes.device)

    def norm(self) -> float:
        """Euclidean norm; reads the residual row by row."""
        rows = range(self._require_buffer().rows)
        squares = [float(self._load(slice(r, r + 1)).double().square().sum()) for r in rows]
        return float(sum(squares) ** 0.5)

    def reset(self) -> None:
        """Forget: every value becomes 0; the memory stays. A broken residual is whole again."""
        self._broken = None
        if self._buffer is not None:
            place = self._buffer.blocks(self._name)
            self._buffer.data[place] = 0
            self._buffer.steps[place] = 0  # none are there if the codes have no steps

    def _load(self, rows: slice) -> Tensor:
        buffer = self._require_buffer()
        place, numel = buffer.blocks(self._name), buffer.sizes[self._name]
        a_row = (place.stop - place.start) // buffer.rows
        first, count = place.start + rows.start * a_row, (rows.stop - rows.start) * a_row
        blocks = load_blocks(buffer.data, buffer.steps, first, count, self.config)
        return blocks.view(rows.stop - rows.start, -1)[:, :numel]

    def _require_buffer(self) -> ResidualBuffer:
        if self._buffer is None:
            raise RuntimeError("The residual has no shape yet: its first reduction allocates it.")
        return self._buffer

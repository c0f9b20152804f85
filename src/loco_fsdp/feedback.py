"""Error feedback: the rule that updates a residual, and its storage.

The residual ``e`` holds, in units of unscaled gradients, what rounding has kept back so far.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from loco_fsdp.codecs import LARGEST_BFLOAT16, RESIDUAL_CODECS
from loco_fsdp.config import LoCoConfig

_DTYPES = {"int8": torch.int8, "bfloat16": torch.bfloat16, "float32": torch.float32}


def next_residual(e: Tensor, error: Tensor, gain: float) -> Tensor:
    """``(1 - gain) * e + gain * error``: the moving average; classic feedback is gain 1.

    Two products and one sum, each rounded to float32; ``1 - gain`` is taken in double. No fused
    multiply-add, so that every backend gets the same bits.
    """
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


def from_blocks(blocks: Tensor, rows: Tensor, first: int) -> None:
    """Write ``blocks`` ``[R, K, B]`` into ``rows`` ``[R, N]`` from block ``first`` on."""
    start = first * blocks.shape[-1]
    part = rows[:, start : start + blocks.shape[1] * blocks.shape[2]]
    part.copy_(blocks.flatten(1)[:, : part.shape[1]])


class ResidualState:
    """The residual of one ``[W, N]`` gradient on this rank; its first use allocates it.

    Stored as int8 codes with a bfloat16 step a block (1 byte and 2/B an element), as bfloat16 or
    as float32, by ``config.residual_dtype``. Holds nothing with ``feedback="none"``.
    """

    def __init__(self, config: LoCoConfig | None = None) -> None:
        self.config = config or LoCoConfig()
        self._data: Tensor | None = None
        self._steps: Tensor | None = None
        self._broken: str | None = None
        self._codec = RESIDUAL_CODECS[self.config.scale](self.config)

    @property
    def shape(self) -> tuple[int, int] | None:
        """``(W, N)``, or None before the first use."""
        return None if self._data is None else (self._data.shape[0], self._data.shape[1])

    def num_bytes(self) -> int:
        """Bytes held now."""
        return sum(t.nbytes for t in (self._data, self._steps) if t is not None)

    @staticmethod
    def planned_bytes(rows: int, numel: int, config: LoCoConfig) -> int:
        """Bytes that a residual of ``rows`` x ``numel`` elements will hold."""
        if config.feedback == "none":
            return 0
        has_steps = config.residual_dtype == "int8" and config.scale == "block"
        steps = -(-numel // config.block_size) if has_steps else 0
        return rows * (numel * _DTYPES[config.residual_dtype].itemsize + 2 * steps)

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

    def allocate(self, rows: int, numel: int, device: torch.device) -> None:
        """Hold zeros of ``[rows, numel]``; does nothing if that is what it holds.

        Raises ``ValueError`` if it holds another shape.
        """
        if self.shape is not None:
            if self.shape != (rows, numel):
                raise ValueError(
                    f"The residual holds [{self.shape[0]}, {self.shape[1]}] elements but the "
                    f"gradient has [{rows}, {numel}]: use one ResidualState per tensor."
                )
            return
        dtype = _DTYPES[self.config.residual_dtype]
        data = torch.zeros(rows, numel, dtype=dtype, device=device)
        if dtype == torch.int8 and self.config.scale == "block":
            blocks = -(-numel // self.config.block_size)
            self._steps = torch.zeros(rows, blocks, dtype=torch.bfloat16, device=device)
        self._data = data

    def read(self, rows: slice, first: int, last: int) -> Tensor:
        """Blocks ``first`` to ``last`` of some rows, float32 ``[R, last - first, B]``."""
        data = self._require_data()[rows]
        blocks = to_blocks(data, first, last, self.config.block_size)
        if data.dtype != torch.int8:
            return blocks.float()
        return self._codec.decode(blocks, self._int8_steps(rows, first, last))

    def write(self, blocks: Tensor, rows: slice, first: int) -> None:
        """Store finite float32 blocks ``[R, K, B]`` from block ``first`` on."""
        data = self._require_data()[rows]
        if data.dtype == torch.bfloat16:
            blocks = blocks.clamp(-LARGEST_BFLOAT16, LARGEST_BFLOAT16)  # rounding up gives inf
        elif data.dtype == torch.int8:
            blocks, steps = self._codec.encode(blocks)
            if self._steps is not None:
                self._steps[rows, first : first + steps.shape[1]] = steps.to(torch.bfloat16)
        from_blocks(blocks, data, first)

    def dense(self) -> Tensor:
        """The residual as float32 ``[W, N]``, a copy.

        Raises ``RuntimeError`` before the first use, when the shape is not known.
        """
        data = self._require_data()
        blocks = -(-data.shape[1] // self.config.block_size)
        return self.read(slice(None), 0, blocks).flatten(1)[:, : data.shape[1]].clone()

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
        self._broken = None
        self.allocate(values.shape[0], values.shape[1], values.device)
        blocks = -(-values.shape[1] // self.config.block_size)
        values = values.to(self._require_data().device)
        self.write(to_blocks(values, 0, blocks, self.config.block_size), slice(None), 0)

    def norm(self) -> float:
        """Euclidean norm; reads the residual row by row."""
        data = self._require_data()
        blocks = -(-data.shape[1] // self.config.block_size)
        rows = (self.read(slice(r, r + 1), 0, blocks) for r in range(data.shape[0]))
        return float(sum(float(row.double().square().sum()) for row in rows) ** 0.5)

    def reset(self) -> None:
        """Forget: every value becomes 0; the memory stays. A broken residual is whole again."""
        self._broken = None
        for tensor in (self._data, self._steps):
            if tensor is not None:
                tensor.zero_()

    def _require_data(self) -> Tensor:
        if self._data is None:
            raise RuntimeError("The residual has no shape yet: its first reduction allocates it.")
        return self._data

    def _int8_steps(self, rows: slice, first: int, last: int) -> Tensor:
        if self._steps is not None:
            return self._steps[rows, first:last]
        step = torch.tensor(1.0 / self.config.static_residual_scale).to(torch.bfloat16)
        return step.to(self._require_data().device).expand(1, 1)

"""Codecs: how a block of float32 values becomes a few bits each and one step.

A codec works on blocks, tensors ``[..., B]``. To add one, write a class with the two methods of
``Codec`` and give it a row in ``CODECS``: the contract tests find it there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from einops import rearrange
from torch import Tensor

from loco_fsdp.config import LoCoConfig

# Below this a float32 is subnormal, which some devices flush to zero: such steps become 0
# everywhere, so that all devices agree.
SMALLEST_NORMAL = 2.0**-126
LARGEST_BFLOAT16 = torch.finfo(torch.bfloat16).max


class Codec(Protocol):
    """What a codec has to offer; all arithmetic is float32."""

    def encode(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Round blocks to codes.

        Args:
            h: float32 ``[..., B]``, e.g. ``[4 rows, 12 blocks, 128]``.

        Returns:
            codes: int8 ``[..., B]``, each in ``[-2^(b-1), 2^(b-1) - 1]``.
            steps: float32 ``[...]``, values that bfloat16 holds exactly; NaN where the block
                holds a NaN or an infinity (its codes are 0).

        """

    def decode(self, codes: Tensor, steps: Tensor) -> Tensor:
        """Return float32 ``[..., B]`` from ``codes`` and ``steps`` (any float dtype)."""


@dataclass(frozen=True)
class BlockCodec:
    """The step follows the element of largest magnitude, sign included.

    That element lands on the most negative code, so no code is wasted and ``Q(-x) = -Q(x)``.
    """

    bits: int

    def encode(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """See ``Codec.encode``."""
        half_range = 2 ** (self.bits - 1)
        steps = (signed_extreme(h) / -half_range).to(torch.bfloat16).float()
        # Rounding up to bfloat16 must not push the decoded extreme over the float32 range.
        finite = steps.isfinite()
        steps = steps.clamp(-LARGEST_BFLOAT16 / half_range, LARGEST_BFLOAT16 / half_range)
        steps = torch.where(steps.abs() < SMALLEST_NORMAL, 0.0, steps)
        return round_to_codes(h, torch.where(finite, steps, torch.nan), self.bits)

    def decode(self, codes: Tensor, steps: Tensor) -> Tensor:
        """See ``Codec.decode``."""
        return codes.float() * steps.float().unsqueeze(-1)


@dataclass(frozen=True)
class StaticCodec:
    """The paper's codec: one constant step, values out of range saturate."""

    bits: int
    codes_per_unit: float

    def encode(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """See ``Codec.encode``."""
        step = static_step(self.codes_per_unit)
        finite = h.isfinite().all(-1)
        steps = torch.where(finite, torch.full_like(h[..., 0], step), torch.nan)
        return round_to_codes(h, steps, self.bits)

    def decode(self, codes: Tensor, steps: Tensor) -> Tensor:
        """See ``Codec.decode``."""
        return codes.float() * steps.float().unsqueeze(-1)


CODECS: dict[str, Callable[[LoCoConfig], Codec]] = {
    "block": lambda config: BlockCodec(config.bits),
    "static": lambda config: StaticCodec(config.bits, config.static_scale),
}
"""Setting ``scale`` -> codec of the wire."""

RESIDUAL_CODECS: dict[str, Callable[[LoCoConfig], Codec]] = {
    "block": lambda config: BlockCodec(8),
    "static": lambda config: StaticCodec(8, config.static_residual_scale),
}
"""Setting ``scale`` -> codec of the int8 residual."""


def static_step(codes_per_unit: float) -> float:
    """The constant step ``1 / codes_per_unit``, as bfloat16 holds it."""
    return float(torch.tensor(1.0 / codes_per_unit, dtype=torch.float32, device="cpu").bfloat16())


def signed_extreme(h: Tensor) -> Tensor:
    """Element of largest magnitude of each block, the first one on a tie, with its sign.

    ``h``: float32 ``[..., B]``; returns ``[...]``. NaN if the block holds a NaN.
    """
    if h.device.type == "cpu" and not torch.compiler.is_compiling():
        # On CPU argmax takes ten times as long as amax, and only its tie rule is needed. (In a
        # graph of torch.compile nothing may depend on what the values are.)
        high, low = h.amax(-1), h.amin(-1)
        if not ((high == -low) & (high != 0)).any():
            return torch.where(high > -low, high, low)
    return h.gather(-1, h.abs().argmax(-1, keepdim=True)).squeeze(-1)


def round_to_codes(h: Tensor, steps: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """``clamp(round_half_even(h / step))``; codes are 0 where the step is 0 or NaN.

    ``h``: float32 ``[..., B]``; ``steps``: float32 ``[...]``. Returns int8 codes and the steps.
    """
    half_range = 2 ** (bits - 1)
    # Dividing by infinity gives the code 0 to all but non-finite elements, which give NaN.
    usable = torch.where((steps == 0) | steps.isnan(), torch.inf, steps)
    scaled = (h / usable.unsqueeze(-1)).round_().clamp_(-half_range, half_range - 1)
    return scaled.nan_to_num_(nan=0.0).to(torch.int8), steps


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack int8 codes ``[..., B]`` into uint8 ``[..., B * bits / 8]``.

    With 4 bits, byte i of a block holds code i in its low nibble and code i + B/2 in its high
    one, as two's complement.
    """
    raw = codes.view(torch.uint8)
    if bits == 8:
        return raw
    halves: Tensor = rearrange(raw, "... (nibble byte) -> nibble ... byte", nibble=2)
    return (halves[0] & 0xF) | (halves[1] << 4)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Undo ``pack``: uint8 ``[..., B * bits / 8]`` to int8 ``[..., B]``."""
    raw = packed.view(torch.int8)
    if bits == 8:
        return raw
    # An arithmetic shift right of the int8 extends the sign of the nibble.
    return torch.cat([(packed << 4).view(torch.int8) >> 4, raw >> 4], dim=-1)

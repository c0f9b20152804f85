"""Launch shapes: how much of a gradient one program takes, and with how many warps.

Chosen from the register counts of ahead-of-time compilation and by reasoning about loads in
flight; not measured on a GPU. A row may be replaced: ``LAUNCHES["sm_90"] = Launch(...)`` before
the first step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True)
class Launch:
    """Launch shape of one architecture."""

    tile_numel: int
    """Elements of a tile; a larger block is a tile of its own."""
    warp_numel: int
    """Elements of a tile for each warp."""


# One thread takes 16 elements, 8 neighbours of each half block: bfloat16 gradients move in 128-bit
# words, int8 residuals and 4-bit codes in 64-bit ones. With 32 elements registers run short.
LAUNCHES = {
    "sm_80": Launch(tile_numel=2048, warp_numel=512),
    "sm_90": Launch(tile_numel=2048, warp_numel=512),
    "sm_100": Launch(tile_numel=2048, warp_numel=512),
    "gfx942": Launch(tile_numel=4096, warp_numel=1024),  # a wave has 64 lanes
    "": Launch(tile_numel=2048, warp_numel=512),
}
"""Architecture -> launch shape; "" for all others."""


@lru_cache
def arch_of(device: torch.device) -> str:
    """Name of a device's architecture, such as ``sm_90``; "" if it has none."""
    if device.type != "cuda":
        return ""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def launch_of(arch: str) -> Launch:
    """Launch shape of an architecture."""
    return LAUNCHES.get(arch, LAUNCHES[""])


def tile_blocks(block_size: int, launch: Launch) -> int:
    """Blocks of a tile, a power of two."""
    return max(1, launch.tile_numel // padded(block_size))


def num_warps(block_size: int, tile_blocks: int, aligned: bool, launch: Launch) -> int:
    """Warps of a program, a power of two from 1 to 16."""
    # Accesses of single elements take an address register each, so that a thread can do fewer.
    warp_numel = launch.warp_numel if aligned else launch.warp_numel // 2
    return min(max(1, tile_blocks * padded(block_size) // warp_numel), 16)


def padded(block_size: int) -> int:
    """Elements that a block takes in a tile: a power of two."""
    return 2 * int(1 << (block_size // 2 - 1).bit_length())

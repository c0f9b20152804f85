"""The launch grid, and a machine without Triton."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

import loco_fsdp_kernels
from kernel_calls import BACKENDS

pytest.importorskip("triton")

DEVICE = torch.device(BACKENDS["triton"][1])


def test_grid_has_one_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Field case 75: the first axis may have 2^31 - 1 programs, the others only 65535."""
    from loco_fsdp_kernels import compress_kernel, reduce_kernel

    grids: list[tuple[int, ...]] = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return lambda *args, **kwargs: None

    monkeypatch.setattr(compress_kernel, "compress_kernel", Recorder())
    monkeypatch.setattr(reduce_kernel, "reduce_kernel", Recorder())
    tiles = torch.zeros(70000, dtype=torch.int32, device=DEVICE)
    x, payload = torch.zeros(3, 16), torch.zeros(3, 32, dtype=torch.uint8)
    shape: dict[str, Any] = {"bits": 4, "block_size": 16, "tile_blocks": 1, "aligned": False}
    steps: dict[str, Any] = {"code_step": None, "residual_step": None, "gain": 1.0}
    nothing: Any = None
    loco_fsdp_kernels.compress(
        x, tiles, tiles, payload, None, None, nothing, None, None, **steps, **shape
    )
    loco_fsdp_kernels.reduce(payload, tiles, tiles, x[0], factor=1.0, **shape)
    assert grids == [(210000,), (70000,)]


def test_import_without_triton() -> None:
    """Field case 12: the package imports, its use says what is missing."""
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, loco_fsdp_kernels as kernels\n"
        "assert kernels.tile_blocks_for(128, torch.device('cpu')) == 16\n"
        "x = torch.zeros(1, 16); tiles = torch.zeros(1, dtype=torch.int32)\n"
        "shape = dict(bits=4, block_size=16, tile_blocks=1, aligned=False)\n"
        "try:\n    kernels.reduce(x, tiles, tiles, x, factor=1.0, **shape)\n"
        "except ImportError as error:\n    assert 'loco-fsdp[triton]' in str(error)\n"
        "else:\n    raise AssertionError\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)

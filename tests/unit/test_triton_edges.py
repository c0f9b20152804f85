"""Far offsets, the launch grid, and a machine without Triton."""

from __future__ import annotations

import mmap
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import loco_fsdp_kernels
from kernel_calls import BACKENDS, assert_same_bits
from loco_fsdp import LoCoConfig, reference
from loco_fsdp.codecs import RESIDUAL_CODECS
from loco_fsdp.payload import single_segment
from loco_fsdp.tiles import tile_table
from strategies import values_of_kind

pytest.importorskip("triton")

DEVICE = torch.device(BACKENDS["triton"][1])


@pytest.mark.parametrize(("far", "rows"), [(2**31 + 32, 2), (3 * 2**28, 4)])
def test_offsets_beyond_two_to_the_31(far: int, rows: int) -> None:
    """Field case 66: a segment behind 2^31 elements of one row, or of shorter rows together.

    The buffers are address space; only the touched pages take memory.
    """
    if DEVICE.type != "cpu":
        pytest.skip("scripts/gpu_check does it with real memory")
    numel, block_size = 200, 128
    config = LoCoConfig()
    layout = single_segment(config, numel)
    table = tile_table(layout, (far // block_size,), 2, DEVICE)
    table.segments[0, :4] = torch.tensor([far, numel, far, far])
    x = address_space((rows, far + 224), torch.bfloat16)
    payload = address_space((rows, 2 * far + 64), torch.uint8)
    residual = address_space((far // block_size + 2 * rows, block_size), torch.int8)
    residual_steps = torch.zeros(residual.shape[0], dtype=torch.bfloat16)
    x[:, far : far + numel] = values_of_kind("normal", (rows, numel), 0).bfloat16()
    expected = reference.compress(x[:, far : far + numel], config)
    shape: dict[str, Any] = {"bits": 4, "block_size": block_size, "tile_blocks": 2}
    loco_fsdp_kernels.compress(
        x,
        table.segments,
        table.tiles,
        payload,
        residual,
        residual_steps,
        torch.zeros((), dtype=torch.int64),
        None,
        None,
        code_step=None,
        residual_step=None,
        gain=1.0,
        aligned=False,
        **shape,
    )
    assert torch.equal(payload[:, far : far + 128], layout.codes(expected, 0))
    steps = payload[:, 2 * far : 2 * far + 4].view(torch.bfloat16)
    assert torch.equal(steps, layout.steps(expected, 0))
    h = x[:, far : far + numel].float()
    error = h - reference.decompress(expected, numel, config)
    blocks = torch.nn.functional.pad(error, (0, 56)).view(-1, block_size)
    codes, _ = RESIDUAL_CODECS["block"](config).encode(blocks)
    assert torch.equal(residual[far // block_size :], codes)
    output = address_space((far + 224,), torch.float32)
    loco_fsdp_kernels.reduce(
        payload, table.segments, table.tiles, output, factor=0.5, aligned=False, **shape
    )
    rows_decoded = reference.decompress(expected, numel, config)
    assert_same_bits(output[far : far + numel], reference.reduce(rows_decoded, 0.5))


def address_space(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros of which only the pages that are touched take memory."""
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # older Pythons do not name it
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    memory = mmap.mmap(-1, torch.Size(shape).numel() * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


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

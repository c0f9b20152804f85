"""Elements and bytes behind 2^32, in buffers that are mostly address space."""

from __future__ import annotations

import mmap
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_calls import BACKENDS, HAS_CUDA, assert_same_bits, cut_into_segments
from loco_fsdp import LoCoConfig, reference
from loco_fsdp.codecs import RESIDUAL_CODECS
from loco_fsdp.payload import PayloadLayout, single_segment
from loco_fsdp.tiles import TileTable, tile_table
from strategies import values_of_kind

CPU = torch.device("cpu")
CODED, PLAIN, BLOCK = 200, 40, 128  # elements of a segment with codes and of one without


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("far", "rows"), [(2**32 + 32, 2), (2**31 + 32, 3)])
def test_offsets_beyond_32_bits(backend: str, far: int, rows: int) -> None:
    """Field case 66: segments behind 2^32 elements of one row, or of shorter rows together.

    Every place is there: of the gradient, codes, steps, plain values, residual and output.
    Triton's interpreter gets some products of row sizes from 2^31 to 2^32 wrong; none is one.
    """
    if HAS_CUDA and backend != "compiled":
        pytest.skip("scripts/gpu_check does it with real memory")
    module: Any = pytest.importorskip(BACKENDS[backend][0])
    config = LoCoConfig()
    table = move_behind(far, config)
    x = address_space((rows, far + 256), torch.bfloat16)
    payload = address_space((rows, 2 * far + 192), torch.uint8)
    residual = address_space((far // BLOCK + 2 * rows, BLOCK), torch.int8)
    residual_steps = torch.zeros(residual.shape[0], dtype=torch.bfloat16)
    coded, plain = x[:, far : far + CODED], x[:, far + CODED : far + CODED + PLAIN]
    coded.copy_(values_of_kind("normal", (rows, CODED), 0))
    plain.copy_(values_of_kind("normal", (rows, PLAIN), 1))
    expected, layout = reference.compress(coded, config), single_segment(config, CODED)
    memory = (residual, residual_steps, torch.zeros((), dtype=torch.int64))
    module.compress(x, table, payload, *memory, None, None, config)
    assert torch.equal(payload[:, far : far + 128], layout.codes(expected, 0))
    assert torch.equal(
        payload[:, 2 * far : 2 * far + 4], layout.steps(expected, 0).view(torch.uint8)
    )
    sent = payload[:, 2 * far + 64 : 2 * far + 64 + 2 * PLAIN].view(torch.bfloat16)
    assert_same_bits(sent, plain)
    decoded = reference.decompress(expected, CODED, config)
    blocks = config.gain * F.pad(coded.float() - decoded, (0, 56)).view(-1, BLOCK)
    assert torch.equal(residual[far // BLOCK :], RESIDUAL_CODECS["block"](config).encode(blocks)[0])
    output = address_space((far + 256,), torch.float32)
    module.reduce(payload, table, output, torch.bfloat16, 0.5, config)
    assert_same_bits(output[far : far + CODED], reference.reduce(decoded, 0.5))
    assert_same_bits(output[far + CODED :][:PLAIN], reference.reduce(plain.float(), 0.5))


def move_behind(far: int, config: LoCoConfig) -> TileTable:
    """The table of a segment with codes and a plain one whose every place is ``far`` or behind."""
    segments = tuple(cut_into_segments([CODED, PLAIN], ["codes", "values"]))
    layout = PayloadLayout(config, segments, torch.bfloat16)
    table = tile_table(layout, (far // BLOCK, -1), 2, CPU)
    places = torch.tensor([[far, CODED, far, far], [far + CODED, PLAIN, 2 * far + 64, 0]])
    return replace(table, segments=torch.cat([places, table.segments[:, 4:]], 1), aligned=False)


def address_space(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros of which only the pages that are touched take memory."""
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # older Pythons do not name it
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    memory = mmap.mmap(-1, torch.Size(shape).numel() * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype).view(shape)

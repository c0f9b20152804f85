"""Sections of ``scripts/gpu_check``: exact results, markers, streams, speed.

A section returns a line of detail, raises ``Skipped`` with a reason, or fails with any exception.
Its defaults are what a GPU is checked with; tests give less.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import product

import torch
from torch import Tensor

from gpu.measure import FAST_NAMES, MI, backends, free_bytes, host_call, measure, problems
from gpu.problems import CONFIG
from kernel_calls import Exchange, cut_into_segments
from loco_fsdp import LoCoConfig
from loco_fsdp.backends import gpu
from loco_fsdp.feedback import ResidualBuffer
from loco_fsdp.payload import Segment, single_segment
from loco_fsdp.tiles import tile_table

GIB = 2**30
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TARGET_SHARE = 0.85  # of the copy's bandwidth, from 64 Mi elements on
TARGET_HOST_SECONDS = 100e-6


class Skipped(Exception):
    """A section cannot be run here; the message says why."""


def require_memory(device: torch.device, num_bytes: int) -> None:
    """Raise ``Skipped`` if less is free."""
    free = free_bytes(device)
    if free < num_bytes:
        raise Skipped(f"{free / GIB:.1f} GiB are free, {num_bytes / GIB:.0f} GiB are needed.")


def check_choice(device: torch.device) -> str:
    """The library itself takes the fast backend on this device."""
    wanted = FAST_NAMES[device.type]
    if wanted not in backends(device):
        raise AssertionError(f"The library does not use {wanted}; its log says why.")
    return f"gradients on {device} go through {wanted}"


def check_bits(
    device: torch.device,
    scale: str,
    bits: int,
    sizes: Sequence[int] = (1, 127, 130, 2304, 40_001),
    dtypes: Sequence[torch.dtype] = FLOATS,
) -> str:
    """Every dtype, residual and size, with a loss scale and without: the bits of plain PyTorch."""
    count = 0
    for dtype, residual, loss_scale in product(
        dtypes, ("int8", "bfloat16", "float32"), (None, 1024.0)
    ):
        chosen = {"scale": scale, "bits": bits, "residual_dtype": residual, "static_scale": 8.0}
        config = LoCoConfig.from_dict(chosen | {"static_residual_scale": 64.0})
        for numel in sizes:
            compare(config, cut_into_segments([numel], ["codes"]), dtype, (), loss_scale)
            count += 1
    return f"{count} exchanges of 3 calls equal the reference"


def check_units(device: torch.device, block_sizes: Sequence[int] = (16, 130, 128, 8192)) -> str:
    """Units of coded, uncompressed and forgetful segments, with error figures."""
    for block_size, dtype in product(block_sizes, FLOATS[:2]):
        config = LoCoConfig(block_size=block_size)
        numels = (3 * block_size - 5, 7, 2 * block_size, 129, 64)
        forms = ("codes", "values", "codes", "codes", "values")
        compare(config, cut_into_segments(numels, forms), dtype, {"2"}, measure=True)
    return f"{2 * len(block_sizes)} units of 5 tensors equal the reference"


def check_markers(device: torch.device, most_blocks: int = 33) -> str:
    """Field case 67: 1 to 33 blocks; ``Exchange`` looks after the bytes around every buffer."""
    for scale, bits, block_size in product(("block", "static"), (4, 8), (18, 128)):
        config = LoCoConfig.from_dict({"scale": scale, "bits": bits, "block_size": block_size})
        for blocks in range(1, most_blocks + 1):
            numel = blocks * block_size - blocks % 3  # the last block is short, two in three times
            compare(config, cut_into_segments([numel], ["codes"]), torch.bfloat16)
    return f"markers intact around 1 to {most_blocks} blocks of every codec"


def compare(
    config: LoCoConfig,
    segments: Sequence[Segment],
    dtype: torch.dtype,
    forgetful: Collection[str] = (),
    loss_scale: float | None = None,
    measure: bool = False,
) -> None:
    """Three exchanges, one of them not finite; ``Exchange`` compares all with the reference."""
    exchange = Exchange("triton", config, segments, 3, dtype, forgetful)
    numel = exchange.layout.row_numel
    generator = torch.Generator().manual_seed(numel)
    for call in range(3):
        x = (torch.randn(3, numel, generator=generator) * (loss_scale or 1.0)).to(dtype)
        if call == 1:
            x[0, numel // 2], x[2, -1] = torch.nan, -torch.inf
        exchange.reduce(exchange.compress(x, loss_scale, measure), 1 / 3)


def check_streams(device: torch.device, rounds: int = 500, numel: int = MI) -> str:
    """On a side stream ordered by events alone, the results are those of a synchronous run."""
    ordered, synchronous = (_rounds(device, rounds, numel, side) for side in (True, False))
    for what, found, expected in zip(
        ("outputs", "payload", "residual"), ordered, synchronous, strict=True
    ):
        if not torch.equal(found, expected):
            wrong = int((found != expected).sum())
            raise AssertionError(f"{wrong} of {found.numel()} {what} differ after {rounds} rounds.")
    return f"{rounds} rounds on a side stream equal a synchronous run"


def _rounds(
    device: torch.device, rounds: int, numel: int, side: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """A digest of each round's output, the last payload, the residual."""
    streams = torch.get_device_module(device)
    main = streams.current_stream()
    worker = streams.Stream() if side else main
    layout = single_segment(CONFIG, numel)
    table = tile_table(layout, (0,), gpu.tile_blocks(CONFIG.block_size, device), device)
    residuals = ResidualBuffer(CONFIG, 2, {"": numel}, device)
    nonfinite = torch.zeros((), dtype=torch.int64, device=device)
    memory = (residuals.data, residuals.steps, nonfinite, None, None)
    base = torch.randn(2, numel, generator=torch.Generator().manual_seed(0)).to(device)
    payload = torch.zeros(2, layout.row_bytes, dtype=torch.uint8, device=device)
    output, digests = torch.empty(numel, device=device), torch.zeros(rounds, dtype=torch.int64)
    digests, gradients = digests.to(device), [torch.empty_like(base) for _ in range(2)]
    busy = torch.randn(1024, 1024, device=device)
    read: list[torch.Event] = []  # the gradient of each round
    for number in range(rounds):
        x = gradients[number % 2]
        if number >= 2:
            main.wait_event(read[number - 2])  # it is about to be overwritten
        torch.mm(busy, busy)  # who does not wait for the gradient reads the one before
        torch.mul(base, number + 1, out=x)
        worker.wait_event(main.record_event())
        with streams.stream(worker):
            gpu.compress(x, table, payload, *memory, CONFIG)
            read.append(worker.record_event())
            gpu.reduce(payload, table, output, torch.float32, 0.5, CONFIG)
            digests[number] = output.view(torch.int32).sum(dtype=torch.int64)
        if not side:
            streams.synchronize()
    streams.synchronize()
    return digests.cpu(), payload.cpu(), residuals.data.cpu()


def check_speed(
    device: torch.device, sizes: Sequence[int] = (16 * MI, 64 * MI, 256 * MI), calls: int = 200
) -> str:
    """Shares of the copy's bandwidth and the cost on the host, against their targets."""
    lines = []
    for problem in problems(device, list(sizes)):
        for row in measure(problem, 0.2):
            share = row.share_of_copy_bandwidth or 0.0
            size = f"{row.elements // MI} Mi" if row.elements >= MI else str(row.elements)
            line = f"{row.backend} {row.op} {row.dtype} {size}: {row.seconds * 1e3:.3f} ms, "
            line += f"{100 * share:.0f} % of the copy's bandwidth"
            if row.backend != "eager" and row.elements >= 64 * MI:
                line += f", target of {100 * TARGET_SHARE:.0f} % {_verdict(share >= TARGET_SHARE)}"
            lines.append(line)
    seconds = host_call(device, calls).seconds
    verdict = _verdict(seconds < TARGET_HOST_SECONDS)
    lines.append(f"host, one unit: {seconds * 1e6:.0f} us, target of 100 us {verdict}")
    return "\n".join(lines)


def _verdict(met: bool) -> str:
    return "met" if met else "missed"

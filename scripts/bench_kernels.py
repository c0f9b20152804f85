"""Measure compress and reduce against a copy of the same tensor, on this machine.

``python scripts/bench_kernels.py`` measures 64 Ki to 256 Mi elements, ``--quick`` only 16 Mi.
Backends are those that work here: plain PyTorch in pieces (eager), loops compiled for the CPU
(compiled), Triton on an NVIDIA GPU (triton). Each is called in turn with ``copy_`` of the same
tensor, and with unfused PyTorch operations; times are medians of warm calls. ``--torch-compile``
adds what PyTorch's compiler makes of the operations on the CPU, which is not one of the backends.

Compress: a gradient ``[4, elements / 4]`` with int8 residual, 4 bits, blocks of 128. Reduce: four
such rows, decoded and summed to ``elements`` outputs. ``share_of_copy_bandwidth`` counts the bytes
that one pass has to move: 6.5 an element to compress float32, 4.5 for bfloat16, and 2 + 4 or 2 + 2
an output to reduce.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from gpu import torch_compile
from gpu.measure import (
    FAST_NAMES,
    MI,
    UNIT_ELEMENTS,
    Measurement,
    backends,
    host_call,
    measure,
    problems,
)

SIZES = [2**16, 2**18, MI, 4 * MI, 16 * MI, 64 * MI, 256 * MI]
QUICK_SIZES = [16 * MI]
SECONDS, QUICK_SECONDS = 1.0, 0.4
"""For each contender on each problem."""
TIMEOUT_SECONDS = 600.0
AOT_WIDTH = 150
"""Columns of text that a line of the table of ahead-of-time figures needs."""

FIRST_USE = (
    "import sys, torch; from gpu.measure import first_use; "
    "torch.set_num_threads(int(sys.argv[2])); print(first_use(torch.device(sys.argv[1])))"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and show what the command line asks for."""
    options = _parser().parse_args(arguments)
    if options.aot:
        Console(width=max(Console().width, AOT_WIDTH)).print(aot_table())
        return
    if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit("TRITON_INTERPRET=1: unset it, else Triton's interpreter is measured.")
    sizes, seconds = (QUICK_SIZES, QUICK_SECONDS) if options.quick else (SIZES, SECONDS)
    for path in filter(None, (options.out, options.png)):
        _require_writable(path)  # now, not after minutes of measuring
    others = {"torch.compile": torch_compile} if options.torch_compile else {}
    threads = options.threads or [torch.get_num_threads()]
    rows = list(rows_of(sizes, seconds, threads, others))
    if options.out is not None:
        options.out.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    if options.png is not None:
        draw(rows, options.png)
    Console().print(speed_table(rows))
    for row in rows:
        if row.copy_seconds is None:
            print(f"{row.op} ({row.backend}, {row.threads} threads): {_time(row.seconds)}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="only 16 Mi elements: about a minute")
    add("--threads", type=_counts, metavar="N,N", help="of the CPU, such as 1,2; else torch's")
    add("--out", type=Path, metavar="FILE", help="write the rows as JSON lines")
    add("--png", type=Path, metavar="FILE", help="draw the share of the copy bandwidth")
    add("--torch-compile", action="store_true", help="measure torch.compile on the CPU too")
    add("--aot", action="store_true", help="instead: registers and access widths on GPUs")
    return parser


def _counts(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.isdecimal() and int(word) for word in words):
        raise argparse.ArgumentTypeError(f"{text!r}: wanted numbers from 1 on, such as 1,2")
    return [int(word) for word in words]


def _require_writable(path: Path) -> None:
    try:
        path.open("ab").close()
    except OSError as error:
        raise SystemExit(f"{path} cannot be written: {error.strerror}.") from error


def rows_of(
    sizes: list[int], seconds: float, threads: list[int], others: Mapping[str, Any]
) -> Iterator[Measurement]:
    """All measurements: on the CPU with each number of threads, and on the GPU if there is one.

    ``others``: what is measured on the CPU beside the backends, name -> module.
    """
    plans = [(torch.device("cpu"), count) for count in threads]
    if torch.cuda.is_available():
        plans.append((torch.device("cuda", torch.cuda.current_device()), threads[0]))
    for number, (device, count) in enumerate(plans):
        torch.set_num_threads(count)
        is_first = device not in [earlier for earlier, _ in plans[:number]]
        if is_first and len(backends(device)) > 1:
            yield from first_uses(device, count)
        title = f"{device.type}, {count} threads"
        for problem in tqdm(problems(device, sizes), title, unit="problem", leave=False):
            yield from measure(problem, seconds, others if device.type == "cpu" else {})
        if device.type == "cuda":
            yield host_call(device)


def first_uses(device: torch.device, threads: int) -> Iterator[Measurement]:
    """The first call of new processes: with empty caches of compiled code, and with filled ones."""
    with tempfile.TemporaryDirectory() as folder:
        caches = dict.fromkeys(("NUMBA_CACHE_DIR", "TRITON_CACHE_DIR"), folder)
        for op in ("first_use_cold", "first_use_warm"):
            done = subprocess.run(
                [sys.executable, "-c", FIRST_USE, str(device), str(threads)],
                cwd=Path(__file__).parent,  # where the package gpu is
                env={**os.environ, **caches},
                timeout=TIMEOUT_SECONDS,
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            )
            backend, elements = FAST_NAMES[device.type], UNIT_ELEMENTS
            yield Measurement(
                backend, device.type, op, "bfloat16", elements, threads, float(done.stdout)
            )


def speed_table(rows: Iterable[Measurement]) -> Table:
    """Format the rows that were measured beside a copy."""
    table = Table(
        caption="x copy: time over that of copy_ of the same tensor. share: of the copy's "
        "bandwidth, by the bytes moved. x unfused: time over that of unfused PyTorch.",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=0,
    )
    for title in ("op", "dtype", "backend"):
        table.add_column(title, no_wrap=True)
    for title in ("elements", "threads", "time", "x copy", "share", "x unfused"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        if row.copy_seconds is not None:
            table.add_row(
                row.op,
                row.dtype,
                row.backend if row.device == "cpu" else f"{row.backend} ({row.device})",
                _elements(row.elements),
                str(row.threads),
                _time(row.seconds),
                f"{row.ratio_to_copy:.3g}",
                f"{100 * (row.share_of_copy_bandwidth or 0):.0f} %",
                "-" if row.ratio_to_eager is None else f"{row.ratio_to_eager:.3f}",
            )
    return table


def aot_table() -> Table:
    """Compile for GPUs that need not be here, and format what came out."""
    table = Table(title="Kernels compiled ahead of time", box=SIMPLE_HEAD)
    command = [sys.executable, "-m", "loco_fsdp_kernels.aot", "--json"]
    # With the interpreter on, there would be nothing to compile.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        for line in tqdm(process.stdout, "compiling", unit="kernel", leave=False):
            row = json.loads(line)
            if not table.columns:
                for name in row:
                    table.add_column(name.replace("_", " "), no_wrap=name == "variant")
            table.add_row(*map(str, row.values()))
    if process.returncode:
        raise SystemExit("loco_fsdp_kernels.aot failed; its own words are above.")
    return table


def draw(rows: Iterable[Measurement], path: Path) -> None:
    """Draw the share of the copy bandwidth against the size: a panel for each dtype."""
    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in rows:
        if row.share_of_copy_bandwidth is not None:
            label = f"{row.backend} {row.op}, {row.device}"
            label += f", {row.threads} threads" if row.device == "cpu" else ""
            point = row.elements, 100 * row.share_of_copy_bandwidth
            lines.setdefault((row.dtype, label), []).append(point)
    dtypes = list(dict.fromkeys(dtype for dtype, _ in lines))
    figure = Figure(figsize=(6 * len(dtypes), 5), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display
    panels = figure.subplots(1, len(dtypes), sharey=True, squeeze=False)[0]
    for axes, dtype in zip(panels, dtypes, strict=True):
        for (of, label), points in lines.items():
            if of == dtype:
                axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_title(dtype)
        axes.set_xlabel("elements")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("% of the bandwidth of copy_")
    panels[0].legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=150)


def _elements(count: int) -> str:
    return f"{count // MI} Mi" if count >= MI else f"{count // 1024} Ki"


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


if __name__ == "__main__":
    main()

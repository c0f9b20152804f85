"""Check the kernels on this machine's NVIDIA GPU; run it as ``scripts/gpu_check``.

Every part runs in a process of its own, since an error on a GPU breaks all that its process does
afterwards.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any

import torch

from gpu import ranks, sections, sizes

TOTAL_SECONDS = 225.0
WORKERS = 4  # parts at a time: most of their time is the compiler's, on the CPU


@dataclass(frozen=True)
class Part:
    """One row of the table."""

    name: str
    check: Callable[..., str]
    """``check(device, **arguments)`` returns a detail, raises ``Skipped``, or fails."""
    arguments: dict[str, Any] = field(default_factory=dict)
    limit_seconds: float = 150.0
    alone: bool = False
    """It takes times, or much memory: nothing else runs beside it."""


@dataclass(frozen=True)
class Outcome:
    """What became of a part."""

    name: str
    state: str
    """``passed``, ``failed`` or ``skipped``."""
    detail: str
    seconds: float


PARTS = (
    Part("choice of backend", sections.check_choice),
    *(
        Part(
            f"bit equality, {scale}, {bits} bits",
            sections.check_bits,
            {"scale": scale, "bits": bits},
        )
        for scale in ("block", "static")
        for bits in (4, 8)
    ),
    Part("bits of units", sections.check_units),
    Part("marker bytes", sections.check_markers),
    Part("side stream", sections.check_streams),
    Part("two ranks, reduce-scatter", ranks.check_reduce_scatter),
    Part("two ranks, FSDP2", ranks.check_fsdp2),
    Part("around 2^31 elements", sizes.check_sizes, alone=True),
    Part("many small blocks", sizes.check_grid, alone=True),
    Part("speed", sections.check_speed, alone=True),
)


def main() -> int:
    """Check everything; the exit code is 1 if a part failed."""
    argparse.ArgumentParser("scripts/gpu_check", description=__doc__).parse_args()
    if not torch.cuda.is_available():
        print("PyTorch finds no GPU on this machine: nothing checked.")
        return 0
    device = torch.device("cuda", torch.cuda.current_device())
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    outcomes = run_parts(PARTS, device, monotonic() + TOTAL_SECONDS)
    print(format_table(outcomes))
    return int(any(outcome.state == "failed" for outcome in outcomes))


def run_parts(parts: Sequence[Part], device: torch.device, deadline: float) -> list[Outcome]:
    """Run every part, those that must be alone last; the outcomes in the order of the parts."""
    together = [part for part in parts if not part.alone]
    with ThreadPoolExecutor(WORKERS) as pool:
        outcomes = list(pool.map(lambda part: run_part(part, device, deadline), together))
    outcomes += [run_part(part, device, deadline) for part in parts if part.alone]
    order = [part.name for part in parts]
    return sorted(outcomes, key=lambda outcome: order.index(outcome.name))


def run_part(part: Part, device: torch.device, deadline: float) -> Outcome:
    """Run one part in a new process, which is ended with all its children when time is up."""
    start = monotonic()
    limit = min(part.limit_seconds, deadline - start)
    if limit <= 0:
        return Outcome(part.name, "failed", "not run: the time for all parts was up", 0.0)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, part, device))
    process.start()
    theirs.close()
    state, detail = "failed", f"no answer within {limit:.0f} s"
    if ours.poll(limit):
        try:
            state, detail = ours.recv()
            process.join(5)
        except EOFError:
            process.join(5)
            detail = f"its process ended with exit code {process.exitcode}"
    _end(process)
    print(f"{part.name}: {state}", flush=True)
    return Outcome(part.name, state, detail, monotonic() - start)


def _child(connection: Connection, part: Part, device: torch.device) -> None:
    os.setpgrp()  # so that the ranks it starts can be ended with it
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        answer = "passed", part.check(device, **part.arguments)
    except sections.Skipped as reason:
        answer = "skipped", str(reason)
    except Exception as error:
        traceback.print_exc()
        last = str(error).strip().splitlines() or ["no message"]
        answer = "failed", f"{type(error).__name__}: {last[-1]}"
    connection.send(answer)


def _end(process: Any) -> None:
    """Kill a process that is stuck, and those that it has started."""
    if process.is_alive():
        with suppress(ProcessLookupError):  # stuck before it had a group
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join(10)


def format_table(outcomes: Sequence[Outcome]) -> str:
    """A line for each outcome, more if its detail has more."""
    width = max(len(outcome.name) for outcome in outcomes)
    indent = " " * (width + len("  result   seconds  "))
    lines = [f"{'part':{width}}  {'result':7}  {'seconds':>7}  detail"]
    for outcome in outcomes:
        detail = outcome.detail.replace("\n", "\n" + indent)
        lines.append(f"{outcome.name:{width}}  {outcome.state:7}  {outcome.seconds:7.1f}  {detail}")
    return "\n" + "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

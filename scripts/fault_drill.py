"""Kill ranks of a training run at random, restart it on other numbers of ranks, and compare.

``scripts/fault_drill.py --kills 10 --seed 0``

Trains a small model by ``scripts/train.py`` on 4 local ranks. A random rank gets SIGKILL at some
random moment; the others have to end by themselves; the run goes on from its newest whole
checkpoint on 2 to 4 ranks. Prints each kill, and whether the loss at the end is within ``band`` of
a run on 4 ranks that nobody disturbed. Ends with status 1 if it is not, if a rank that was left
ended as if all were well, or if more steps were lost than lie between two checkpoints.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from jsonargparse import auto_cli

from lm.runlog import RunLog

SCRIPT = Path(__file__).with_name("train.py")

GLOBAL_BATCH = 12
"""Sequences of a step, the same on 2, 3 and 4 ranks."""


@dataclass(frozen=True, kw_only=True)
class DrillSettings:
    """Everything that defines a drill."""

    kills: int = 10
    """Ranks to kill, one after the other."""

    seed: int = 0
    """Of the moments, the ranks killed and the numbers of ranks."""

    steps: int = 240
    """Optimizer steps of the run."""

    checkpoint_interval: int = 10
    """Steps between checkpoints: no kill can lose more steps, nor the one it is in."""

    band: float = 0.05
    """Largest relative difference of the validation loss."""

    timeout_seconds: float = 60.0
    """Of the collectives; the ranks that are left must end within it, and 30 seconds."""

    data: str | None = None
    """A text file to train on; null: the source code of Python's own standard library."""

    folder: Path = field(default_factory=Path.cwd)
    """Results go to ``runs/drill/`` below it, which must not exist yet."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """What happened at one kill."""

    ranks: int
    """Ranks of the run that was killed."""
    rank: int
    """The one that was killed."""
    step: int
    """Last step in the log."""
    resumed_from: int
    """Step of the checkpoint that the next run starts from."""
    seconds: float
    """Until the last of the others had ended."""
    statuses: tuple[int, ...]
    """How the others ended."""


class Ranks:
    """The processes of one run of ``scripts/train.py``, each a rank on this machine."""

    def __init__(self, count: int, arguments: list[str], folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.log = (folder / "ranks.log").open("a")
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), *arguments],
                cwd=folder,
                stdout=self.log,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(count),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "OMP_NUM_THREADS": "1",
                },
            )
            for rank in range(count)
        ]

    def wait(self, seconds: float) -> list[int]:
        """Wait for all of them and return their exit statuses.

        Raises ``TimeoutError`` when one is still there after ``seconds``, and ends it.
        """
        deadline = time.monotonic() + seconds
        late = []
        for rank, process in enumerate(self.processes):
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                late.append(rank)
                process.kill()
                process.wait()
        self.log.close()
        if late:
            raise TimeoutError(
                f"Ranks {late} were still there after {seconds:.0f} s: see ranks.log."
            )
        return [process.returncode for process in self.processes]


@dataclass(frozen=True, kw_only=True)
class Drill:
    """A drill under way."""

    settings: DrillSettings
    """What to do."""

    chance: random.Random
    """Where all that is random comes from."""

    def run(self) -> bool:
        """Do it; returns whether the loss at the end is inside the band."""
        settings = self.settings
        (settings.folder / "runs" / "drill").mkdir(parents=True)
        wanted = self._undisturbed_loss()
        marks = sorted(self.chance.sample(range(2, settings.steps - 5), settings.kills))
        ranks = self._start("disturbed", 4)
        for mark in marks:
            kill = self._kill(ranks, mark)
            print(
                f"killed rank {kill.rank} of {kill.ranks} after step {kill.step}: the others ended "
                f"in {kill.seconds:.1f} s with {kill.statuses}; goes on after step "
                f"{kill.resumed_from}, {kill.step - kill.resumed_from} steps lost",
                flush=True,
            )
            self._require_bounded(kill)
            ranks = self._start("disturbed", self.chance.randint(2, 4))
        self._finish(ranks)
        found = self._loss("disturbed")
        gap = found / wanted - 1
        is_inside = abs(gap) <= settings.band
        print(
            f"validation bits per byte: {found:.4f} with {settings.kills} kills, {wanted:.4f} "
            f"undisturbed: {gap:+.2%}, {'inside' if is_inside else 'OUTSIDE'} the band of "
            f"{settings.band:.0%}"
        )
        return is_inside

    def _require_bounded(self, kill: Kill) -> None:
        lost, most = kill.step - kill.resumed_from, self.settings.checkpoint_interval
        if not 0 <= lost <= most:
            raise RuntimeError(
                f"After step {kill.step} {lost} steps were lost: wanted 0 to {most}."
            )
        if 0 in kill.statuses:
            raise RuntimeError(
                f"The ranks that were left ended with {kill.statuses}: wanted a failure of each."
            )

    def _undisturbed_loss(self) -> float:
        self._finish(self._start("undisturbed", 4))
        return self._loss("undisturbed")

    def _start(self, name: str, count: int) -> Ranks:
        settings = self.settings
        arguments = {
            "name": f"drill/{name}",
            "device": "cpu",
            "resume": "true",
            "data": "null" if settings.data is None else settings.data,
            "steps": settings.steps,
            "batch_size": GLOBAL_BATCH // count,
            "sequence_length": 32,
            "sample_tokens": 0,
            "checkpoint_interval": settings.checkpoint_interval,
            "timeout_seconds": settings.timeout_seconds,
            "model.dim": 32,
            "model.num_layers": 2,
            "model.num_heads": 2,
            "model.num_kv_heads": 1,
            "model.ffn_dim": 64,
            "optimizer.warmup_steps": 5,
            "loco.min_numel": 0,
        }
        flags = [f"--{key}={value}" for key, value in arguments.items()]
        return Ranks(count, flags, settings.folder)

    def _kill(self, ranks: Ranks, mark: int) -> Kill:
        """Kill a random rank at a random moment after step ``mark``."""
        self._wait_for(ranks, mark)
        time.sleep(self.chance.uniform(0.0, 0.1))
        victim = self.chance.randrange(len(ranks.processes))
        ranks.processes[victim].kill()
        started = time.monotonic()
        statuses = ranks.wait(self.settings.timeout_seconds + 30.0)
        del statuses[victim]
        return Kill(
            ranks=len(ranks.processes),
            rank=victim,
            step=self._last_step(),
            resumed_from=self._newest_checkpoint(),
            seconds=time.monotonic() - started,
            statuses=tuple(statuses),
        )

    def _wait_for(self, ranks: Ranks, step: int) -> None:
        deadline = time.monotonic() + 300.0
        while self._last_step() < step:
            if time.monotonic() > deadline or any(p.poll() is not None for p in ranks.processes):
                raise RuntimeError(f"The run never got to step {step}: see ranks.log.")
            time.sleep(0.02)

    def _finish(self, ranks: Ranks) -> None:
        statuses = ranks.wait(600.0)
        if any(statuses):
            raise RuntimeError(f"The ranks ended with {statuses}: see ranks.log.")

    def _last_step(self) -> int:
        records = RunLog(folder=self._folder("disturbed")).records()
        return records[-1]["step"] if records else 0

    def _newest_checkpoint(self) -> int:
        marker = self._folder("disturbed") / "checkpoints" / "latest"
        return int(marker.read_text().strip().removeprefix("step-")) if marker.exists() else 0

    def _loss(self, name: str) -> float:
        summary = RunLog(folder=self._folder(name)).summary()
        return float(summary["val_bits_per_byte"])

    def _folder(self, name: str) -> Path:
        return self.settings.folder / "runs" / "drill" / name


def main() -> None:
    """Do the drill that the command line asks for."""
    settings: DrillSettings = auto_cli(DrillSettings, as_positional=False)
    raise SystemExit(
        0 if Drill(settings=settings, chance=random.Random(settings.seed)).run() else 1
    )


if __name__ == "__main__":
    main()

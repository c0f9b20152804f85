"""A run from its first step, or a checkpoint, to its summary."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from tqdm import tqdm

from lm.checkpoint import Checkpoints
from lm.data import bits_per_token, decode
from lm.loop import Trainer, build_trainer
from lm.parallel import World
from lm.runlog import Record, RunLog
from lm.sample import generate
from lm.settings import TrainSettings, run_folder


@dataclass(frozen=True, kw_only=True)
class Run:
    """A trainer, its checkpoints and its log."""

    trainer: Trainer
    """This rank's part in the training."""

    checkpoints: Checkpoints
    """The checkpoints of this run."""

    log: RunLog | None
    """The log; None on all ranks but rank 0."""

    def complete(self) -> bool:
        """Train up to the last step and write the summary.

        SIGTERM ends it after the step it is in, with a checkpoint: the result is False then.
        """
        settings = self.trainer.settings
        first = self._resume() if settings.resume else self._refuse_checkpoints()
        if self.log is not None:
            self.log.start(settings, first)
        with _sigterm_flag() as is_stopped:
            for step in self._progress(first):
                if self._step(step, is_stopped):
                    self._say(f"Stopped by SIGTERM after step {step + 1}: saved for --resume true.")
                    return False
        self._finish()
        return True

    def _step(self, step: int, is_stopped: list[bool]) -> bool:
        """Do step ``step`` (counted from 0) and what is due after it; True: the run ends here."""
        settings, trainer, done = self.trainer.settings, self.trainer, step + 1
        record = trainer.train_step(step)
        if _is_due(done, settings.validation_interval) and done < settings.steps:
            record |= self._validation()
        # The signal may reach the ranks in different steps: they stop together.
        stops = done < settings.steps and trainer.world.any(is_stopped[0])
        if self.log is not None:
            self.log.append(record)  # before the save: a run goes on after what is in both
        if stops or _is_due(done, settings.checkpoint_interval):
            self.checkpoints.save(done, trainer.model, trainer.optimizer)
        return stops

    def _resume(self) -> int:
        """Load the newest checkpoint and return the number of steps done."""
        step = self.checkpoints.newest_step()
        if step is None:
            self._say(f"No whole checkpoint in {self.checkpoints.folder}: starting at step 0.")
            return 0
        self.checkpoints.load(step, self.trainer.model, self.trainer.optimizer)
        self._say(f"Resumed after step {step}.")
        return step

    def _refuse_checkpoints(self) -> int:
        """Return step 0, unless a new run would leave older checkpoints beside its own."""
        step = self.checkpoints.newest_step()
        if step is not None:
            raise ValueError(
                f"resume=False: {self.checkpoints.folder} holds a checkpoint of step {step}. "
                "Wanted --resume true, another --name, or an empty folder."
            )
        return 0

    def _progress(self, first: int) -> Iterator[int]:
        """Count the steps under a progress bar on rank 0."""
        settings = self.trainer.settings
        # A log file gets a line now and then instead of a moving bar.
        seconds = 0.2 if sys.stderr.isatty() else 15.0
        yield from tqdm(
            range(first, settings.steps),
            initial=first,
            total=settings.steps,
            desc=settings.name,
            disable=self.log is None,
            mininterval=seconds,
            maxinterval=max(10.0, 2 * seconds),
        )

    def _validation(self) -> Record:
        """Validate; bits per byte where a token is a byte, else bits per token only."""
        bits = bits_per_token(self.trainer.validate())
        is_bytes = self.trainer.corpus.is_bytes
        return {"val_bits_per_token": bits, "val_bits_per_byte": bits if is_bytes else None}

    def _finish(self) -> None:
        """Validate, write a sample and the summary."""
        trainer, settings = self.trainer, self.trainer.settings
        result = self._validation()
        is_bytes = trainer.corpus.is_bytes
        sample = generate(
            trainer.model,
            start=ord("\n") if is_bytes else 0,
            count=settings.sample_tokens,
            window=settings.sequence_length,
            seed=settings.seed,
            device=trainer.world.device,
        )
        if self.log is None:
            return
        result |= {
            "name": settings.name,
            "world_size": trainer.world.size,
            "parameters": sum(p.numel() for p in trainer.model.parameters()),
            "sample": decode(sample, is_bytes),
        }
        self._report(self.log.summarise(result))

    def _report(self, summary: Record) -> None:
        unit = "byte" if self.trainer.corpus.is_bytes else "token"
        self._say(f"Sample:\n{summary['sample']}\n")
        self._say(
            f"{summary['name']}: {summary['steps']} steps, {summary['val_bits_per_token']:.4f} "
            f"validation bits per {unit}, {summary['gradient_bytes_per_step']:,.0f} gradient bytes "
            f"sent per rank and step, {summary['step_seconds']:.3f} s per step. "
            f"See {run_folder(self.trainer.settings)}/."
        )

    def _say(self, text: str) -> None:
        if self.log is not None:
            print(text, flush=True)


def build_run(settings: TrainSettings, world: World) -> Run:
    """Build all that a run needs, and say what it is going to train."""
    trainer = build_trainer(settings, world)
    checkpoints = Checkpoints(
        folder=run_folder(settings) / "checkpoints",
        world=world,
        identity={
            "model": asdict(settings.model),
            "optimizer": settings.optimizer.name,
            "data_tokens": len(trainer.corpus.tokens),
            "seed": settings.seed,
        },
    )
    if world.rank == 0:
        millions = sum(p.numel() for p in trainer.model.parameters()) / 1e6
        bits = f"{settings.loco.bits} bits" if settings.loco else settings.reduce_dtype
        print(
            f"{settings.name}: {millions:.2f} M parameters, {len(trainer.corpus.tokens):,} tokens, "
            f"{world.size} ranks on {world.device.type}, gradients sent in {bits}.",
            flush=True,
        )
    return Run(
        trainer=trainer,
        checkpoints=checkpoints,
        log=RunLog(folder=run_folder(settings)) if world.rank == 0 else None,
    )


@contextmanager
def _sigterm_flag() -> Iterator[list[bool]]:
    """Yield a list of one flag, which SIGTERM sets instead of ending the process."""
    flag = [False]
    before = signal.signal(signal.SIGTERM, lambda *_: flag.__setitem__(0, True))
    try:
        yield flag
    finally:
        signal.signal(signal.SIGTERM, before)


def _is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0

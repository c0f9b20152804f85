"""Train a small language model with FSDP2, with or without LoCo.

``torchrun --nproc-per-node 2 scripts/train.py --config configs/loco4.yaml --steps 50``

``--help`` lists every setting, ``--print_config`` prints them all as YAML. Results go to
``runs/<name>/``: ``metrics.jsonl`` (a line per step), ``settings.yaml``, ``summary.json``.
SIGTERM ends a run after the step it is in, with a checkpoint; ``--resume true`` goes on from there,
on any number of ranks.
"""

from __future__ import annotations

import signal

from jsonargparse import auto_cli

from lm.parallel import joined_world
from lm.run import build_run
from lm.settings import TrainSettings


def read_settings(args: list[str] | None = None) -> TrainSettings:
    """Read the settings from ``--config`` files and flags; ends the program on a bad one."""
    try:
        settings: TrainSettings = auto_cli(TrainSettings, args=args, as_positional=False)
    except ValueError as error:
        raise SystemExit(f"Bad setting. {error}") from error
    return settings


def main() -> None:
    """Train as the command line says."""
    settings = read_settings()
    with joined_world(settings) as world:
        try:
            run = build_run(settings, world)
        except ValueError as error:
            raise SystemExit(f"Bad setting. {error}") from error
        is_complete = run.complete()
    if not is_complete:
        raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    main()

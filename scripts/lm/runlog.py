"""What a run leaves behind: one line per step, the settings used, and a summary."""

from __future__ import annotations

import json
import os
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from lm.settings import TrainSettings

Record = dict[str, Any]

SETTLING_STEPS = 5
"""First steps left out of the median step time: they allocate and connect."""


@dataclass(frozen=True, kw_only=True)
class RunLog:
    """Writes into the folder of a run. Only rank 0 has one."""

    folder: Path
    """``runs/<name>``."""

    def start(self, settings: TrainSettings, first_step: int) -> None:
        """Write the settings and drop the lines of steps that will be done again."""
        self.folder.mkdir(parents=True, exist_ok=True)
        kept = [record for record in self.records() if record["step"] <= first_step]
        write_atomically(self._metrics, "".join(json.dumps(record) + "\n" for record in kept))
        text = yaml.safe_dump(asdict(settings), sort_keys=False)
        write_atomically(self.folder / "settings.yaml", text)

    def append(self, record: Record) -> None:
        """Add the line of one step to ``metrics.jsonl``."""
        with self._metrics.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def records(self) -> list[Record]:
        """Read ``metrics.jsonl``; no lines if it is not there."""
        if not self._metrics.exists():
            return []
        # The last line is half a line if the run was killed while it wrote.
        complete = self._metrics.read_text().rpartition("\n")[0].splitlines()
        return [json.loads(line) for line in complete]

    def summarise(self, extra: Record) -> Record:
        """Write ``summary.json``: figures over all steps of the run, and ``extra``."""
        records = self.records()
        settled = records[SETTLING_STEPS:] or records
        summary = {
            "steps": len(records),
            "train_loss": records[-1]["loss"],
            "gradient_bytes_per_step": statistics.fmean(r["bytes_sent"] for r in records),
            "step_seconds": statistics.median(r["step_seconds"] for r in settled),
            "tokens_per_second": statistics.median(r["tokens_per_second"] for r in settled),
            **extra,
        }
        write_atomically(self.folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        return summary

    def summary(self) -> Record:
        """Read ``summary.json``."""
        result: Record = json.loads((self.folder / "summary.json").read_text())
        return result

    @property
    def _metrics(self) -> Path:
        return self.folder / "metrics.jsonl"


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old or the new text, never half of it.

    Not even after the machine has lost its power.
    """
    partial = path.with_name(path.name + ".partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)

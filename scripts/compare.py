"""Train several configs with the same seed and data, and compare loss, bytes and time.

``python scripts/compare.py --configs '[loco4, loco8]' --name sweep`` trains
``configs/baseline_fp32.yaml`` and ``configs/baseline_bf16.yaml`` too, prints a table and writes
``runs/sweep/`` with ``summary.json``, ``loss.png``, ``bytes.png`` and a folder for each run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from jsonargparse import auto_cli
from rich.console import Console

from lm.report import BASELINES, comparison_rows, draw_bytes, draw_losses, format_table
from lm.runlog import RunLog, write_atomically

TRAIN = Path(__file__).with_name("train.py")
RUN_TIMEOUT_SECONDS = 1800.0


def compare(
    configs: list[str] | None = None,
    name: str = "comparison",
    ranks: int = 2,
    steps: int | None = None,
    data: str | None = None,
) -> None:
    """Train and compare.

    Args:
        configs: Names of files in ``configs/``, without ``.yaml``, beside the two baselines.
        name: Results go to ``runs/<name>/``.
        ranks: Ranks on this machine, one thread each.
        steps: Optimizer steps in place of those in the configs.
        data: Text to train on, as in ``train.py``; null takes that of the configs.
    """
    if ranks < 2:
        raise ValueError(f"ranks={ranks}: wanted 2 or more; one rank sends no gradients.")
    flags = [f"--steps={steps}"] if steps is not None else []
    flags += [f"--data={data}"] if data is not None else []
    names = list(dict.fromkeys([*BASELINES, *(configs or [])]))
    for config in names:
        train(config, name=f"{name}/{config}", ranks=ranks, flags=flags)
    folder = Path("runs") / name
    logs = {config: RunLog(folder=folder / config) for config in names}
    rows = comparison_rows({config: log.summary() for config, log in logs.items()})
    write_atomically(folder / "summary.json", json.dumps(rows, indent=2) + "\n")
    draw_losses({config: log.records() for config, log in logs.items()}, folder / "loss.png")
    draw_bytes(rows, folder / "bytes.png")
    Console().print(format_table(rows))
    print(f"Written: {folder}/summary.json, loss.png, bytes.png, and a folder for each run.")


def train(config: str, *, name: str, ranks: int, flags: list[str]) -> None:
    """Run ``train.py`` on local ranks; raises ``RuntimeError`` if it fails or takes too long."""
    # --standalone takes a free port, so two comparisons can run side by side.
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    settings = [f"--config=configs/{config}.yaml", f"--name={name}", *flags]
    command = [sys.executable, "-m", *launcher, str(TRAIN), *settings]
    # One thread each: the ranks share the cores, and threads that wait for each other cost more.
    process = subprocess.Popen(command, env={"OMP_NUM_THREADS": "1", **os.environ})
    try:
        code = process.wait(timeout=RUN_TIMEOUT_SECONDS)
    except BaseException:
        process.terminate()  # unlike a kill, this lets the launcher end its ranks
        process.wait(timeout=60)
        raise
    if code:
        raise RuntimeError(f"{config}: training ended with exit code {code}; see its output above.")


if __name__ == "__main__":
    auto_cli(compare, as_positional=False)

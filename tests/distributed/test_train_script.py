"""The train script: resume with residuals, on other numbers of ranks, SIGTERM, and the drill."""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from distributed.checkpoint_runs import net
from distributed.optimizer_runs import train as train_net
from rank_pool import RankPool

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from fault_drill import Drill, DrillSettings, Ranks  # noqa: E402
from lm.checkpoint import Checkpoints  # noqa: E402
from lm.parallel import World  # noqa: E402
from lm.runlog import RunLog  # noqa: E402
from lm.settings import TrainSettings  # noqa: E402
from loco_fsdp import LoCoConfig  # noqa: E402
from unit.test_scripts import tiny, train  # noqa: E402

EXACT = LoCoConfig(min_numel=0, residual_checkpoint="exact")


def losses(lines: list[dict[str, Any]]) -> list[float]:
    return [line["loss"] for line in lines]


def interrupted(folder: Path, settings: TrainSettings) -> None:
    """Make the newest checkpoint one that was never completed."""
    path = folder / f"runs/{settings.name}/checkpoints"
    newest = (path / "latest").read_text().strip()
    (path / newest).rename(path / f"{newest}.partial")


def test_resumed_with_residuals_bit_for_bit(ranks: RankPool, tmp_path: Path) -> None:
    """The log of a run that was resumed is that of one that never stopped."""
    settings = tiny(tmp_path, steps=16, checkpoint_interval=6, loco=EXACT)
    whole = ranks.run(train, 2, tmp_path, settings)[0]
    interrupted(tmp_path, settings)
    resumed = ranks.run(train, 2, tmp_path, replace(settings, resume=True))[0]
    assert losses(resumed) == losses(whole)


@pytest.mark.parametrize("mode", ["mean", "exact"])
@pytest.mark.parametrize("after", [1, 3])
def test_resumed_on_other_numbers_of_ranks(
    ranks: RankPool, tmp_path: Path, mode: Any, after: int
) -> None:
    """Field case 58: what it was told to save, it can go on with on fewer and on more ranks."""
    settings = tiny(
        tmp_path, steps=6, checkpoint_interval=4, loco=replace(EXACT, residual_checkpoint=mode)
    )
    whole = ranks.run(train, 2, tmp_path, settings)[0]
    longer = replace(settings, resume=True, steps=8)
    resumed = ranks.run(train, after, tmp_path, longer)[0]
    assert losses(resumed)[:4] == losses(whole)[:4]
    assert [line["step"] for line in resumed] == list(range(1, 9))


@pytest.mark.parametrize("had_loco", [False, True])
def test_loco_turned_on_and_off(ranks: RankPool, tmp_path: Path, had_loco: bool) -> None:
    """Field case 65: a run without LoCo goes on with it, and the reverse."""
    before, after = (EXACT, None) if had_loco else (None, EXACT)
    settings = tiny(tmp_path, steps=4, checkpoint_interval=4, loco=before)
    ranks.run(train, 2, tmp_path, settings)
    longer = replace(settings, resume=True, steps=6, loco=after)
    assert len(ranks.run(train, 2, tmp_path, longer)[0]) == 6


@pytest.mark.parametrize("damage", [".metadata", "run.json", "random-00001.pt", "__1_0.distcp"])
@pytest.mark.parametrize("is_emptied", [False, True])
def test_half_a_copy_is_no_checkpoint(
    ranks: RankPool, tmp_path: Path, damage: str, is_emptied: bool
) -> None:
    """Whatever file is missing, or is there but has nothing in it yet."""
    settings = tiny(tmp_path, steps=4, checkpoint_interval=2, loco=EXACT)
    ranks.run(train, 2, tmp_path, settings)
    path = tmp_path / "runs/tiny/checkpoints"
    assert sorted(p.name for p in path.iterdir()) == ["latest", "step-00000002", "step-00000004"]
    damaged = path / "step-00000004" / damage
    damaged.unlink()
    if is_emptied:
        damaged.touch()
    resumed = ranks.run(train, 2, tmp_path, replace(settings, resume=True, steps=5))[0]
    assert len(resumed) == 5


def random_numbers(folder: Path, world_size: int) -> bool:
    """Whether the numbers drawn after a save are drawn again after a load."""
    world = World(rank=dist.get_rank(), size=world_size, device=torch.device("cpu"))
    checkpoints = Checkpoints(folder=folder, world=world, identity={})
    model, optimizer = net()
    train_net(model, optimizer, range(1))
    torch.manual_seed(40 + dist.get_rank())
    checkpoints.save(1, model, optimizer)
    drawn = torch.rand(4)
    torch.manual_seed(0)
    checkpoints.load(1, model, optimizer)
    return torch.equal(torch.rand(4), drawn)


def test_random_numbers_go_on(ranks: RankPool, tmp_path: Path) -> None:
    """Each rank's own."""
    assert ranks.run(random_numbers, 2, tmp_path, 2) == [True, True]


def ended_in_a_save(folder: Path, settings: TrainSettings) -> list[int]:
    """Steps in the log of a run that never gets its first checkpoint written."""
    full_disk = mock.patch.object(Checkpoints, "save", side_effect=OSError("no space left"))
    with full_disk, pytest.raises(OSError, match="no space left"):
        train(folder, settings)
    return [record["step"] for record in RunLog(folder=folder / "runs/tiny").records()]


def test_a_run_that_ends_in_a_save_keeps_its_log(ranks: RankPool, tmp_path: Path) -> None:
    """The checkpoint may be whole by then, so the line of its step has to be there."""
    settings = tiny(tmp_path, steps=4, checkpoint_interval=2, loco=EXACT)
    assert ranks.run(ended_in_a_save, 1, tmp_path, settings) == [[1, 2]]


def flags(folder: Path, **changes: Any) -> list[str]:
    settings = {
        "name": "small",
        "device": "cpu",
        "data": folder / "text.txt",
        "batch_size": 2,
        "sequence_length": 16,
        "sample_tokens": 0,
        "model.dim": 16,
        "model.num_layers": 1,
        "model.num_heads": 2,
        "model.ffn_dim": 24,
        "loco.min_numel": 0,
        "loco.residual_checkpoint": "exact",
    }
    return [f"--{key}={value}" for key, value in (settings | changes).items()]


def test_sigterm_saves_before_it_ends_the_run(tmp_path: Path) -> None:
    """Two processes get the signal, one later than the other; both stop after one step."""
    tiny(tmp_path)  # writes the text
    running = Ranks(2, flags(tmp_path, steps=100000), tmp_path)
    log = tmp_path / "runs/small/metrics.jsonl"
    deadline = time.monotonic() + 90
    while not (log.exists() and len(log.read_text().splitlines()) > 3):
        assert time.monotonic() < deadline and running.processes[0].poll() is None
        time.sleep(0.02)
    for process in running.processes:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
    assert running.wait(60) == [128 + signal.SIGTERM] * 2
    before = [json.loads(line) for line in log.read_text().splitlines()]
    saved = int((tmp_path / "runs/small/checkpoints/latest").read_text().strip()[-8:])
    assert before[-1]["step"] == saved == len(before)
    assert "Stopped by SIGTERM" in (tmp_path / "ranks.log").read_text()
    alone = Ranks(1, flags(tmp_path, steps=saved + 2, resume="true"), tmp_path)
    assert alone.wait(60) == [0]
    assert len(log.read_text().splitlines()) == saved + 2


def test_drill(tmp_path: Path) -> None:
    """Two kills among four ranks, on real text; the loss at the end is inside the band."""
    text = tmp_path / "text.txt"
    text.write_text("".join((ROOT / n).read_text() for n in ("README.md", "CONTRIBUTING.md")))
    settings = DrillSettings(
        kills=2, steps=40, checkpoint_interval=8, data=str(text), folder=tmp_path
    )
    assert Drill(settings=settings, chance=random.Random(7)).run()

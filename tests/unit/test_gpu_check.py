"""``scripts/gpu_check``: its parts pass on the CPU in miniature, and its table tells the truth."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

np = pytest.importorskip("numpy")  # Triton's interpreter computes with it
pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from gpu import ranks, sections, sizes  # noqa: E402
from gpu_check import PARTS, Part, format_table, run_parts  # noqa: E402
from loco_fsdp.backends import eager, gpu  # noqa: E402

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="scripts/gpu_check does it")


@pytest.fixture(autouse=True, scope="module")
def _quiet_overflow() -> Iterator[None]:
    """NumPy warns of NaN and overflow, which a GPU does not."""
    with np.errstate(all="ignore"):
        yield


MINIATURES: dict[Any, dict[str, Any]] = {
    sections.check_choice: {},
    sections.check_bits: {"sizes": (130,), "dtypes": (torch.bfloat16,)},
    sections.check_units: {"block_sizes": (130,)},
    sections.check_markers: {"most_blocks": 1},
    sections.check_streams: {"rounds": 4, "numel": 300},
    sections.check_speed: {"sizes": (2**12,), "calls": 2},
    sizes.check_sizes: {"far": 2**12, "margin": 256, "probe": 512},
    sizes.check_grid: {"numel": 2**12, "probe": 512},
    ranks.check_reduce_scatter: {"numel": 301, "steps": 2},
    ranks.check_fsdp2: {"steps": 2},
}
"""Function of a part -> arguments with which it takes a second or so on the CPU."""


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_part_in_miniature(part: Part) -> None:
    assert part.check(CPU, **part.arguments | MINIATURES[part.check])


def test_every_part_is_named_once() -> None:
    assert len({part.name for part in PARTS}) == len(PARTS)


def _passes(device: torch.device) -> str:
    return f"two lines\non {device}"


def _skips(device: torch.device) -> str:
    raise sections.Skipped("too little memory")


def _fails(device: torch.device, exit_code: int | None) -> str:
    if exit_code is not None:
        os._exit(exit_code)  # as an error in native code would
    raise RuntimeError("first line\nwhat is wrong")


def _sleeps(device: torch.device) -> str:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(f"child {child.pid}", flush=True)
    time.sleep(600)
    return ""


def test_a_failing_part_hides_no_other(capfd: pytest.CaptureFixture[str]) -> None:
    parts = (
        Part("stuck", _sleeps, limit_seconds=8),
        Part("wrong", _fails, {"exit_code": None}),
        Part("crashed", _fails, {"exit_code": 7}),
        Part("absent", _skips),
        Part("right", _passes),
    )
    outcomes = run_parts(parts, CPU, time.monotonic() + 120)
    assert [(one.name, one.state, one.detail) for one in outcomes] == [
        ("stuck", "failed", "no answer within 8 s"),
        ("wrong", "failed", "RuntimeError: what is wrong"),
        ("crashed", "failed", "its process ended with exit code 7"),
        ("absent", "skipped", "too little memory"),
        ("right", "passed", "two lines\non cpu"),
    ]
    for orphan in re.findall(r"child (\d+)", capfd.readouterr().out):
        command = Path(f"/proc/{orphan}/cmdline")
        assert not command.exists() or not command.read_bytes()  # gone, or a zombie
    lines = format_table(outcomes).splitlines()
    assert lines[-2].endswith("two lines") and lines[-1].strip() == "on cpu"
    assert lines[-1].index("on cpu") == lines[-2].index("two lines")


def test_no_time_left() -> None:
    outcome = run_parts([Part("late", _passes)], CPU, time.monotonic())[0]
    assert (outcome.state, outcome.seconds) == ("failed", 0.0)


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that computes something else fails each comparison."""
    miniatures = [p for p in PARTS if p.check in (sections.check_bits, sizes.check_sizes)]

    def compress(x: torch.Tensor, *rest: Any) -> None:
        eager.compress(x * 1.5, *rest)

    monkeypatch.setattr(gpu, "compress", compress)
    for part in miniatures:
        with pytest.raises(AssertionError):
            part.check(CPU, **part.arguments | MINIATURES[part.check])


def test_without_a_gpu_nothing_is_checked() -> None:
    done = subprocess.run(
        [ROOT / "scripts/gpu_check"],
        check=False,
        env={**os.environ, "VIRTUAL_ENV": sys.prefix},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "PyTorch finds no GPU on this machine: nothing checked.\n"

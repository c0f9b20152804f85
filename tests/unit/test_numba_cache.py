"""Compiled CPU code on disk: damaged, full, shared by ranks that start together."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("numba")

ROUND_THREE = (
    "import numpy as np\n"
    "from loco_fsdp.backends import loops, numba_cache\n"
    "out = np.zeros(3, np.uint16)\n"
    "numba_cache.prepare(loops.write_floats, np.ones(3, np.float32), out, np.uint64(0), 3, 16)\n"
    "assert out.tolist() == [0x3F80] * 3\n"
    "hits = sum(loops.write_floats.stats.cache_hits.values())\n"
    "print('hits', hits, 'of', len(loops.write_floats.signatures))\n"
)
"""Compiles a loop and a function that it calls, which takes less time than the kernels."""


def start(folder: Path, before: str = "") -> subprocess.Popen[str]:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-c", before + ROUND_THREE],
        env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> str:
    try:
        text, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 0, text
    return text.strip()


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.nb*") if path.is_file())


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the code of one process."""
    folder = tmp_path_factory.mktemp("compiled")
    assert finish(start(folder)) == "hits 0 of 1"
    assert len(files(folder)) == 4, "an index and one entry for each of two functions"
    return folder


@pytest.mark.parametrize(("kind", "left"), [(".nbi", 0), (".nbi", 7), (".nbc", 200)])
def test_half_written_files(compiled: Path, tmp_path: Path, kind: str, left: int) -> None:
    """Field case 12: a process was killed while it wrote, or the disk was full then."""
    shutil.copytree(compiled, tmp_path, dirs_exist_ok=True)
    for path in files(tmp_path):
        if path.suffix == kind:
            path.write_bytes(path.read_bytes()[:left])
    lines = finish(start(tmp_path)).splitlines()
    assert lines[-1] == "hits 0 of 1"
    assert len(lines) == 1 or ("cannot be kept in" in lines[0] and str(tmp_path) in lines[0])


FULL_DISK = (
    "import errno\n"
    "import numba.core.caching as caching\n"
    "def full(*_):\n"
    "    raise OSError(errno.ENOSPC, 'No space left on device')\n"
    "caching.IndexDataCacheFile.save = full\n"
)


def test_full_disk(tmp_path: Path) -> None:
    """One line that says so, and no plain PyTorch for the rest of the run."""
    lines = finish(start(tmp_path, FULL_DISK)).splitlines()
    assert len(lines) == 2 and lines[1] == "hits 0 of 1"
    assert "No space left on device" in lines[0] and "compiles for itself" in lines[0]


def test_ranks_that_start_together_compile_once(tmp_path: Path) -> None:
    """The others wait for the first, then load what it has kept."""
    texts = [finish(process) for process in [start(tmp_path) for _ in range(3)]]
    assert sorted(texts) == ["hits 0 of 1", "hits 1 of 1", "hits 1 of 1"]


HOLD = (
    "import sys, time\n"
    "from filelock import FileLock\n"
    "with FileLock(sys.argv[1]):\n"
    "    print('held', flush=True)\n"
    "    time.sleep(60)\n"
)


def test_wait_for_another_process_is_bounded(compiled: Path) -> None:
    """A process that hangs with the lock, here for 60 s, holds others up for the limit only.

    What the first process has kept is then used, with nothing compiled.
    """
    folder = files(compiled)[0].parent
    command = [sys.executable, "-c", HOLD, str(folder / "loco_fsdp.lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            limit = "from loco_fsdp.backends import numba_cache\nnumba_cache.LOCK_SECONDS = 1.0\n"
            begin = time.monotonic()
            assert finish(start(compiled, limit)) == "hits 1 of 1"
            assert time.monotonic() - begin < 30
        finally:
            holder.kill()

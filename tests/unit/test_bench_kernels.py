"""``scripts/bench_kernels.py``: what it writes, on sizes that take no time."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("numba")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import bench_kernels  # noqa: E402
from gpu import measure, torch_compile  # noqa: E402
from gpu.problems import CONFIG, WORLD_SIZE, Buffers, Problem  # noqa: E402
from loco_fsdp.backends import eager  # noqa: E402

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
FIELDS = {
    *("backend", "op", "dtype", "elements", "threads", "seconds", "copy_seconds"),
    *("ratio_to_copy", "share_of_copy_bandwidth", "ratio_to_eager"),
}
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure the GPU too")


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The rows of a run on tiny tensors with one and two threads, read back from its file."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(bench_kernels, "QUICK_SIZES", [2**12])
    monkeypatch.setattr(bench_kernels, "QUICK_SECONDS", 0.0)
    # Compiling into an empty cache would take half a minute.
    monkeypatch.setattr(bench_kernels, "first_uses", lambda *_: iter(()))
    out, png = tmp_path / "rows.jsonl", tmp_path / "share.png"
    bench_kernels.main(["--quick", "--threads", "1,2", f"--out={out}", f"--png={png}"])
    torch.set_num_threads(threads)
    assert png.read_bytes().startswith(b"\x89PNG")
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_rows(rows: list[dict[str, Any]]) -> None:
    """Every backend, operation, dtype and thread count once; the figures fit each other."""
    seen = {(row["backend"], row["op"], row["dtype"], row["threads"]) for row in rows}
    assert len(seen) == len(rows) == 2 * 2 * 2 * 2
    for row in rows:
        assert set(row) >= FIELDS and row["elements"] == 2**12
        assert row["seconds"] > 0 and row["copy_seconds"] > 0 and row["ratio_to_eager"] > 0
        assert math.isclose(row["ratio_to_copy"], row["seconds"] / row["copy_seconds"])
        itemsize = 4 if row["dtype"] == "float32" else 2
        moved = 2.5 + itemsize if row["op"] == "compress" else 0.5 * WORLD_SIZE + itemsize
        share = moved / (2 * itemsize) / row["ratio_to_copy"]
        assert math.isclose(row["share_of_copy_bandwidth"], share)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_contenders_do_the_same_work(dtype: torch.dtype) -> None:
    """Backend and unfused operations give equal bits, so that their times can be compared."""
    for op in ("compress", "reduce"):
        problem = Problem(op, dtype, 2**12, CPU)
        found = []
        for name in (*measure.backends(CPU), "unfused"):
            torch.manual_seed(0)
            buffers = Buffers(problem)
            module = measure.backends(CPU).get(name)
            call = buffers.unfused_call() if module is None else buffers.backend_call(module)
            for _ in range(2):
                call()
            found.append(buffers.payload if op == "compress" else buffers.output)
        assert all(torch.equal(one, found[0]) for one in found)
        assert found[0].any()


@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torch_compile_does_the_work_too() -> None:
    """On two chunks a row, two calls: all but one byte in a thousand, since it joins operations."""
    elements = 2 * WORLD_SIZE * torch_compile.CHUNK_BLOCKS * CONFIG.block_size
    for op, parts in (("compress", ("payload", "residuals")), ("reduce", ("output",))):
        found = []
        for module in (eager, torch_compile):
            torch.manual_seed(0)
            buffers = Buffers(Problem(op, torch.float32, elements, CPU))
            for _ in range(2):
                buffers.backend_call(module)()
            found.append([getattr(part, "data", part) for part in map(vars(buffers).get, parts)])
        for one, other in zip(*found, strict=True):
            assert float((one != other).float().mean()) < 1e-3 and one.any()


@pytest.mark.parametrize("option", ["--out", "--png"])
def test_unwritable_file(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said before anything is measured."""
    monkeypatch.setattr(bench_kernels, "rows_of", None)
    for path in (tmp_path / "missing" / "file", tmp_path):
        with pytest.raises(SystemExit, match=r"cannot be written: (No such|Is a)"):
            bench_kernels.main(["--quick", option, str(path)])


def test_bytes_are_counted_as_moved() -> None:
    """Sizes of the buffers themselves, steps aside."""
    for dtype in DTYPES:
        problem = Problem("compress", dtype, 2**14, CPU)
        buffers = Buffers(problem)
        moved = buffers.x.nbytes + 2 * buffers.residuals.data.nbytes
        codes = buffers.layout.slots[0].data
        assert problem.num_bytes == moved + WORLD_SIZE * (codes.stop - codes.start)
    assert Problem("reduce", torch.float32, 1000, CPU).num_bytes == 1000 * (4 * 0.5 + 4)
    assert (CONFIG.bits, CONFIG.residual_dtype) == (4, "int8")


def test_rounds_are_interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow call is not repeated; the others take turns; medians are of warm calls."""
    order: list[str] = []
    seconds = {"copy": iter([9.0, 1.0, 3.0, 2.0]), "fast": iter([8.0, 1.0, 4.0, 9.0])}

    def seconds_of(call: Any, device: torch.device) -> float:
        order.append(call())
        return next(seconds[call()]) if call() != "slow" else 5.0

    monkeypatch.setattr(measure, "seconds_of", seconds_of)
    calls = {name: (lambda name=name: name) for name in ("copy", "fast", "slow")}
    medians = measure.interleaved_medians(calls, CPU, budget_seconds=2.0)
    assert order[:6] == ["copy", "copy", "fast", "fast", "slow", "slow"]
    assert order[6:] == ["copy", "fast"] * 2
    assert medians == {"copy": 2.0, "fast": 4.0, "slow": 5.0}


def test_memory_bounds_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "free_bytes", lambda device: 24 * 2**20)
    assert {one.elements for one in measure.problems(CPU, [2**18, 2**20, 2**22])} == {2**18}


def test_host_cost_and_first_use() -> None:
    row = measure.host_call(CPU, calls=2)
    assert (row.op, row.copy_seconds) == ("host_call", None) and row.seconds > 0
    assert measure.first_use(CPU) > 0
    assert len(measure.UNIT) == 9


def test_first_uses_start_from_an_empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, one cache: new for the first, filled for the second."""
    probe = (
        "import os, pathlib, sys; folder = pathlib.Path(os.environ['NUMBA_CACHE_DIR']); "
        "print(float(len(list(folder.iterdir())))); (folder / 'compiled').touch()"
    )
    monkeypatch.setattr(bench_kernels, "FIRST_USE", probe)
    cold, warm = bench_kernels.first_uses(CPU, 1)
    assert (cold.op, cold.seconds) == ("first_use_cold", 0.0)
    assert (warm.op, warm.seconds) == ("first_use_warm", 1.0)


def test_ahead_of_time_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A column for each field, a row for each kernel; without the interpreter of other tests."""
    program = (
        '#!/bin/sh\nif [ -n "$TRITON_INTERPRET" ]; then exit 1; fi\n'
        'echo \'{"kernel": "compress", "load_bits": "128"}\'\n'
        'echo \'{"kernel": "reduce", "load_bits": "64"}\'\n'
    )
    python = tmp_path / "python"
    python.write_text(program)
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    table = bench_kernels.aot_table()
    assert [column.header for column in table.columns] == ["kernel", "load bits"]
    assert table.row_count == 2


def test_bad_threads(capsys: pytest.CaptureFixture[str]) -> None:
    for value in ("0", "two", "1,"):
        with pytest.raises(SystemExit):
            bench_kernels.main(["--threads", value])
        assert f"'{value}': wanted numbers from 1 on" in capsys.readouterr().err

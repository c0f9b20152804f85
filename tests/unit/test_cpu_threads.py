"""How the CPU backend shares its work between threads."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernel_calls import one_tensor
from loco_fsdp import LoCoConfig
from strategies import values_of_kind

pytest.importorskip("numba")

from loco_fsdp.backends import compiled

NUMEL = 1_000_001


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def nothing_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_prepare", lambda *_: None)


def test_threads_change_no_bit() -> None:
    """One to three threads, over sizes at which the work is shared; two calls each."""
    x = values_of_kind("normal", (2, NUMEL), 0)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        exchange = one_tensor("compiled", LoCoConfig(), (2, NUMEL))
        payloads = [exchange.compress(x) for _ in range(2)]
        results.append([*payloads, exchange.reduce(payloads[-1], 0.5), exchange.residual()])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@given(threads=st.integers(1, 5), tiles=st.integers(0, 400))
def test_each_tile_is_done_once(threads: int, tiles: int) -> None:
    done: list[int] = []

    def loop(first: int, last: int) -> int:
        done.extend(range(first, last))
        return last - first

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "_prepare", lambda *_: None)
        patch.setattr(torch, "get_num_threads", lambda: threads)
        assert sum(compiled._in_threads(loop, tiles)) == tiles
    assert sorted(done) == list(range(tiles))


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_torchs_number_of_threads_works(threads: int, nothing_to_compile: None) -> None:
    """As many at once as torch has, which one that did it all would not be."""
    torch.set_num_threads(threads)
    together, workers = threading.Barrier(threads, timeout=20), set()

    def loop(first: int, last: int) -> None:
        if threading.get_ident() not in workers:
            workers.add(threading.get_ident())
            together.wait()

    compiled._in_threads(loop, 1000)
    assert len(workers) == threads


def test_error_in_a_thread_is_raised(nothing_to_compile: None) -> None:
    torch.set_num_threads(3)

    def loop(first: int, last: int) -> None:
        if first > 0:
            raise MemoryError("no memory for a tile")

    with pytest.raises(MemoryError, match="no memory for a tile"):
        compiled._in_threads(loop, 1000)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_child_of_a_fork_has_its_own_threads(nothing_to_compile: None) -> None:
    """A child, such as a data loader's worker, inherits the pool without its threads."""
    torch.set_num_threads(2)

    def loop(first: int, last: int) -> int:
        time.sleep(0.001)
        return last - first

    assert sum(compiled._in_threads(loop, 64)) == 64
    child = os.fork()
    if child == 0:
        os._exit(0 if sum(compiled._in_threads(loop, 64)) == 64 else 1)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("the child waits for threads that it does not have")

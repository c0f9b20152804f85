"""A pool of rank processes that lives for the whole test session.

Importing torch takes seconds and making a gloo group milliseconds, so the processes stay and each
test gets a fresh default process group of as many of them as it asks for.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic
from typing import Any

GROUP_TIMEOUT = timedelta(seconds=20)
START_SECONDS = 120.0
COLLECT_EVERY = 10  # runs of a rank: a dropped model's group has threads that only end with it


class RankError(AssertionError):
    """A rank raised; the message holds its traceback."""


class RankPool:
    """Runs a function on W ranks and returns their results in rank order."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[tuple[Any, Connection]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="loco_ranks_")
        self._runs = 0

    def run(
        self, function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 150
    ) -> list[Any]:
        """Call ``function(*args)`` on ranks 0 to ``world_size - 1``, inside a gloo group.

        Raises ``RankError`` if one of them raises, or does not answer within ``timeout`` seconds.
        """
        new = range(len(self._workers), world_size)
        for _ in new:
            self._add_worker()
        for rank in new:  # a group's time-out must not have to cover the import of torch
            if not self._receive(rank, monotonic() + START_SECONDS)[0]:
                self._end_workers()
                raise RankError(f"The process of rank {rank} has not started.")
        self._runs += 1
        store = Path(self._folder.name) / f"store{self._runs}"
        for rank in range(world_size):
            task = pickle.dumps((function, args, rank, world_size, str(store)))
            self._workers[rank][1].send_bytes(task)
        deadline = monotonic() + timeout
        answers = [self._receive(rank, deadline) for rank in range(world_size)]
        store.unlink(missing_ok=True)
        failures = [f"rank {r}:\n{text}" for r, (ok, text) in enumerate(answers) if not ok]
        if any("no answer" in failure for failure in failures):
            self._end_workers()
        if failures:
            raise RankError("\n".join(failures))
        return [result for _, result in answers]

    def close(self) -> None:
        """End the pool: its processes and its files."""
        self._end_workers()
        self._folder.cleanup()

    def _end_workers(self) -> None:
        for process, _ in self._workers:
            process.kill()
            process.join(10)
        self._workers.clear()

    def _add_worker(self) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        self._workers.append((process, ours))

    def _receive(self, rank: int, deadline: float) -> tuple[bool, Any]:
        connection = self._workers[rank][1]
        if not connection.poll(max(0.0, deadline - monotonic())):
            return False, "no answer in time"
        try:
            answer: tuple[bool, Any] = pickle.loads(connection.recv_bytes())
        except EOFError:
            return False, "no answer: the process has ended"
        return answer


def _serve(connection: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    connection.send_bytes(pickle.dumps((True, "ready")))
    for count in itertools.count(1):
        if count % COLLECT_EVERY == 0:
            gc.collect()
        try:
            function, args, rank, world_size, store = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        connection.send_bytes(pickle.dumps(_run_one(function, args, rank, world_size, store)))


def _run_one(
    function: Callable[..., Any], args: Any, rank: int, world_size: int, store: str
) -> tuple[bool, Any]:
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=GROUP_TIMEOUT,
    )
    try:
        result = function(*args)
        dist.barrier()  # gloo may abort at exit if a rank leaves while others still talk
    except BaseException:  # a failed `pytest.raises` is no Exception
        return False, traceback.format_exc()
    else:
        return True, result
    finally:
        dist.destroy_process_group()

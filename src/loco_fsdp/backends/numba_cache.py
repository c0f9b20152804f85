"""The first call of a numba loop with arguments of some types: compiled once on a machine."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from numba.core.caching import NullCache
from numba.core.dispatcher import Dispatcher

from loco_fsdp.backends import loops

logger = logging.getLogger(__name__)

LOCK_SECONDS = 60.0
"""Most that a process waits for another's compilation; it took 11 to 17 s on 2 Xeon cores."""


def prepare(loop: Any, *arguments: Any) -> None:
    """Compile ``loop`` for arguments of these types, or take it from disk."""
    try:
        with _one_process_compiles(loop.stats.cache_path):
            loop(*arguments)
    except Exception as error:  # a full disk, or files that a killed process left half written
        logger.warning(
            "Compiled code cannot be kept in %s (%s: %s), so this process compiles for itself. "
            "Delete the folder if it is not full.",
            loop.stats.cache_path, type(error).__name__, " ".join(str(error).split())[:300],
        )  # fmt: skip
        for function in vars(loops).values():
            if isinstance(function, Dispatcher):
                vars(function)["_cache"] = NullCache()
        loop(*arguments)


@contextmanager
def _one_process_compiles(folder: str | None) -> Iterator[None]:
    """Let the ranks of a machine wait for the first of them, then all go on at once."""
    try:
        lock = _lock_in(folder)
    except (OSError, NotImplementedError):  # no folder, or one where nothing can be locked
        lock = None
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _lock_in(folder: str | None) -> FileLock | None:
    """The lock of a folder, or None once the process that had it has let go."""
    if folder is None:
        return None
    Path(folder).mkdir(parents=True, exist_ok=True)
    lock = FileLock(Path(folder) / "loco_fsdp.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        lock.acquire(timeout=LOCK_SECONDS)
        lock.release()
        return None
    return lock

"""Fixtures for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from rank_pool import RankPool

# Triton reads this when a kernel is defined: without a GPU it runs kernels on CPU tensors.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# No test asserts a time, so hypothesis must not either. Derandomised: CI sees what you see.
settings.register_profile("loco", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("loco")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The session's pool: ``ranks.run(function, world_size, *args)``."""
    pool = RankPool()
    yield pool
    pool.close()

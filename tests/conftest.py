"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from rank_pool import RankPool

# No test asserts a time, so hypothesis must not either. Derandomised: CI sees what you see.
settings.register_profile("loco", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("loco")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The session's pool: ``ranks.run(function, world_size, *args)``."""
    pool = RankPool()
    yield pool
    pool.close()

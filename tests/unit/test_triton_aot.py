"""What the compilers make of the kernels, on machines without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton")

ARCHS = ("sm_80", "sm_90", "sm_100", "gfx942")
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def rows() -> Rows:
    """The report of all variants on all architectures."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "loco_fsdp_kernels.aot", "--json"]
    done = subprocess.run(
        command, check=True, env=environment, timeout=280, capture_output=True, text=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_variant_compiles_everywhere(rows: Rows) -> None:
    variants = {(row["kernel"], row["variant"]) for row in rows}
    assert len(rows) == len(ARCHS) * len(variants)
    assert {row["arch"] for row in rows} == set(ARCHS)
    assert {kernel for kernel, _ in variants} == {"compress", "reduce"}


def test_registers_suffice(rows: Rows) -> None:
    assert [row for row in rows if row["spills"] or row["registers"] > 128] == []


def test_aligned_data_moves_in_vectors(rows: Rows) -> None:
    """Narrow accesses are the steps (of each row summed at once) and scalars, never the data.

    A thread has 16 elements, so that data would be 8 or more narrow accesses.
    """
    aligned = [row for row in rows if row["aligned"]]
    assert len(aligned) > len(ARCHS) * 10
    for row in aligned:
        assert "128" in row["load_bits"] and "128" in row["store_bits"], row
        assert row["narrow_loads"] <= 5 and row["narrow_stores"] <= 2, row

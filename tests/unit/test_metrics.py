"""The table of units, and byte counts for people."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loco_fsdp.metrics import UnitSummary, format_bytes, format_table

UNIT = UnitSummary(
    unit="layers.0",
    parameters=3,
    elements=1_234_567,
    compressed="yes, except 1-D (1)",
    bytes_before=4 * 1024**2,
    bytes_after=1024**2,
    residual_bytes=1536,
)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1024**2, "1.0 MiB"),
        (5 * 1024**3, "5.0 GiB"),
        (3 * 1024**4, "3072.0 GiB"),
    ],
)
def test_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_table() -> None:
    """Text columns to the left, figures to the right, totals in the last line."""
    skipped = replace(
        UNIT, unit="root", compressed="no: why", bytes_before=0, bytes_after=0, residual_bytes=0
    )
    assert format_table([UNIT, skipped]).splitlines() == [
        "unit      parameters   elements  compressed            before    after  residual",
        "--------------------------------------------------------------------------------",
        "layers.0           3  1,234,567  yes, except 1-D (1)  4.0 MiB  1.0 MiB   1.5 KiB",
        "root               3  1,234,567  no: why                  0 B      0 B       0 B",
        "--------------------------------------------------------------------------------",
        "total              6  2,469,134  4.00x less           4.0 MiB  1.0 MiB   1.5 KiB",
    ]


def test_table_where_nothing_is_sent() -> None:
    """One rank, or no unit: there is no ratio."""
    alone = replace(UNIT, bytes_before=0, bytes_after=0)
    for rows in ([alone], []):
        total = format_table(rows).splitlines()[-1]
        assert total.startswith("total")
        assert "less" not in total

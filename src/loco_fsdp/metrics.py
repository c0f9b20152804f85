"""Figures of the communication, per FSDP unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CommStats:
    """What one unit has sent since it was attached, on this rank."""

    unit: str
    calls: int
    """Reductions."""
    bytes_sent: int
    """Gradient bytes that left this rank: W - 1 payload rows a call, headers included."""
    bytes_bf16: int
    """What the same calls would have sent as bfloat16, by all-to-all or ring."""
    bytes_fp32: int
    """What the same calls would have sent as float32."""
    relative_error: float | None
    """Norm of the rounding error over norm of what was compressed, of the last call; None
    unless ``LoCoConfig(error_stats=True)``."""
    residual_norm: float
    """Norm of this rank's residual now, in units of unscaled gradients."""
    nonfinite_blocks: int
    """Blocks sent that held a NaN or an infinity."""


@dataclass(frozen=True, kw_only=True)
class UnitSummary:
    """One row of ``LoCoHandle.describe()``."""

    unit: str
    parameters: int
    elements: int
    compressed: str
    """``yes``, or why not, or which parameters are exempt."""
    bytes_before: int
    """Sent by this rank in one reduction without compression, in the unit's reduce dtype."""
    bytes_after: int
    residual_bytes: int


def format_table(rows: Sequence[UnitSummary]) -> str:
    """Format summaries as a plain-text table with a line of totals."""
    titles = ("unit", "parameters", "elements", "compressed", "before", "after", "residual")
    cells = [titles]
    cells += [
        (
            row.unit,
            f"{row.parameters}",
            f"{row.elements:,}",
            row.compressed,
            format_bytes(row.bytes_before),
            format_bytes(row.bytes_after),
            format_bytes(row.residual_bytes),
        )
        for row in rows
    ]
    before, after = (sum(getattr(r, f"bytes_{w}") for r in rows) for w in ("before", "after"))
    cells.append(
        (
            "total",
            f"{sum(row.parameters for row in rows)}",
            f"{sum(row.elements for row in rows):,}",
            f"{before / after:.2f}x less" if after else "",
            format_bytes(before),
            format_bytes(after),
            format_bytes(sum(row.residual_bytes for row in rows)),
        )
    )
    widths = [max(len(row[column]) for row in cells) for column in range(len(titles))]
    left = {0, 3}  # text columns; the others are figures
    lines = [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    rule = "-" * max(map(len, lines))
    return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])


def format_bytes(count: int) -> str:
    """Format a byte count with a binary unit: ``1.5 MiB``."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"

"""The comparison of runs: figures, a table, two pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from lm.runlog import Record

BASELINES = ("baseline_fp32", "baseline_bf16")
"""The runs that the others are measured against."""

SMOOTHING_STEPS = 10
"""Steps whose losses are averaged in the picture: single batches differ more than runs do."""


def comparison_rows(summaries: Mapping[str, Record]) -> list[Record]:
    """Return one object per run from the summaries of all runs, baselines included.

    ``gap_percent`` is the gap in validation bits per byte to ``baseline_fp32``, positive when the
    run is worse. A ratio is the baseline's gradient bytes over the run's own.
    """
    fp32, bf16 = (summaries[name] for name in BASELINES)
    best = fp32["val_bits_per_byte"]
    rows = []
    for name, summary in summaries.items():
        sent = summary["gradient_bytes_per_step"]
        bits = summary["val_bits_per_byte"]
        rows.append(
            {
                "name": name,
                "val_bits_per_byte": bits,
                "gap_percent": 100 * (bits / best - 1),
                "gradient_bytes_per_step": sent,
                "ratio_vs_bf16": bf16["gradient_bytes_per_step"] / sent,
                "ratio_vs_fp32": fp32["gradient_bytes_per_step"] / sent,
                "step_seconds": summary["step_seconds"],
                "steps": summary["steps"],
                "world_size": summary["world_size"],
            }
        )
    return rows


def format_table(rows: Sequence[Record]) -> Table:
    """Format the rows for a terminal."""
    table = Table(
        title=f"{rows[0]['steps']} steps on {rows[0]['world_size']} ranks",
        caption="Bytes of gradients sent by one rank. Between the ranks of one machine there is no "
        "slow link, so the step time shows what compression costs, not what it saves.",
    )
    table.add_column("run")
    for title in ("val bits/byte", "gap to fp32", "bytes/step", "vs bf16", "vs fp32", "s/step"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['val_bits_per_byte']:.4f}",
            f"{row['gap_percent']:+.2f} %",
            f"{row['gradient_bytes_per_step']:,.0f}",
            f"{row['ratio_vs_bf16']:.2f}x",
            f"{row['ratio_vs_fp32']:.2f}x",
            f"{row['step_seconds']:.3f}",
        )
    return table


def draw_losses(records: Mapping[str, Sequence[Record]], path: Path) -> None:
    """Draw the smoothed training loss of each run against the step."""
    figure, axes = _axes(height=4.5)
    for name, lines in records.items():
        smooth = _running_mean([line["loss"] for line in lines])
        axes.plot([line["step"] for line in lines], smooth, label=name, linewidth=1.2)
    axes.set_xlabel("step")
    axes.set_ylabel(f"training loss, nats per byte (mean of {SMOOTHING_STEPS} steps)")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def draw_bytes(rows: Sequence[Record], path: Path) -> None:
    """Draw the gradient bytes of each run as a bar."""
    figure, axes = _axes(height=1.2 + 0.45 * len(rows))
    names = [row["name"] for row in rows]
    kilobytes = [row["gradient_bytes_per_step"] / 1000 for row in rows]
    bars = axes.barh(names, kilobytes, height=0.6)
    axes.bar_label(
        bars,
        [
            f"{size:,.0f} kB, {row['ratio_vs_fp32']:.1f}x"
            for size, row in zip(kilobytes, rows, strict=True)
        ],
        padding=4,
    )
    axes.set_xlim(right=1.25 * max(kilobytes))
    axes.invert_yaxis()
    axes.set_xlabel("gradient kB sent per rank and step, and how many times less than fp32")
    figure.savefig(path, dpi=150)


def _axes(*, height: float) -> tuple[Any, Any]:
    """Make a figure without a display, and its axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _running_mean(values: Sequence[float]) -> list[float]:
    """Mean of each value and those before it, ``SMOOTHING_STEPS`` at most."""
    starts = (max(0, end - SMOOTHING_STEPS) for end in range(1, len(values) + 1))
    return [sum(values[a:b]) / (b - a) for b, a in enumerate(starts, start=1)]

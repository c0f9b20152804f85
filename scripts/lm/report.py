"""The comparison of runs: figures, a table, two pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
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
        caption="bits/byte and its gap to fp32 are of the validation text, kB/step are gradients "
        "sent by one rank. No link between ranks of one machine is slow, so the step time shows "
        "what compression costs, not what it saves.",
        box=SIMPLE_HEAD,
    )
    table.add_column("run", no_wrap=True)
    for title in ("bits/byte", "gap", "kB/step", "vs bf16", "vs fp32", "s/step"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['val_bits_per_byte']:.4f}",
            f"{row['gap_percent']:+.2f} %",
            f"{row['gradient_bytes_per_step'] / 1000:,.1f}",
            f"{row['ratio_vs_bf16']:.2f}x",
            f"{row['ratio_vs_fp32']:.2f}x",
            f"{row['step_seconds']:.3f}",
        )
    return table


def draw_losses(records: Mapping[str, Sequence[Record]], path: Path) -> None:
    """Draw each run's training loss against the step, and below it the gap to ``baseline_fp32``."""
    figure = _figure(height=6.0)
    loss_axes, gap_axes = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    reference = [line["loss"] for line in records[BASELINES[0]]]
    for name, lines in records.items():
        steps, losses = zip(*((line["step"], line["loss"]) for line in lines), strict=True)
        gaps = [loss - best for loss, best in zip(losses, reference, strict=True)]
        loss_axes.plot(steps, _running_mean(losses), label=name, linewidth=1.2)
        gap_axes.plot(steps, _running_mean(gaps), linewidth=1.2)
    loss_axes.set_ylabel("training loss, nats per byte")
    loss_axes.legend(frameon=False)
    gap_axes.set_ylabel("gap to fp32")
    gap_axes.set_xlabel(f"step (each point is the mean of {SMOOTHING_STEPS} steps)")
    for axes in (loss_axes, gap_axes):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def draw_bytes(rows: Sequence[Record], path: Path) -> None:
    """Draw the gradient bytes of each run as a bar."""
    figure = _figure(height=1.2 + 0.45 * len(rows))
    axes = figure.subplots()
    kilobytes = [row["gradient_bytes_per_step"] / 1000 for row in rows]
    bars = axes.barh([row["name"] for row in rows], kilobytes, height=0.6)
    labels = [
        f"{size:,.0f} kB, 1/{row['ratio_vs_fp32']:.2f} of fp32"
        for size, row in zip(kilobytes, rows, strict=True)
    ]
    axes.bar_label(bars, labels, padding=4)
    axes.set_xlim(right=1.2 * max(kilobytes))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("kB of gradients sent per rank and step")
    figure.savefig(path, dpi=150)


def _figure(*, height: float) -> Figure:
    """Make a figure that is drawn without a display."""
    figure = Figure(figsize=(8, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _running_mean(values: Sequence[float]) -> list[float]:
    """Mean of each value and those before it, ``SMOOTHING_STEPS`` at most."""
    starts = (max(0, end - SMOOTHING_STEPS) for end in range(1, len(values) + 1))
    return [sum(values[a:b]) / (b - a) for b, a in enumerate(starts, start=1)]

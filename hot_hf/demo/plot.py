"""The demo's picture: loss curves of the runs, and the bytes they kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .data import require

SMOOTHING = 0.9  # of an exponential moving average; single mini-batches are too noisy to compare by eye


def smoothed(values: Sequence[float]) -> list[float]:
    """Bias-corrected exponential moving average."""
    average, out = 0.0, []
    for i, value in enumerate(values, 1):
        average = SMOOTHING * average + (1 - SMOOTHING) * value
        out.append(average / (1 - SMOOTHING**i))
    return out


def plot(runs: Sequence, title: str, path: Path) -> None:
    """Write a PNG of ``runs`` (``train.Run``): training loss by step, held-out loss, bytes kept for the backward."""
    require("matplotlib", "pip install matplotlib")
    from matplotlib.figure import Figure  # no pyplot: nothing global, no display

    figure = Figure(figsize=(10, 4), layout="constrained")
    curves, bars = figure.subplots(1, 2, width_ratios=(3, 2))
    figure.suptitle(title)
    for run in runs:
        (line,) = curves.plot(smoothed(run.losses), label=f"{run.label}: training")
        curves.plot(
            run.steps, run.held_out_loss, "o", color=line.get_color(), label=f"{run.label}: held out, at the end"
        )
    curves.set(xlabel="step", ylabel=f"loss (moving average, {SMOOTHING})")
    curves.legend()
    width = 0.8 / len(runs)
    for i, run in enumerate(runs):
        sizes = [run.kept_bytes / 2**20, run.kept_linear_bytes / 2**20]
        bar = bars.bar([x + i * width for x in range(2)], sizes, width, label=run.label)
        bars.bar_label(bar, fmt="%.1f")
    bars.set_xticks([x + (len(runs) - 1) * width / 2 for x in range(2)], ["in all", "inputs of patched linears"])
    bars.set_ylabel("MiB kept for the backward")
    bars.legend()
    figure.savefig(path, dpi=120)

"""The stored rows as Markdown tables and one picture."""

from __future__ import annotations

import statistics
import textwrap
from pathlib import Path

from . import runs, single
from .store import key_of, settings_of

DATA = ("text", "digits")
Rows = list[dict[str, str]]

HEADER = """# Fidelity of the gradients, and what it does to training

Written by `python benchmarks/gradient_fidelity.py` from `fidelity_gradients.csv` and `fidelity_training.csv`, which
hold every number with its configuration. *text*: SmolLM2-135M-Instruct on the sources of Python's standard library.
*digits*: a small ViT (4 layers, 128 wide, 4 patches and CLS) from scratch on scikit-learn's digits. float32.
"""


def markdown(head: list[str], lines: list[list[str]]) -> str:
    """One table."""
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *lines)) + "\n"


def gradient_table(rows: Rows) -> str:
    """spec.md section 8's first table: a line per kind of gradient, a column per data."""
    by = {(r["data"], r["gradient"], r["label"]): r for r in rows}
    present = [d for d in DATA if any(r["data"] == d for r in rows)]
    lines = []
    for row in single.ROWS:
        found = [by.get((d, row.gradient, row.label)) for d in present]
        if any(found):
            cells = [f"{float(r['error']):.3f} ({float(r['worst_cosine']):.3f})" if r else "" for r in found]
            lines.append([row.gradient, row.label, "" if row.bits is None else f"{row.bits:g}", *cells])
    return markdown(["gradient", "arithmetic", "bits kept per element of x", *present], lines)


def by_candidate(rows: Rows, data: str) -> list[tuple[runs.Candidate, Rows]]:
    """The finished runs of each configuration, in the order of the plan, those of the exact one first."""
    out = []
    for candidate in (runs.EXACT, *runs.PRESETS, *runs.OTHERS):
        key = key_of(settings_of(candidate.config))
        found = [r for r in rows if r["data"] == data and r["configuration"] == key]
        if found:
            out.append((candidate, found))
    return out


def above_exact(found: Rows, exact: Rows, column: str) -> float | None:
    """Mean difference of ``column`` from the exact run of the same seed and number of steps."""
    twins = {(r["seed"], r["steps"]): float(r[column]) for r in exact}
    pairs = [(float(r[column]), twins.get((r["seed"], r["steps"]))) for r in found]
    differences = [value - twin for value, twin in pairs if twin is not None]
    return statistics.mean(differences) if differences else None


def training_table(rows: Rows, data: str) -> str:
    """spec.md section 8's second table: the first seed of every configuration."""
    rows = [r for r in rows if r["seed"] == "0"]
    groups = by_candidate(rows, data)
    exact = next((found for candidate, found in groups if candidate is runs.EXACT), [])
    lines = []
    for candidate, found in groups:
        for r in found:
            above = above_exact([r], exact, "held_out_loss")
            worse = " (more than 0.01)" if above is not None and above > 0.01 else ""
            lines.append(
                [
                    candidate.label,
                    r["steps"],
                    f"{float(r['held_out_loss']):.4f}",
                    "" if candidate is runs.EXACT or above is None else f"{above:+.4f}{worse}",
                    f"{float(r['largest_grad_norm']):.3g}",
                    f"{int(r['kept_linear_bytes']) / 2**20:.1f}",
                    f"{int(r['kept_bytes']) / 2**20:.1f}",
                ]
            )
    head = ["configuration", "steps", "held-out loss", "above exact", "largest gradient norm"]
    return markdown([*head, "MiB kept of linear inputs", "MiB kept in all"], lines)


def preset_table(rows: Rows) -> str:
    """Held-out accuracy on digits by preset and seed; the mean difference is over the seeds both have."""
    groups = by_candidate(rows, "digits")
    exact = next((found for candidate, found in groups if candidate is runs.EXACT), [])
    seeds = sorted({int(r["seed"]) for _, found in groups for r in found})
    lines = []
    for candidate, found in groups:
        if candidate in runs.OTHERS:
            continue
        accuracy = {int(r["seed"]): float(r["held_out_accuracy"]) for r in found}
        difference = above_exact(found, exact, "held_out_accuracy")
        cells = [f"{accuracy[s]:.2%}" if s in accuracy else "" for s in seeds]
        is_exact = candidate is runs.EXACT or difference is None
        verdict = "" if is_exact or difference >= -0.005 else " (more than half a percent worse)"
        lines.append(
            [
                candidate.label,
                *cells,
                f"{statistics.mean(accuracy.values()):.2%}",
                "" if is_exact else f"{100 * difference:+.2f} points{verdict}",
            ]
        )
    return markdown(["configuration", *(f"seed {s}" for s in seeds), "mean", "from exact"], lines)


def plot(gradients: Rows, training: Rows, path: Path) -> None:
    """Errors of both gradients, and held-out loss above exact, as bars; one colour per data."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 5), layout="constrained")
    axes = figure.subplots(1, 3)
    height = 0.4
    for ax, gradient in zip(axes, ("g_x", "g_w"), strict=False):
        labels = [row.label for row in single.ROWS if row.gradient == gradient]
        for i, data in enumerate(DATA):
            errors = {
                r["label"]: float(r["error"]) for r in gradients if (r["data"], r["gradient"]) == (data, gradient)
            }
            found = [(y, errors[label]) for y, label in enumerate(labels) if label in errors]
            bars = ax.barh([y + i * height for y, _ in found], [e for _, e in found], height, label=data, color=f"C{i}")
            ax.bar_label(bars, fmt="%.2f", fontsize=7)
        ax.set_yticks(
            [y + height / 2 for y in range(len(labels))], [textwrap.fill(label, 34) for label in labels], fontsize=8
        )
        ax.invert_yaxis()
        ax.set(title=f"{gradient}: relative Frobenius error, mean over layers")
        ax.margins(x=0.12)  # room for the numbers at the ends of the bars
        ax.legend()
    ax, labels = axes[2], [c.label for c in (*runs.PRESETS, *runs.OTHERS)]
    for i, data in enumerate(DATA):
        groups = by_candidate([r for r in training if r["seed"] == "0"], data)
        exact = next((found for candidate, found in groups if candidate is runs.EXACT), [])
        found = [(labels.index(c.label), above_exact(f, exact, "held_out_loss")) for c, f in groups if c.config]
        found = [(y, value) for y, value in found if value is not None]
        bars = ax.barh([y + i * height for y, _ in found], [v for _, v in found], height, label=data, color=f"C{i}")
        ax.bar_label(bars, fmt="%+.3f", fontsize=7)
    ax.set_yticks(
        [y + height / 2 for y in range(len(labels))], [textwrap.fill(label, 34) for label in labels], fontsize=8
    )
    ax.invert_yaxis()
    ax.set(title="held-out loss above exact, seed 0")
    ax.set_xscale("symlog", linthresh=0.1)  # the coarsest runs are ten times worse than all others
    ax.margins(x=0.2)
    ax.legend()
    figure.savefig(path, dpi=110)


def write_report(gradients: Rows, training: Rows, folder: Path) -> None:
    """Write fidelity.md and fidelity.png into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = [
        f"{r['layers']} linear layers, {r['tokens']} tokens of {d}"
        for d in DATA
        for r in [next((r for r in gradients if r["data"] == d), None)]
        if r
    ]
    parts = [
        HEADER,
        "![errors and losses](fidelity.png)\n",
        "## One gradient\n\nRelative Frobenius error against float64, mean over layers; worst cosine in brackets. "
        f"{'; '.join(sizes)}.\n",
        gradient_table(gradients),
    ]
    for data in DATA:
        if any(r["data"] == data for r in training):
            parts += [f"## Training: {data}\n", training_table(training, data)]
    if any(r["data"] == "digits" for r in training):
        parts += ["## Presets on digits: held-out accuracy by seed\n", preset_table(training)]
    (folder / "fidelity.md").write_text("\n".join(parts))
    plot(gradients, training, folder / "fidelity.png")

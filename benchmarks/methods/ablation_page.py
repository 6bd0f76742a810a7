"""ablation.md and ablation.png: the default with one ingredient changed at a time."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path

from fidelity.report import markdown

from .registry import ABLATION, METHODS
from .summary import Results, Row, Spread, joined
from .tasks import TASKS

HEADER = """# Ablation: each ingredient in turn

Written by `python benchmarks/compare_methods.py` from the rows of `training.csv`. The default (g_x INT8 per token
behind a Hadamard transform of 16, `ht_int4`, nearest rounding) with one thing changed, or what a line names, grouped by
ingredient. Differences are from the exact run of the same seed: means over seeds, smallest and largest in brackets.
"""
# What the lines of an ingredient are to be read against, beside the default.
BESIDE = ("exact", "default", "paper")


def lines_of(results: Results, task: str) -> list[list[str]]:
    """A line per finished configuration, the references first."""
    lines = []
    for name in (*BESIDE, *(m.name for m in ABLATION)):
        loss = results.values(task, name, "held_out_loss")
        if loss is None:
            continue
        scored, ratio = results.values(task, name, "held_out_accuracy"), results.ratio(task, name, "kept_linear_bytes")
        above = results.above(task, name, "held_out_loss")
        lines.append(
            [
                METHODS[name].ingredient or "reference",
                METHODS[name].label,
                str(len(loss.values)),
                f"{loss.mean:.4f}",
                "" if name == "exact" or above is None else above.text("+.4f"),
                f"{scored.mean:.2%}" if scored else "",
                "" if ratio is None else f"{ratio:.3f}",
                f"{max(results.values(task, name, 'largest_grad_norm').values):.3g}",
            ]
        )
    return [lines[i] for i in sorted(range(len(lines)), key=lambda i: _place(lines[i][0]))]


def _place(ingredient: str) -> int:
    order = list(dict.fromkeys(["reference", *(m.ingredient for m in ABLATION)]))
    return order.index(ingredient)


def readings(results: Results, task: str) -> list[str]:
    """Which gradient is the more sensitive, and which change costs most: from the rows, not by hand."""
    said = []
    for x, w, what in (
        ("ablation-g_x-only", "ablation-g_w-only", "the default's arithmetic (INT8 against `ht_int4`)"),
        ("ablation-g_x-int4-only", "ablation-g_w-hla-only", "the paper's bits and rank (INT4 against HLA r=8)"),
    ):
        a, b = (results.above(task, name, "held_out_loss") for name in (x, w))
        difference = results.above(task, x, "held_out_loss", w)
        if a and b and difference:
            said.append(
                f"With {what} approximating g_x alone adds {a.mean:+.4f} to the loss, g_w alone {b.mean:+.4f}: "
                + _verdict(difference)
            )
    changes = {m.name: results.above(task, m.name, "held_out_loss", "default") for m in ABLATION}
    changes = {m: d.mean for m, d in changes.items() if d is not None}
    if len(changes) > 3:
        ranked = sorted(changes, key=changes.get, reverse=True)[:3]
        worst = [f"{METHODS[m].label} ({changes[m]:+.4f})" for m in ranked]
        said.append(f"Against the default, the costliest changes are {joined(worst)}.")
        gone = [results.above(task, n, "held_out_loss", "default") for n in changes]
        apart = sum(_told_apart(d) for d in gone)
        if max(len(d.values) for d in gone) > 1:
            said.append(
                f"{apart} of the {len(changes)} changes differ from the default by more than twice the standard error "
                "over seeds; the others are within what a seed does by itself."
            )
    return said


def _told_apart(difference: Spread) -> bool:
    """Whether a mean over seeds is more than two standard errors from 0."""
    n = len(difference.values)
    return n > 1 and abs(difference.mean) > 2 * statistics.stdev(difference.values) / n**0.5


def _verdict(difference: Spread) -> str:
    more = "g_x" if difference.mean > 0 else "g_w"
    if len(difference.values) == 1:
        return f"more for {more}, by one seed."
    if _told_apart(difference):
        return f"the loss is more sensitive to {more}."
    return f"{len(difference.values)} seeds do not tell them apart."


def plot(results: Results, tasks: list[str], path: Path) -> None:
    """Held-out loss above exact by configuration, grouped by ingredient; dots are seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7 * len(tasks), 8), layout="constrained")
    axes = figure.subplots(1, len(tasks), squeeze=False)[0]
    ingredients = list(dict.fromkeys(m.ingredient for m in ABLATION))
    for ax, task in zip(axes, tasks, strict=True):
        methods = sorted(
            (m for m in ABLATION if results.above(task, m.name, "held_out_loss")),
            key=lambda m: ingredients.index(m.ingredient),
        )
        names = [n for n in BESIDE[1:] if results.above(task, n, "held_out_loss")] + [m.name for m in methods]
        for y, name in enumerate(names):
            above, ingredient = results.above(task, name, "held_out_loss"), METHODS[name].ingredient
            colour = f"C{ingredients.index(ingredient)}" if ingredient else "black"
            ax.barh(y, above.mean, 0.6, color=colour, alpha=0.4)
            ax.plot(above.values, [y] * len(above.values), "o", color=colour, markersize=4)
        labels = [f"{METHODS[n].ingredient or 'reference'}: {METHODS[n].label}" for n in names]
        ax.set_yticks(range(len(names)), [textwrap.fill(label, 44) for label in labels], fontsize=7)
        ax.invert_yaxis()
        ax.axvline(0, color="black", linewidth=0.6)
        ax.set(title=TASKS[task].what, xlabel="held-out loss above exact")
    figure.savefig(path, dpi=100)


def write(rows: Sequence[Row], folder: Path) -> None:
    """Write ablation.md and ablation.png into ``folder``; nothing where no ablation is finished."""
    results = Results(rows)
    tasks = [t for t in results.by if any(METHODS[n].group == "ablation" for n in results.methods(t))]
    tasks = [t for t in tasks if "exact" in results.by[t]]
    if not tasks:
        return
    parts = [HEADER, "![loss above exact by configuration](ablation.png)\n"]
    head = ["ingredient", "configuration", "seeds", "held-out loss", "above exact", "accuracy"]
    for task in tasks:
        parts += [
            f"## {TASKS[task].what}\n",
            markdown([*head, "linear inputs, of float32", "largest gradient norm"], lines_of(results, task)),
            *(f"- {textwrap.fill(s, 118, subsequent_indent='  ')}" for s in readings(results, task)),
            "",
        ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ablation.md").write_text("\n".join(parts))
    plot(results, tasks, folder / "ablation.png")

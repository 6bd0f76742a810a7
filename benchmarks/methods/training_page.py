"""training.md and training.png."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from fidelity.report import markdown

from . import terms
from .claims import claims
from .registry import METHODS
from .summary import ACCURACY_BOUND, LOSS_BOUND, Results, Row
from .tasks import TASKS

HEADER = f"""# Training with HOT, with exact gradients and with other methods

Written by `python benchmarks/compare_methods.py` from `training.csv`, where every run is a row with its configuration;
`--report` writes it anew without training. The methods are Functions of `benchmarks/methods/functions.py`, each with
the paper it follows, and configurations of `HOTConfig`; all run on the layers that HOT patches, behind an exact
forward. Differences are from the exact float32 run of the same seed, which has the same start and sees the same data;
means over seeds, with the smallest and largest in brackets.

The bound: held-out loss at most {LOSS_BOUND} above exact, or held-out accuracy at most {ACCURACY_BOUND:.1%} below,
with at most an eighth of the float32 bytes for the inputs of linear layers (and a float32 scale per token: 4 bytes
beside half a byte per feature).
"""


FOOTNOTE = """\
The other methods keep a copy per layer, HOT one for layers that read the same tensor (q/k/v, gate/up): that is why 8
bits are more than a quarter of float32 there. bfloat16 casts, and keeps, the input anew in each layer as well. Times
are for orientation: the machine did other work too ([bench.md](bench.md)).
"""


def method_table(results: Results, task: str) -> str:
    """Every method on one task; ablations have a page of their own."""
    names = [n for n in results.methods(task) if METHODS[n].group != "ablation"]
    accuracy = any(results.values(task, n, "held_out_accuracy") for n in names)
    lines = []
    for name in names:
        loss, above = results.values(task, name, "held_out_loss"), results.above(task, name, "held_out_loss")
        scored = results.values(task, name, "held_out_accuracy")
        points = results.difference_text(task, name) if TASKS[task].criterion == "held_out_accuracy" else ""
        ratio = results.ratio(task, name, "kept_linear_bytes")
        within = results.within(task, name)
        lines.append(
            [
                f"`{name}`: {METHODS[name].label}",
                str(len(loss.values)),
                loss.text(".4f"),
                "" if name == "exact" or above is None else above.text("+.4f"),
                *([f"{scored.mean:.2%}" if scored else "", "" if name == "exact" else points] if accuracy else []),
                "" if name == "exact" or within is None else "yes" if within else "no",
                f"{max(results.values(task, name, 'largest_grad_norm').values):.3g}",
                "" if ratio is None else f"{ratio:.3f}",
                f"{results.values(task, name, 'kept_bytes').mean / 2**20:.1f}",
                f"{seconds.mean:.2f}" if (seconds := results.values(task, name, "seconds_per_step")) else "",
            ]
        )
    head = ["method", "seeds", "held-out loss", "above exact", *(["accuracy", "from exact"] if accuracy else [])]
    head += [
        "within the bound",
        "largest gradient norm",
        "linear inputs, of float32",
        "MiB kept in all",
        "s/step, machine shared",
    ]
    return markdown(head, lines)


def plot(results: Results, path: Path) -> None:
    """Differences from exact, a panel per task, a dot per seed."""
    from matplotlib.figure import Figure

    tasks = list(results.by)
    columns = min(4, len(tasks))
    rows = -(-len(tasks) // columns)
    figure = Figure(figsize=(5.2 * columns, 4.6 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for ax, task in zip(axes, tasks, strict=False):
        names = [n for n in results.methods(task) if METHODS[n].group != "ablation" and n != "exact"]
        column, sign = TASKS[task].criterion, 1.0
        if column == "held_out_accuracy":
            sign = 100.0
        for y, name in enumerate(names):
            difference = results.above(task, name, column)
            if difference is None:
                continue
            colour = {"hot": "C1", "rival": "C0", "exact": "C2"}[METHODS[name].group]
            bar = ax.barh(y, sign * difference.mean, 0.6, color=colour, alpha=0.4)
            ax.bar_label(bar, fmt="%+.2f" if sign == 100 else "%+.3f", fontsize=6, padding=2)
            ax.plot(
                [sign * v for v in difference.values], [y] * len(difference.values), "o", color=colour, markersize=4
            )
        ax.set_yticks(range(len(names)), names, fontsize=8)
        ax.invert_yaxis()
        bound = -100 * ACCURACY_BOUND if column == "held_out_accuracy" else LOSS_BOUND
        ax.axvline(bound, color="black", linewidth=0.8, linestyle=":")
        ax.set_title(textwrap.fill(TASKS[task].what, 40), fontsize=10)
        ax.set_xlabel("accuracy from exact, points" if sign == 100 else "held-out loss above exact")
        ax.margins(x=0.2)
        if sign == 1:
            ax.set_xscale("symlog", linthresh=0.02)  # the coarsest methods are a hundred times worse than the best
    for ax in axes[len(tasks) :]:
        ax.set_axis_off()
    figure.suptitle("orange: HOT, blue: other methods, green: exact in bfloat16; dots: seeds; dotted: the bound")
    figure.savefig(path, dpi=100)


def write(rows: Sequence[Row], folder: Path) -> None:
    """Write training.md and training.png into ``folder``; nothing where no run is finished."""
    results = Results(rows)
    if not results.by:
        return
    machines = sorted(
        {
            (r["machine"], r["torch"])
            for methods in results.by.values()
            for m in methods.values()
            for r in m.values()
            if r["machine"]
        }
    )
    parts = [
        HEADER,
        "Ran on " + "; ".join(f"{m}, torch {t}" for m, t in machines) + ". Runs without a time were made by "
        "`gradient_fidelity.py` ([fidelity.md](fidelity.md)), which trains two of the tasks with the same functions. "
        "The machine did other work meanwhile, so seconds tell how long a run takes and compare no methods: "
        "[bench.md](bench.md) does.\n",
        "![differences](training.png)\n",
    ]
    lines = claims(results)
    if lines:
        head = ["task", "plan", "from exact", "linear inputs, of float32", "seeds", "within both bounds"]
        parts += ["## Does it hold?\n", markdown(head, lines)]
    parts += [terms.section(folder)]
    for task in results.by:
        steps = next(iter(next(iter(results.by[task].values())).values()))["steps"]
        parts += [f"## {TASKS[task].what}\n", f"{steps} steps.\n", method_table(results, task)]
    parts += [FOOTNOTE]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "training.md").write_text("\n".join(p for p in parts if p))
    plot(results, folder / "training.png")

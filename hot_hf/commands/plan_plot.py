"""A plan's picture: errors and bytes of every layer, coloured by what was chosen."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from ..selected_plan import Choice, SelectedPlan, input_with_block, kept_with_block


def plot(plan: SelectedPlan, path: str | Path) -> None:
    """Write a PNG: errors of g_x and of g_w, single (dots) and summed (crosses), and bytes, layer by layer.

    Raises:
        ImportError: without matplotlib, saying what to install.
    """
    if find_spec("matplotlib") is None:
        raise ImportError("drawing a plan needs matplotlib, which is not installed: run `pip install matplotlib`.")
    from matplotlib.figure import Figure  # no pyplot: nothing global, no display

    figure = Figure(figsize=(max(7.0, min(16.0, 0.08 * len(plan.layers) + 4)), 8), layout="constrained")
    axes = figure.subplots(3, 1, sharex=True)
    budget = ", ".join(f"{name}={value}" for name, value in plan.budget.items())
    figure.suptitle(f"{plan.model}, {budget}: {plan.bytes / 2**20:,.2f} of {plan.exact_bytes / 2**20:,.2f} MiB kept")
    for axis, what, label in ((axes[0], "grad_input", input_with_block), (axes[1], "grad_weight", kept_with_block)):
        for kind, members in _by(plan, label).items():
            scores = [(i, getattr(layer, what)) for i, layer in members if getattr(layer, what) is not None]
            if scores:
                dots = axis.plot([i for i, _ in scores], [s.error for _, s in scores], "o", ms=4, label=kind)
                colour = dots[0].get_color()
                axis.plot([i for i, _ in scores], [s.accumulated for _, s in scores], "x", ms=5, color=colour)
        if "max_grad_error" in plan.budget:
            axis.axhline(plan.budget["max_grad_error"], color="grey", lw=1, ls="--")
        axis.set_ylabel(f"error of {what}\n(o single, x summed)")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=7, ncols=4, loc="upper left", bbox_to_anchor=(0, 1.25), frameon=False)
    axes[2].bar(range(len(plan.layers)), [x.exact_bytes / 2**10 for x in plan.layers.values()], color="lightgrey")
    for _, members in _by(plan, kept_with_block).items():
        axes[2].bar([i for i, _ in members], [layer.bytes / 2**10 for _, layer in members])
    axes[2].set(ylabel="KiB kept (grey: exact)", xlabel="layer")
    if len(plan.layers) <= 40:
        axes[2].set_xticks(range(len(plan.layers)), list(plan.layers), rotation=90, fontsize=7)
    figure.savefig(path, dpi=110)


def _by(plan: SelectedPlan, label) -> dict[str, list[tuple[int, Choice]]]:
    groups: dict[str, list[tuple[int, Choice]]] = {}
    for i, layer in enumerate(plan.layers.values()):
        groups.setdefault(label(layer.plan), []).append((i, layer))
    return dict(sorted(groups.items()))

"""Does it hold: the criterion of every task against the rows, as a table."""

from __future__ import annotations

from .registry import PLANS
from .summary import EIGHTH, SCALES, Results, joined
from .tasks import TASKS


def _hot(results: Results, task: str) -> list[str]:
    present = results.methods(task)
    return [m.name for m in PLANS if m.name in present]


def claims(results: Results) -> list[list[str]]:
    """The criterion, a line per task and HOT plan: difference, bytes, seeds, and whether both bounds hold."""
    lines = []
    for task in results.by:
        for name in _hot(results, task):
            good, bytes_ratio = results.within(task, name), results.ratio(task, name, "kept_linear_bytes")
            if good is None or bytes_ratio is None:
                continue
            small = bytes_ratio <= EIGHTH * SCALES
            size = f"{bytes_ratio:.4f}" + (
                " (an eighth, and scales)" if EIGHTH < bytes_ratio <= EIGHTH * SCALES else ""
            )
            seeds = len(results.above(task, name, "held_out_loss").values)
            verdict = (
                "yes"
                if good and small
                else "no: "
                + joined(
                    [
                        *([] if good else ["loss" if TASKS[task].criterion == "held_out_loss" else "accuracy"]),
                        *([] if small else ["bytes"]),
                    ]
                )
            )
            lines.append(
                [TASKS[task].what, f"`{name}`", results.difference_text(task, name), size, str(seeds), verdict]
            )
    return lines

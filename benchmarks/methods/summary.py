"""The rows as the pages need them: finished runs by task, method and seed, and how far they are from exact ones."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from .plan import Run
from .registry import METHODS
from .rows import key
from .tasks import TASKS

Row = dict[str, str]
LOSS_BOUND = 0.005  # held-out loss above exact
ACCURACY_BOUND = 0.005  # held-out accuracy below exact: half a percent
EIGHTH = 1 / 8  # of the float32 bytes of linear inputs
SCALES = 1.05  # of an eighth: what a float32 scale per token adds down to 160 features


@dataclass(frozen=True)
class Spread:
    """Values over seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.mean(self.values)

    def text(self, form: str) -> str:
        """The mean, and the smallest and largest where there are several: ``+0.010 (+0.004 to +0.020)``."""
        mean = format(self.mean, form)
        if len(self.values) == 1:
            return mean
        return f"{mean} ({min(self.values):{form}} to {max(self.values):{form}})"


class Results:
    """Rows of full length with the present configuration of their method; others (shorter runs, settings that have
    changed since) are left out."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.by: dict[str, dict[str, dict[int, Row]]] = {task: {} for task in TASKS}
        for row in rows:
            if row["task"] not in TASKS or row["method"] not in METHODS:
                continue
            expected = key(Run(row["task"], row["method"], int(row["seed"])), None)
            if all(row[name] == str(value) for name, value in expected.items()):
                self.by[row["task"]].setdefault(row["method"], {})[int(row["seed"])] = row
        self.by = {task: methods for task, methods in self.by.items() if methods}

    def methods(self, task: str) -> list[str]:
        """Those with a finished run, in the order of the registry."""
        return [name for name in METHODS if name in self.by.get(task, {})]

    def values(self, task: str, method: str, column: str) -> Spread | None:
        found = [float(r[column]) for _, r in sorted(self.by.get(task, {}).get(method, {}).items()) if r[column] != ""]
        return Spread(tuple(found)) if found else None

    def above(self, task: str, method: str, column: str, other: str = "exact") -> Spread | None:
        """Differences from ``other``'s run of the same seed, over the seeds that both have."""
        mine, exact = (self.by.get(task, {}).get(name, {}) for name in (method, other))
        pairs = [(mine[s][column], exact[s][column]) for s in sorted(mine.keys() & exact.keys())]
        found = [float(a) - float(b) for a, b in pairs if a != "" and b != ""]
        return Spread(tuple(found)) if found else None

    def ratio(self, task: str, method: str, column: str, other: str = "exact") -> float | None:
        """The mean of ``column`` over that of ``other``."""
        a, b = self.values(task, method, column), self.values(task, other, column)
        return a.mean / b.mean if a and b and b.mean else None

    def within(self, task: str, method: str) -> bool | None:
        """Whether the mean over seeds keeps to the task's bound; None where there is nothing to compare."""
        difference = self.above(task, method, TASKS[task].criterion)
        if difference is None:
            return None
        if TASKS[task].criterion == "held_out_accuracy":
            return difference.mean >= -ACCURACY_BOUND - 1e-9  # of whole examples: half a percent itself counts
        return difference.mean <= LOSS_BOUND

    def difference_text(self, task: str, method: str) -> str:
        """The criterion's difference from exact, in loss or in points of accuracy."""
        difference = self.above(task, method, TASKS[task].criterion)
        if difference is None:
            return ""
        if TASKS[task].criterion == "held_out_accuracy":
            return Spread(tuple(100 * v for v in difference.values)).text("+.2f") + " points"
        return difference.text("+.4f")


def joined(items: Sequence[str]) -> str:
    """``a, b and c``."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"

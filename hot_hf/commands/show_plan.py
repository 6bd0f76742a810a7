"""``hot-hf plan show``: a saved plan as a table, and as a picture."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..selected_plan import SelectedPlan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``hot-hf plan``."""
    parser.add_argument("action", choices=("show",), help="print the plan's table")
    parser.add_argument("plan", type=Path, help="JSON file, as SelectedPlan.save or HOTCallback wrote it")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw it too")


def run(args: argparse.Namespace) -> int:
    """Print, and draw where asked.

    Raises:
        FileNotFoundError, ValueError: for a file that is missing or no plan.
        ImportError: for --png without matplotlib.
    """
    plan = SelectedPlan.load(args.plan)
    print(plan)
    if args.png is not None:
        from .plan_plot import plot

        plot(plan, args.png)
        print(f"wrote {args.png}")
    return 0

"""``hot-hf demo``: the same fine-tuning twice from one seed, exact and with HOT, compared in one table."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..config import PRESETS, HOTConfig
from ..demo.data import require

MIB = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``hot-hf demo``."""
    parser.add_argument(
        "--task",
        choices=("vision", "text", "all"),
        default="vision",
        help="vision: a small ViT on scikit-learn's digits; text: SmolLM2-135M on Python's standard library "
        "(default: %(default)s)",
    )
    parser.add_argument("--lora", action="store_true", help="text: train LoRA adapters instead of all weights")
    parser.add_argument(
        "--preset", choices=tuple(PRESETS), default="default", help="of HOTConfig (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, help="optimizer steps, instead of the task's own number")
    parser.add_argument("--seed", type=int, default=0, help="of both runs (default: %(default)s)")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("outputs"),
        metavar="DIR",
        help="folder of the picture and the numbers (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Compare on the chosen tasks.

    Raises:
        ValueError: for arguments that do not fit together.
        ImportError: for a missing optional package, naming what to install.
    """
    if args.lora and args.task == "vision":
        raise ValueError("--lora trains adapters of a language model: add --task text.")
    if args.steps is not None and args.steps < 1:
        raise ValueError(f"--steps {args.steps}: write a number of at least 1.")
    require("matplotlib", "pip install matplotlib")
    args.output.mkdir(parents=True, exist_ok=True)
    for name in ("vision", "text") if args.task == "all" else (args.task,):
        compare(name, args)
    return 0


def compare(name: str, args: argparse.Namespace) -> None:
    """Both runs of one task, their table on standard output, ``demo_<task>.png`` and ``demo_<task>.json``."""
    from ..demo import plot, tasks, train

    task = tasks.vision() if name == "vision" else tasks.text(args.lora, args.steps)
    config = HOTConfig.from_preset(args.preset, seed=args.seed)
    print(f"\n{task.what}\n")
    report = train.coverage(task, config)
    print(f"{report}\n")
    runs = [
        train.train(task, each, label, report.patched, args.seed, args.steps)
        for label, each in (("exact", None), (f"HOT {args.preset}", config))
    ]
    print(f"\n{table(runs)}\n")
    stem = args.output / f"demo_{task.name.replace('-', '_')}"
    plot.plot(runs, f"{task.what}\n{runs[0].steps} steps, seed {args.seed}", stem.with_suffix(".png"))
    numbers = {"task": task.name, "what": task.what, "preset": args.preset, "runs": [r.to_dict() for r in runs]}
    stem.with_suffix(".json").write_text(json.dumps(numbers, indent=1) + "\n")
    print(f"written: {stem}.png, {stem}.json")


def table(runs: list) -> str:
    """The comparison as text: a line per run, then each against the first."""
    first = runs[0]
    accuracy = first.held_out_accuracy is not None
    lines = [
        (
            "run",
            "held-out loss",
            *(("accuracy",) if accuracy else ()),
            "kept for backward",
            "of that, linears' inputs",
            "s/step (median)",
            "first step",
        )
    ]
    for r in runs:
        lines.append(
            (
                r.label,
                f"{r.held_out_loss:.4f}" + ("" if r is first else f" ({r.held_out_loss - first.held_out_loss:+.4f})"),
                *((f"{r.held_out_accuracy:.2%}",) if accuracy else ()),
                _size(r.kept_bytes, first.kept_bytes),
                _size(r.kept_linear_bytes, first.kept_linear_bytes),
                f"{r.seconds_per_step:.3f}",
                f"{r.seconds_first_step:.3f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = []
    for line in lines:
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        text.append("  ".join((line[0].ljust(widths[0]), *cells[1:])))
    text.insert(1, "-" * len(text[0]))
    return "\n".join(text)


def _size(nbytes: int, of: int) -> str:
    return f"{nbytes / MIB:.1f} MiB" + (f" ({nbytes / of:.3f}x)" if of and nbytes != of else "")

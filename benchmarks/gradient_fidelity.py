#!/usr/bin/env python
"""How faithful HOT's gradients are, and what that does to training: spec.md, section 8 on real data.

    python benchmarks/gradient_fidelity.py            # everything that is not in the CSV files yet, then the report
    python benchmarks/gradient_fidelity.py --limit 1  # the next missing row or run only

Text is SmolLM2-135M on the sources of Python's standard library, digits a small ViT on scikit-learn's digits: the two
tasks of ``hot-hf demo``. Writes fidelity_gradients.csv, fidelity_training.csv, fidelity.md and fidelity.png. To compute
something anew, delete its lines from the CSV. Needs the packages of the ``demo`` extra.
"""

from __future__ import annotations

import argparse
import sys
from functools import cache
from pathlib import Path

import torch
from fidelity import runs, single
from fidelity.capture import capture
from fidelity.report import write_report
from fidelity.store import Store, key_of, settings_of
from torch import nn
from tqdm import tqdm
from transformers import default_data_collator

from hot_hf.demo import tasks
from hot_hf.demo.train import coverage, fit, train

TEXT_LAYERS = (0, 7, 15, 22, 29)  # 35 linears, from the first to the last of 30 blocks
TEXT_ROWS = 8  # of 256 tokens: 2,048
IMAGES = 400  # of 5 tokens: 2,000

GRADIENT_KEY = ("data", "gradient", "label")
GRADIENT_VALUES = ("bits", "layers", "tokens", "error", "largest_error", "cosine", "worst_cosine", "torch")
TRAINING_KEY = ("data", "configuration", "seed", "steps")
TRAINING_VALUES = ("label", *runs.RESULTS, "torch")


@cache
def task_of(data: str, steps: int | None) -> tasks.Task:
    return tasks.text(steps=steps) if data == "text" else tasks.vision()


def gradient_layers(data: str, steps: int | None):
    """The captured layers of ``data`` and their exact gradients: ({name: (x, g, W)}, tokens)."""
    task = task_of(data, steps)
    if data == "text":  # pre-trained
        model, examples = task.make_model(0), [task.held_out[i] for i in range(TEXT_ROWS)]
        prefixes = tuple(f"model.layers.{i}." for i in TEXT_LAYERS)
    else:  # on held-out images, where a trained classifier still has something to learn
        model, _ = fit(task, None, "exact, for its gradients", [], steps=steps)
        examples, prefixes = task.held_out[:IMAGES], ("vit.",)
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n.startswith(prefixes)]
    return capture(model, default_data_collator(examples), names)


def single_gradients(data: str, steps: int | None, store: Store, limit: int) -> int:
    """Compute at most ``limit`` missing rows; returns how many."""
    missing = [r for r in single.ROWS if store.find(data=data, gradient=r.gradient, label=r.label) is None][:limit]
    if not missing:
        return 0
    layers = gradient_layers(data, steps)
    tokens = next(iter(layers.values()))[0].shape[0]
    truth = {
        gradient: {name: single.exact(gradient, *tensors) for name, tensors in layers.items()}
        for gradient in {row.gradient for row in missing}
    }
    for row in tqdm(missing, desc=f"{data}: single gradients"):
        store.add(
            data=data,
            gradient=row.gradient,
            label=row.label,
            bits="" if row.bits is None else row.bits,
            layers=len(layers),
            tokens=tokens,
            torch=torch.__version__,
            **single.errors(row, layers, truth[row.gradient]),
        )
    return len(missing)


def training_runs(data: str, steps: int | None, seeds: int, store: Store, limit: int) -> int:
    """Train at most ``limit`` missing configurations; returns how many."""
    done = 0
    for candidate, seed in tqdm(runs.plan(data, seeds), desc=f"{data}: training runs"):
        configuration = settings_of(candidate.config)
        task_steps = steps or (tasks.TEXT_STEPS if data == "text" else tasks.VISION_STEPS)
        key = {"data": data, "configuration": key_of(configuration), "seed": seed, "steps": task_steps}
        if done >= limit or store.find(**key) is not None:
            continue
        task = task_of(data, steps)
        linears = coverage(task, candidate.config or runs.PRESETS[0].config).patched
        run = train(task, candidate.config, f"{candidate.label}, seed {seed}", linears, seed, task_steps)
        store.add(**key, label=candidate.label, **runs.results_of(run), torch=torch.__version__)
        done += 1
    return done


def main(argv: list[str] | None = None) -> int:
    """Fill the CSV files and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", choices=("text", "digits"), default=["text", "digits"])
    parser.add_argument("--parts", nargs="+", choices=("gradients", "training"), default=["gradients", "training"])
    parser.add_argument("--steps", type=int, help="of every training run (default: 60 on text, 300 on digits)")
    parser.add_argument("--seeds", type=int, default=3, help="of the presets on digits (default: %(default)s)")
    parser.add_argument("--limit", type=int, default=sys.maxsize, help="stop after this many new rows or runs")
    root = Path(__file__).resolve().parent.parent
    parser.add_argument("--output", type=Path, default=root / "docs" / "results", metavar="DIR")
    args = parser.parse_args(argv)
    gradients = Store(args.output / "fidelity_gradients.csv", GRADIENT_KEY, GRADIENT_VALUES)
    training = Store(args.output / "fidelity_training.csv", TRAINING_KEY, TRAINING_VALUES)
    for row in training.rows:
        row["configuration"] = runs.with_defaults(row["configuration"])
    left = args.limit
    for data in args.data:
        if "gradients" in args.parts:
            left -= single_gradients(data, args.steps, gradients, left)
        if "training" in args.parts:
            left -= training_runs(data, args.steps, args.seeds, training, left)
    write_report(gradients.rows, training.rows, args.output)
    print(f"{args.limit - left} new; report: {args.output / 'fidelity.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

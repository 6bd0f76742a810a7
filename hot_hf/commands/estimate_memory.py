"""``hot-hf estimate``: training memory of a configuration under several methods, as a table and a stacked bar chart."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from ..memory.prediction import METHODS, OPTIMIZERS, TASKS, Estimate, Estimator, largest_batch

DEFAULT_METHODS = (
    "exact",
    "checkpointing",
    "hot",
    "hot+block",
    "hot+checkpoint",
    "lora",
    "lora+checkpointing",
    "lora+hot",
    "lora+hot+block",
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GB = 2**30
COLORS = {  # in the order in which they are stacked
    "parameters": "#4c566a",
    "gradients": "#81a1c1",
    "optimizer": "#b7c4d6",
    "activations": "#d08770",
    "recompute": "#ebcb8b",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a local folder or config.json, or a name on the Hugging Face hub")
    parser.add_argument("--batch", type=int, default=8, help="sequences or images per step (default: 8)")
    parser.add_argument("--length", type=int, help="tokens per sequence (default: 512, or fewer if the model ends)")
    parser.add_argument(
        "--methods",
        nargs="+",
        default=list(DEFAULT_METHODS),
        metavar="METHOD",
        help=f"'+'-joined lists of {', '.join(METHODS)} (default: {' '.join(DEFAULT_METHODS)})",
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--lora-rank", type=int, default=8, help="rank of the adapters of methods with lora")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights (default: float32)")
    mixed = parser.add_mutually_exclusive_group()
    for flag, dtype in (("--bf16", "bfloat16"), ("--fp16", "float16")):
        help = f"under autocast to {dtype}, as TrainingArguments({flag[2:]}=True)"
        mixed.add_argument(flag, dest="autocast", action="store_const", const=dtype, help=help)
    parser.add_argument("--task", choices=TASKS, help="where the configuration names no architecture")
    parser.add_argument(
        "--device", help="whose attention and dropout kernels are assumed: cpu, cuda, xpu ... (default: here)"
    )
    parser.add_argument("--memory-gb", type=float, help="also find the largest batch that fits in so many GiB")
    parser.add_argument("--plot", type=Path, default=Path("estimate.png"), help="the chart (default: estimate.png)")
    parser.add_argument("--no-plot", action="store_true")


def run(args: argparse.Namespace) -> int:
    estimates, largest = [], []
    for method in args.methods:
        estimator = Estimator(
            args.model,
            length=args.length,
            method=method,
            optimizer=args.optimizer,
            lora=args.lora_rank,
            dtype=DTYPES[args.dtype],
            autocast=DTYPES.get(args.autocast),
            task=args.task,
            device=args.device,
        )
        estimates.append(estimator.at(args.batch))
        largest.append(largest_batch(estimator, int(args.memory_gb * GB)) if args.memory_gb is not None else None)
    length = estimates[0].length
    size = f"batch {args.batch}" + (f" x {length} tokens" if length else " images")
    title = f"{args.model}: {size}, {args.dtype} weights, " + (
        f"{args.autocast} autocast, {args.optimizer}" if args.autocast else args.optimizer
    )
    print(title)
    print(table(estimates, largest, args.memory_gb))
    if not args.no_plot:
        draw(estimates, title, args.plot, args.memory_gb)
        print(f"chart: {args.plot}")
    return 0


def table(estimates: list[Estimate], largest: list[int | None], memory_gb: float | None) -> str:
    """One row per method, in GiB; the last column only when a memory size was given."""
    head = ["method", *Estimate.PARTS, "total", "activations of exact"]
    exact = next((e.activations for e in estimates if e.method == "exact"), None)
    if memory_gb is not None:
        head.append(f"largest batch in {memory_gb:g} GB")
    rows = [head]
    for e, batch in zip(estimates, largest, strict=True):
        row = [e.method, *(f"{getattr(e, part) / GB:.3f}" for part in Estimate.PARTS), f"{e.total / GB:.3f}"]
        row.append(f"{(e.activations + e.recompute) / exact:.0%}" if exact else "")
        rows.append(row + ([str(batch)] if memory_gb is not None else []))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells))
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def draw(estimates: list[Estimate], title: str, path: Path, memory_gb: float | None) -> None:
    """A stacked bar per method, written to ``path``.

    Raises:
        ImportError: without matplotlib, saying what to do.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("the chart needs matplotlib: `pip install matplotlib`, or give --no-plot.") from None

    figure = Figure(figsize=(9, 0.45 * len(estimates) + 1.6), layout="constrained")
    axes = figure.subplots()
    names = [e.method for e in estimates]
    left = [0.0] * len(estimates)
    for part, color in COLORS.items():
        values = [getattr(e, part) / GB for e in estimates]
        axes.barh(names, values, left=left, label=part, color=color)
        left = [a + b for a, b in zip(left, values, strict=True)]
    for y, total in enumerate(left):
        axes.text(total, y, f" {total:.2f}", va="center", fontsize=8)
    if memory_gb is not None:
        axes.axvline(memory_gb, color="#bf616a", linestyle="--", linewidth=1)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("GiB")
    axes.set_title(title, fontsize=10)
    axes.legend(ncols=len(COLORS), fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.15), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)

"""``hot-hf fit``: for each block of a model the mode with which a training step fits, from a configuration alone."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..config import HOTConfig
from ..dry_run import OPTIMIZERS, device_type
from ..fit import Fitted, Fitter, forget_fit, largest_that_fits
from ..memory.prediction import TASKS, Method, build, default_length, example_batch, load_config
from .estimate_memory import DTYPES, GB

BATCHES, LENGTHS = 4096, 1 << 20  # no larger ones are tried


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``hot-hf fit``."""
    parser.add_argument("model", help="a local folder or config.json, or a name on the Hugging Face hub")
    parser.add_argument("--memory-gb", type=float, required=True, help="what a step may take, in GiB, weights included")
    parser.add_argument("--batch", type=int, default=8, help="sequences or images per step (default: 8)")
    parser.add_argument("--length", type=int, help="tokens per sequence (default: 512, or fewer if the model ends)")
    parser.add_argument("--lora-rank", type=int, help="train adapters of this rank on all linear layers")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights (default: float32)")
    mixed = parser.add_mutually_exclusive_group()
    for flag, dtype in (("--bf16", "bfloat16"), ("--fp16", "float16")):
        help = f"under autocast to {dtype}, as TrainingArguments({flag[2:]}=True)"
        mixed.add_argument(flag, dest="autocast", action="store_const", const=dtype, help=help)
    parser.add_argument("--accumulating", action="store_true", help="gradients of several batches are added up")
    parser.add_argument("--task", choices=TASKS, help="where the configuration names no architecture")
    parser.add_argument(
        "--device", help="whose attention and dropout kernels are assumed: cpu, cuda, xpu ... (default: here)"
    )
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write the plan there, as hot_config.json")


def run(args: argparse.Namespace) -> int:
    """Print the plan and what else would fit.

    Raises:
        ValueError: where not even one row fits, with the least that would do; for a model that takes neither tokens nor
            pixels.
    """
    if args.memory_gb <= 0 or args.batch < 1:
        raise ValueError(f"--memory-gb {args.memory_gb} and --batch {args.batch} must be above 0.")
    config = load_config(args.model)
    method = Method("lora+hot" if args.lora_rank else "hot")
    method.config = HOTConfig(memory=int(args.memory_gb * GB))
    rank = args.lora_rank or 8
    model = build(config, method, task=args.task, dtype=DTYPES[args.dtype], lora_rank=rank)
    forget_fit(model)  # not at run: here
    length = args.length or default_length(config)
    fitter = Fitter(
        model,
        (),
        example_batch(model, args.batch, length),
        device=device_type(args.device),
        dtype=DTYPES[args.dtype],
        optimizer=args.optimizer,
        autocast=DTYPES.get(args.autocast),
        accumulating=args.accumulating,
        progress=True,
    )
    memory = int(args.memory_gb * GB)
    found = fitter.within(memory)
    size = f"batch {args.batch}" + (f" x {length} tokens" if length else " images")
    print(f"{args.model}: {size}, {args.dtype} weights, {args.optimizer}, {args.memory_gb:g} GiB")

    def total(batch: int, length: int | None) -> int:
        return fitter.states + fitter.peak_at((), example_batch(model, batch, length))

    largest = largest_that_fits(lambda batch: total(batch, length), memory, args.batch, BATCHES)
    if found is None:
        remedy = f"A batch of {largest} fits." if largest else "Not even a batch of 1 does: try --lora-rank."
        raise ValueError(
            f"a step of {size} takes {fitter.at(0)} at least; {args.memory_gb:g} GiB are too little. {remedy}"
        )
    print(table(found))
    print(f"predicted: {found}")
    print(f"time of the blocks, of exact training: {found.time:.2f} (by docs/memory.md's table, not measured here)")
    print(f"with every block checkpointed, the largest batch that fits: {largest}")
    if length:
        most = largest_that_fits(lambda n: total(args.batch, n), memory, length, LENGTHS)
        print(f"and the longest row in a batch of {args.batch}: {most} tokens")
    if args.save is not None:
        print(f"wrote {HOTConfig(compress=dict(found.modes)).save_pretrained(args.save)}")
    return 0


def table(found: Fitted) -> str:
    """Runs of blocks that have the same mode."""
    names = list(found.modes)
    rows, start = [], 0
    for i in range(1, len(names) + 1):
        if i == len(names) or found.modes[names[i]] != found.modes[names[start]]:
            first, last = names[start], names[i - 1]
            rows.append((first if first == last else f"{first} to {last}", str(i - start), found.modes[first]))
            start = i
    head = ("blocks", "count", "compress")
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(3)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])

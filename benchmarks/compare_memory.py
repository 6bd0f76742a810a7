#!/usr/bin/env python
"""Bytes kept, time and loss of training methods side by side, each in a process of its own.

    python benchmarks/compare_memory.py                      # every row that docs/results/memory.csv does not hold yet
    python benchmarks/compare_memory.py --rows vit-b/exact   # one row
    python benchmarks/compare_memory.py --time               # seconds of all methods, in interleaved rounds
    python benchmarks/compare_memory.py --page               # only docs/results/memory.md and its plots, from the rows

Kept: what autograd saved for the backward (hot_hf.memory.measure), each storage once; "without loss" leaves out what
the model's own code keeps for logits and loss. Resident: the peak of the process in its first step minus what it held
when model and optimizer stood. Text: SmolLM2-135M on the standard library's sources, seed 0, loss on held-out files.
"""

from __future__ import annotations

import argparse
import csv
import os
import resource
import statistics
import subprocess
import sys
import warnings
from pathlib import Path

import torch
from memory import page
from memory.timing import time_workload
from memory.workloads import WORKLOADS, Wrapped, fused_loss, loss_of, prepare
from tqdm import tqdm

from hot_hf import fix_selection
from hot_hf.memory import measure

FIELDS = ("workload", "method", "steps", "kept", "kept_without_loss", "resident", "loss")
TIMED_ROUNDS = 5


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run_row(workload: str, method: str, steps: int | None) -> dict:
    """Train ``method`` on ``workload`` and measure; fewer steps than the workload's own give no loss."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # so that a loss does not depend on how many cores a machine has
    spec = WORKLOADS[workload]
    torch.manual_seed(0)
    model, batches, held_out = spec.make(steps or spec.steps)
    model = prepare(model, method)
    loss = loss_of(method)
    trainable = [p for p in model.parameters() if p.requires_grad]
    lr = 1e-3 if "lora" in method else 3e-5
    optimizer = torch.optim.AdamW(trainable, lr)
    before, peak = resident(), 0
    for batch in batches:
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        if not peak:  # of the first step: measuring afterwards holds more
            fix_selection(model)  # so lqs chooses after one batch, as when steps are timed
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    kept = measure(Wrapped(model, loss), {"batch": batches[0]})
    # torch's chunked loss hides what it keeps from saved-tensor hooks: the gradients of its input and its weight.
    hidden = 0
    if loss is fused_loss:
        weight = model.lm_head.weight
        hidden = weight.nbytes + batches[0]["labels"].numel() * weight.shape[1] * weight.element_size()
    own = {"", "model", "model.base_model.model"}  # the wrapper's and the model's own code: logits and loss
    final = ""
    if held_out and len(batches) >= spec.steps:
        model.eval()
        with torch.no_grad():
            final = f"{statistics.fmean(float(model(**b).loss) for b in held_out):.4f}"
    return {
        "workload": workload,
        "method": method,
        "steps": len(batches),
        "kept": kept.total_bytes + hidden,
        "kept_without_loss": kept.outside(*own),
        "resident": peak,
        "loss": final,
    }


def add(row: dict) -> None:
    done = [r for r in page.rows() if (r["workload"], r["method"]) != (row["workload"], row["method"])] + [row]
    order = [(w, m) for w, spec in WORKLOADS.items() for m in spec.methods]
    done.sort(key=lambda r: order.index((r["workload"], r["method"])))
    with open(page.TABLE, "w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(done)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", nargs="+", metavar="WORKLOAD/METHOD", help="only these, measured anew, in this process"
    )
    parser.add_argument("--steps", type=int, help="with --rows: fewer steps, for bytes alone")
    parser.add_argument("--time", action="store_true", help="measure seconds: on a machine that does nothing else")
    parser.add_argument("--rounds", type=int, default=TIMED_ROUNDS, help="with --time")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--page", action="store_true", help="only write the page")
    args = parser.parse_args()
    if args.rows:
        for row in args.rows:
            add(run_row(*row.split("/", 1), args.steps))
            print(row, "done", flush=True)
        return
    if args.time:
        for name in tqdm(args.workloads, "workloads"):
            time_workload(name, args.rounds)
    elif not args.page:
        have = {(r["workload"], r["method"]) for r in page.rows() if int(r["steps"]) >= WORKLOADS[r["workload"]].steps}
        for name in args.workloads:
            for method in WORKLOADS[name].methods:
                if (name, method) not in have:
                    subprocess.run([sys.executable, __file__, "--rows", f"{name}/{method}"], check=True)
    page.write()


if __name__ == "__main__":
    main()

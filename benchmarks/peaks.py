#!/usr/bin/env python
"""The peak of a whole training step, measured and predicted, and the time of a step, by method.

    python benchmarks/peaks.py                             # every row that docs/results/peaks.csv does not hold yet
    python benchmarks/peaks.py --rows smollm2/hot+block    # one row, measured anew, in this process
    python benchmarks/peaks.py --time                      # seconds per step, in interleaved rounds
    python benchmarks/peaks.py --fit                       # plans for budgets: predicted, measured, timed
    python benchmarks/peaks.py --page                      # only docs/results/peaks.md, from the rows

Peak: the growth of the process's resident memory in its second step, over weights and optimizer state: gradients,
activations and temporary tensors. Each row in a process of its own, with MALLOC_MMAP_THRESHOLD_=65536, so that glibc
returns what is freed. Predicted: the bytes of live tensors in a dry run of the same step (hot_hf.dry_run).
"""

from __future__ import annotations

import argparse
import csv
import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from bench_page import RESULTS, append, interleaved, latest, machine, summary, table, timed, where
from memory.workloads import adapters
from torch import nn
from tqdm import tqdm

from hot_hf import HOTConfig, apply_hot
from hot_hf.dry_run import DryRun, batch_without_data, without_data
from hot_hf.memory.prediction import switch_on_checkpointing

TABLE, SECONDS, FITS = (RESULTS / name for name in ("peaks.csv", "peaks_seconds.csv", "peaks_fit.csv"))
FIELDS = ("workload", "method", "gradients", "peak", "predicted")
MIB = 2**20
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536"}
EXACT = {"grad_input_bits": None, "activation_format": "none", "compress": "inputs"}


def smollm2(batch: int, length: int):
    from hot_hf.demo.models import smollm2

    ids = torch.randint(1000, (batch, length))
    return smollm2()[0], {"input_ids": ids, "labels": ids}


def vit_b(batch: int):
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(ViTConfig(num_labels=1000))
    return model, {"pixel_values": torch.randn(batch, 3, 224, 224), "labels": torch.randint(1000, (batch,))}


def llama_8(batch: int, length: int):
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=8,
        use_cache=False,
    )  # fmt: skip
    ids = torch.randint(32000, (batch, length))
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), {"input_ids": ids, "labels": ids}


@dataclass(frozen=True)
class Workload:
    title: str
    make: Callable[[], tuple[nn.Module, dict]]
    lora: bool = False


WORKLOADS = {
    "smollm2": Workload("SmolLM2-135M, 4 x 512 tokens, float32, all weights", lambda: smollm2(4, 512)),
    "smollm2-lora": Workload("SmolLM2-135M, 4 x 512 tokens, float32, LoRA (r = 8)", lambda: smollm2(4, 512), True),
    "vit-b": Workload("ViT-B/16, 24 images of 224 px, float32", lambda: vit_b(24)),
    "llama-8": Workload("Llama shape (8 layers, 1,024 wide), 2 x 1,024 tokens, bfloat16", lambda: llama_8(2, 1024)),
}
METHODS: dict[str, HOTConfig | None] = {
    "exact": None,
    "exact, loss in chunks": HOTConfig(**EXACT),
    "checkpointing": None,
    "checkpointing, loss in chunks": HOTConfig(**EXACT),
    "inputs": HOTConfig(compress="inputs"),
    "block": HOTConfig(compress="block"),
    "checkpoint": HOTConfig(compress="checkpoint"),
}


def prepare(workload: str, method: str, config: HOTConfig | None = None) -> tuple[nn.Module, dict]:
    """The workload's model, ready to train, and its batch."""
    torch.manual_seed(0)
    model, batch = WORKLOADS[workload].make()
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    if method.startswith("checkpointing"):
        switch_on_checkpointing(model)
    if WORKLOADS[workload].lora:
        model = adapters(model)
    if (config := config or METHODS[method]) is not None:
        apply_hot(model, config)
    return model.train(), batch


def status(field: str) -> int:
    """A line of /proc/self/status, in bytes."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


def measured_peak(model: nn.Module, batch: dict) -> int:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-6, fused=True)

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = status("VmRSS")
    step()
    return status("VmHWM") - before


def run_row(workload: str, method: str, config: HOTConfig | None = None) -> dict:
    warnings.simplefilter("ignore")
    model, batch = prepare(workload, method, config)
    predicted = DryRun(without_data(model), "cpu")(**batch_without_data(batch)).peak
    gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    peak = measured_peak(model, batch)
    return dict(zip(FIELDS, (workload, method, gradients, peak, predicted), strict=True))


def store(path: Path, row: dict) -> None:
    kept = [
        r
        for r in latest(path, "workload", "method")
        if (r["workload"], r["method"]) != (row["workload"], row["method"])
    ] + [row]
    order = list(WORKLOADS)
    kept.sort(key=lambda r: order.index(r["workload"]))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept)


def own_process(*arguments: str) -> None:
    subprocess.run([sys.executable, __file__, *arguments], env={**os.environ, **ALLOCATOR}, check=True)


def time_workload(workload: str, rounds: int) -> None:
    """Append a row per method: steps on one set of parameters, in interleaved rounds."""
    import copy

    warnings.simplefilter("ignore")
    model, batch = prepare(workload, "exact")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-6, fused=True)
    samplers = {}
    for method, config in METHODS.items():
        instance = copy.deepcopy(model, {id(p): p for p in model.parameters()})
        if method.startswith("checkpointing"):
            switch_on_checkpointing(instance)
        if config is not None:
            apply_hot(instance, config)

        def step(instance=instance) -> None:
            instance(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        samplers[method] = lambda step=step: timed(step)
    taken = interleaved(samplers, rounds)
    common = {**machine(), "rounds": str(rounds), "workload": workload}
    base = {"base": taken["exact"]}
    append(SECONDS, [common | {"method": m} | summary(seconds, base) for m, seconds in taken.items()])


SHARES = (0.1, 0.35, 0.7)  # of the way from the least that would do to the most that is of use


def run_fit(workload: str, share: float) -> dict:
    """A budget, the plan for it, its predicted and its measured peak."""
    from hot_hf.fit import Fitter, forget_fit

    warnings.simplefilter("ignore")
    model, batch = prepare(workload, "memory", HOTConfig(memory=2**50))
    forget_fit(model)
    dtype = next(model.parameters()).dtype
    fitter = Fitter(without_data(model), (), batch_without_data(batch), device="cpu", dtype=dtype)
    least, most = fitter.at(0), fitter.at(len(fitter.upgrades))
    budget = int(least.total + share * (most.total - least.total))
    plan = fitter.within(budget)
    apply_hot(model, HOTConfig(compress=dict(plan.modes)))
    counts = {mode: list(plan.modes.values()).count(mode) for mode in ("inputs", "block", "checkpoint", "exact")}
    peak = measured_peak(model, batch)
    return {
        "workload": workload,
        "method": f"{share:.0%}",
        "budget": budget - plan.states,
        "plan": ", ".join(f"{n} {mode}" for mode, n in counts.items() if n),
        "predicted": plan.peak,
        "peak": peak,
        "time": f"{plan.time:.3f}",
    }


HEAD = """# The peak of a whole step

`python benchmarks/peaks.py`, each row in a process of its own, torch {torch}. Peak: growth of the process's resident
memory in its second step, over weights and optimizer state, with glibc told to return what is freed
(`MALLOC_MMAP_THRESHOLD_=65536`). Over states: less the gradients, which every method has. Predicted: live tensors in a
dry run (`hot_hf.dry_run`), which is what `hot-hf fit` and `HOTConfig(memory=...)` go by. *Loss in chunks* is HOT's loss
alone, on an otherwise exact model; HOT's own modes have it too. Where the peak is an embedding's dense gradient the
process shows less than live tensors: zero pages that nobody has touched are not resident.

Time: a step of forward, loss, backward and fused AdamW, median of interleaved rounds, of the exact step.
{where}.
"""


BOTH = {"peak": "peak, MiB", "predicted": "predicted", "off": "off by"}
COLUMNS = {"method": "method", **BOTH, "over": "over states, MiB", "share": "of exact", "time": "time"}
FIT_COLUMNS = {"title": "step", "budget": "budget, MiB", "plan": "blocks by mode", **BOTH}


def _both(row: dict) -> dict[str, str]:
    peak, predicted = int(row["peak"]), int(row["predicted"])
    return {
        "peak": f"{peak / MIB:,.0f}",
        "predicted": f"{predicted / MIB:,.0f}",
        "off": f"{predicted / peak - 1:+.1%}",
    }


def write_page() -> None:
    done, seconds = latest(TABLE, "workload", "method"), latest(SECONDS, "workload", "method")
    lines = [HEAD.format(torch=torch.__version__.split("+")[0], where=where(seconds) if seconds else "Not timed yet")]
    for name, spec in WORKLOADS.items():
        mine = {r["method"]: r for r in done if r["workload"] == name}
        if not mine:
            continue
        time = {r["method"]: 1 / float(r["x_base"]) for r in seconds if r["workload"] == name}
        over = {m: int(r["peak"]) - int(r["gradients"]) for m, r in mine.items()}
        rows = [
            {
                "method": f"`{m}`" if m in ("inputs", "block", "checkpoint") else m,
                **_both(r),
                "over": f"{over[m] / MIB:,.0f}",
                "share": f"{over[m] / over['exact']:.0%}",
                "time": f"{time[m]:.2f}" if m in time else "",
            }
            for m, r in mine.items()
        ]
        lines += [f"## {spec.title}", "", table(rows, COLUMNS), ""]
    if FITS.is_file():
        rows = [
            {"title": WORKLOADS[r["workload"]].title, "budget": f"{int(r['budget']) / MIB:,.0f}", "plan": r["plan"]}
            | _both(r)
            for r in latest(FITS, "workload", "method")
        ]
        text = (
            "Budgets a tenth, a third and two thirds of the way from the least that would do to the most that is of "
            "use, over weights and optimizer state."
        )
        lines += ["## Plans for a budget", "", text, "", table(rows, FIT_COLUMNS), ""]
    (RESULTS / "peaks.md").write_text("\n".join(lines).rstrip() + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", metavar="WORKLOAD/METHOD", help="only these, in this process")
    parser.add_argument("--fits", nargs="+", metavar="WORKLOAD/SHARE", help="plans for a budget, in this process")
    parser.add_argument("--time", action="store_true", help="measure seconds: on a machine that does nothing else")
    parser.add_argument("--fit", action="store_true", help="plans for budgets")
    parser.add_argument("--rounds", type=int, default=3, help="with --time")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--page", action="store_true", help="only write the page")
    args = parser.parse_args()
    for row in args.rows or ():
        store(TABLE, run_row(*row.split("/", 1)))
    for fit in args.fits or ():
        name, share = fit.split("/", 1)
        store(FITS, run_fit(name, float(share)))
    if args.rows or args.fits:
        return
    if args.time:
        for name in tqdm(args.workloads, "workloads"):
            time_workload(name, args.rounds)
    elif args.fit:
        for name in tqdm(args.workloads, "workloads"):
            for share in SHARES:
                own_process("--fits", f"{name}/{share}")
    elif not args.page:
        have = {(r["workload"], r["method"]) for r in latest(TABLE, "workload", "method")}
        missing = [(w, m) for w in args.workloads for m in METHODS if (w, m) not in have]
        for name, method in tqdm(missing, "rows"):
            own_process("--rows", f"{name}/{method}")
    write_page()


if __name__ == "__main__":
    main()

#!/usr/bin/env python
"""Bytes kept, time and loss of training methods side by side, each in a process of its own.

    python scripts/compare_memory.py                      # every row that docs/results/memory.csv does not hold yet
    python scripts/compare_memory.py --rows vit-b/exact   # one row
    python scripts/compare_memory.py --time               # the seconds of all rows anew, close together, in two rounds
    python scripts/compare_memory.py --page               # only docs/results/memory.md and its plots, from the rows

Kept: what autograd saved for the backward (hot_hf.memory.measure), each storage once; "without loss" leaves out what
the model's own code keeps for logits and loss. Resident: the peak of the process in its first step minus what it held
when model and optimizer stood. Text: SmolLM2-135M on the standard library's sources, seed 0, loss on held-out files.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from hot_hf import HOTConfig, apply_hot, fix_selection
from hot_hf.memory import measure

RESULTS = Path(__file__).parent.parent / "docs" / "results"
TABLE = RESULTS / "memory.csv"
FIELDS = ("workload", "method", "steps", "kept", "kept_without_loss", "resident", "seconds", "loss")
MIB = 2**20
TEXT_STEPS = 40
STEPS_OF = {"vit-b": "ViT-B/16, batch 8", "smollm2": "SmolLM2-135M, 4x256 tokens"}  # models of bench_step.py
TIMED_STEPS, TIMED_ROUNDS = 4, 2  # the first of each round is left out

FULL = (
    "exact",
    "checkpointing",
    "hot",
    "hot unshared",
    "fast",
    "paper",
    "smallest",
    "hot+block",
    "smallest+block",
    "hot+checkpointing",
)
LORA = (
    "lora",
    "lora+checkpointing",
    "velora",
    "lora+hot",
    "lora+hot+block",
    "lora+smallest+block",
    "velora+hot+block",
)


@dataclass(frozen=True)
class Workload:
    title: str
    methods: tuple[str, ...]
    steps: int
    make: str  # name of the function that gives model, batches and held-out batches


WORKLOADS = {
    "vit-b": Workload("ViT-B/16, 224 px, batch 8, float32", FULL, 3, "vit_b"),
    "llama-8": Workload(
        "Llama shape (8 layers, 1,024 wide, 32,000 tokens), 1 x 1,024 tokens, bfloat16",
        (*FULL, "exact, fused loss", "hot+block, fused loss"),
        3,
        "llama_8",
    ),
    "smollm2": Workload("SmolLM2-135M, 2 x 256 tokens, float32, all weights", FULL, TEXT_STEPS, "smollm2"),
    "smollm2-lora": Workload("SmolLM2-135M, 2 x 256 tokens, LoRA (r = 8) on all linears", LORA, TEXT_STEPS, "smollm2"),
}


def vit_b(steps: int):
    from transformers import ViTConfig, ViTForImageClassification

    batch = {"pixel_values": torch.randn(8, 3, 224, 224), "labels": torch.randint(1000, (8,))}
    return ViTForImageClassification(ViTConfig(num_labels=1000)), [batch] * steps, []


def llama_8(steps: int):
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
        use_cache=False,
    )
    ids = torch.randint(32000, (1, 1024))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model, [{"input_ids": ids, "labels": ids}] * steps, []


def smollm2(steps: int):
    from hot_hf.demo import data, models

    model, tokenizer = models.smollm2()
    train, held_out = data.python_sources(tokenizer, 2 * steps, 16)

    def batches(rows, size):
        ids = [torch.tensor(rows[i]["input_ids"]) for i in range(len(rows))]
        ids = [torch.stack(ids[i : i + size]) for i in range(0, len(ids), size)]
        return [{"input_ids": t, "labels": t} for t in ids]

    return model, batches(train, 2), batches(held_out, 4)


def prepare(model, method: str):
    """``model`` under ``method``: adapters, checkpointing, HOT."""
    parts = method.removesuffix(", fused loss").replace(" unshared", "").split("+")
    lora = "lora" in parts or "velora" in parts
    if "checkpointing" in parts:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if lora:
        from peft import LoraConfig, get_peft_model

        extra = {}
        if "velora" in parts:
            from peft.tuners.lora.config import VeloraConfig

            extra["velora_config"] = VeloraConfig()
        torch.manual_seed(0)
        settings = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM", **extra)
        model = get_peft_model(model, settings)
    preset = next((p for p in parts if p in ("hot", "fast", "paper", "smallest")), None)
    if preset is not None:
        compress = "block" if "block" in parts else "inputs"
        changes = {"lora": "lora" in parts, "share": "unshared" not in method, "compress": compress}
        apply_hot(model, HOTConfig.from_preset("default" if preset == "hot" else preset, **changes))
    return model.train()


def plain_loss(model, batch):
    return model(**batch).loss


def fused_loss(model, batch):
    """Logits in pieces, never kept: torch's own chunked loss, as Liger's on a GPU (docs/memory.md)."""
    hidden = model.model(batch["input_ids"]).last_hidden_state
    return F.linear_cross_entropy(
        hidden[:, :-1].flatten(0, 1),
        model.lm_head.weight,
        batch["labels"][:, 1:].flatten(),
        options=torch.nn.LinearCrossEntropyOptions(),
    )


class Wrapped(torch.nn.Module):
    """A model that returns its loss, so that what the loss keeps has an owner."""

    def __init__(self, model, loss):
        super().__init__()
        self.model, self.compute = model, loss

    def forward(self, batch):
        return self.compute(self.model, batch)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run_row(workload: str, method: str, steps: int | None, timed: bool = False) -> dict:
    """Train ``method`` on ``workload`` and measure; fewer steps than the workload's own give no loss. ``timed``: only
    the CPU seconds of every step after the first."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # CPU seconds of one thread: what else the machine does hardly shows in them
    spec = WORKLOADS[workload]
    torch.manual_seed(0)
    model, batches, held_out = globals()[spec.make](steps or spec.steps)
    model = prepare(model, method)
    loss = fused_loss if "fused" in method else plain_loss
    trainable = [p for p in model.parameters() if p.requires_grad]
    lr = 1e-3 if "lora" in method else 3e-5
    optimizer = torch.optim.AdamW(trainable, lr)
    before, peak, seconds = resident(), 0, []
    for batch in batches:
        start = time.process_time()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - start)
        if not peak:  # of the first step: measuring afterwards holds more
            fix_selection(model)  # lqs chooses after one batch here, so that the steps timed are those that last
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    if timed:
        return {"seconds": seconds[1:]}
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
        "seconds": f"{statistics.median(seconds[1:]):.3f}",
        "loss": final,
    }


def rows() -> list[dict]:
    if not TABLE.exists():
        return []
    with open(TABLE, newline="") as file:
        return list(csv.DictReader(file))


def add(row: dict) -> None:
    done = [r for r in rows() if (r["workload"], r["method"]) != (row["workload"], row["method"])] + [row]
    order = [(w, m) for w, spec in WORKLOADS.items() for m in spec.methods]
    done.sort(key=lambda r: order.index((r["workload"], r["method"])))
    RESULTS.mkdir(parents=True, exist_ok=True)
    with open(TABLE, "w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(done)


def time_rows(workloads: list[str]) -> None:
    """Measure the seconds of all rows again: one after the other, then all once more, so that what changes on the
    machine meanwhile meets every row."""
    found: dict[tuple[str, str], list[float]] = {}
    chosen = [(r["workload"], r["method"]) for r in rows() if r["workload"] in workloads]
    for _ in tqdm(range(TIMED_ROUNDS), "rounds"):
        for name, method in tqdm(chosen, "rows", leave=False):
            command = [sys.executable, __file__, "--rows", f"{name}/{method}", "--steps", str(TIMED_STEPS), "--timed"]
            printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            found.setdefault((name, method), []).extend(json.loads(printed.splitlines()[-1])["seconds"])
    for row in rows():
        if (key := (row["workload"], row["method"])) in found:
            add(row | {"seconds": f"{statistics.median(found[key]):.3f}"})


# The page


def share(value: str, of: str) -> str:
    return f"{int(value) / int(of):.0%}"


def side_by_side(workload: str) -> str:
    """What bench_step.py's interleaved steps say of the time of checkpointing and of HOT, where it has this model."""
    path, model = RESULTS / "bench_step.csv", STEPS_OF.get(workload)
    if model is None or not path.exists():
        return ""
    with open(path, newline="") as file:
        ratios = {r["configuration"]: float(r["x_float32"]) for r in csv.DictReader(file) if r["model"] == model}
    parts = [
        f"`{ours}` {1 / ratios[theirs]:.2f}"
        for ours, theirs in (
            ("checkpointing", "checkpointing"),
            ("hot", "HOT default"),
            ("hot+checkpointing", "HOT default, checkpointing"),
        )
        if theirs in ratios
    ]
    if not parts:
        return ""
    return f"Side by side ([bench.md](bench.md), {model}), in times of an exact step: {', '.join(parts)}."


def page() -> None:
    """docs/results/memory.md and its plots from the rows measured so far."""
    done = rows()
    lines = [
        "# Memory, time and loss, side by side",
        "",
        "`python scripts/compare_memory.py`, every row in a process of its own, on "
        f"one CPU thread, torch {torch.__version__.split('+')[0]}. Kept: bytes that autograd "
        "saves for the backward, each storage once, counted by saved-tensor hooks. Without loss: less what logits and "
        "loss keep. Resident: the growth of the process's peak in its first step, with gradients, optimizer state and "
        "everything temporary. Seconds: CPU time of the median step after the first: forward, backward, optimizer. The "
        "rows were made at different times beside other work, and the same step took up to twice as long: they tell a "
        "few seconds from twenty, not one method from another (`--time` measures them anew, close together). "
        "Rows without a loss ran three steps. "
        "What the numbers mean is in [memory.md](../memory.md).",
        "",
        "![bytes kept](memory.png)",
    ]
    for name, spec in WORKLOADS.items():
        mine = [r for r in done if r["workload"] == name]
        if not mine:
            continue
        base = mine[0]
        steps = f", loss after {spec.steps} steps" if any(r["loss"] for r in mine) else ""
        lines += ["", f"## {spec.title}{steps}", ""]
        head = ["method", "kept, MiB", f"of {base['method']}", "without loss, MiB", "of it"]
        head += ["resident, MiB", "CPU s / step"]
        if steps:
            head += ["held-out loss", f"above {base['method']}"]
        lines += ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
        for r in mine:
            cells = [
                r["method"],
                f"{int(r['kept']) / MIB:,.1f}",
                share(r["kept"], base["kept"]),
                f"{int(r['kept_without_loss']) / MIB:,.1f}",
                share(r["kept_without_loss"], base["kept_without_loss"]),
                f"{int(r['resident']) / MIB:,.0f}",
                f"{float(r['seconds']):.2f}",
            ]
            if steps:
                both = r["loss"] and base["loss"]
                cells += [r["loss"], f"{float(r['loss']) - float(base['loss']):+.4f}" if both else ""]
            lines.append("| " + " | ".join(cells) + " |")
        if sentence := side_by_side(name):
            lines += ["", sentence]
    (RESULTS / "memory.md").write_text("\n".join(lines) + "\n")
    draw(done)


def draw(done: list[dict]) -> None:
    from matplotlib.figure import Figure

    present = [w for w in WORKLOADS if any(r["workload"] == w for r in done)]
    figure = Figure(figsize=(11, 3.2 * len(present)), layout="constrained")
    for axes, name in zip(figure.subplots(len(present), 2, squeeze=False), present, strict=True):
        mine = [r for r in done if r["workload"] == name]
        labels = [r["method"] for r in mine]
        inner = [int(r["kept_without_loss"]) / MIB for r in mine]
        outer = [int(r["kept"]) / MIB - i for r, i in zip(mine, inner, strict=True)]
        axes[0].barh(labels, inner, color="#5e81ac", label="blocks, embeddings, head")
        axes[0].barh(labels, outer, left=inner, color="#b7c4d6", label="logits and loss")
        axes[0].invert_yaxis()
        axes[0].set_xlabel("MiB kept for the backward")
        axes[0].set_title(WORKLOADS[name].title, fontsize=9, loc="left")
        axes[0].legend(fontsize=7, loc="lower right")
        for r, x in zip(mine, inner, strict=True):
            y = float(r["seconds"])
            axes[1].plot(x, y, "o", color="#d08770", markersize=5)
            axes[1].annotate(r["method"], (x, y), fontsize=6.5, xytext=(4, 3), textcoords="offset points")
        axes[1].set_xlabel("MiB kept without loss")
        axes[1].set_ylabel("CPU seconds per step")
        axes[1].set_xlim(left=0)
        axes[1].set_ylim(bottom=0)
        for a in axes:
            a.spines[["top", "right"]].set_visible(False)
    figure.savefig(RESULTS / "memory.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", nargs="+", metavar="WORKLOAD/METHOD", help="only these, measured anew, in this process"
    )
    parser.add_argument("--steps", type=int, help="with --rows: fewer steps, for bytes and time alone")
    parser.add_argument("--timed", action="store_true", help="with --rows: print their seconds, store nothing")
    parser.add_argument("--time", action="store_true", help="measure the seconds of the stored rows anew")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--page", action="store_true", help="only write the page")
    args = parser.parse_args()
    if args.rows and args.timed:
        for row in args.rows:
            print(json.dumps(run_row(*row.split("/", 1), args.steps, timed=True)))
        return
    if args.rows:
        for row in args.rows:
            add(run_row(*row.split("/", 1), args.steps))
            print(row, "done", flush=True)
        return
    if args.time:
        time_rows(args.workloads)
    elif not args.page:
        have = {(r["workload"], r["method"]) for r in rows() if int(r["steps"]) >= WORKLOADS[r["workload"]].steps}
        for name in args.workloads:
            for method in WORKLOADS[name].methods:
                if (name, method) not in have:
                    subprocess.run([sys.executable, __file__, "--rows", f"{name}/{method}"], check=True)
    page()


if __name__ == "__main__":
    main()

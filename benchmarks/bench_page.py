"""What the benchmarks share: interleaved timing, rows of a CSV, and the pages and plots made from them.

python benchmarks/bench_page.py            # docs/results/bench_*.csv to docs/results/bench.md and bench_growth.png
"""

from __future__ import annotations

import csv
import os
import platform
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median, quantiles

import torch
from torch import nn

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"


def processor() -> tuple[str, list[str]]:
    """Its name, and the flags that /proc/cpuinfo lists."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = dict(line.split(":", 1) for line in lines if ":" in line)
    found = {key.strip(): value.strip() for key, value in found.items()}
    return found.get("model name", platform.processor() or platform.machine()), found.get("flags", "").split()


def machine() -> dict[str, str]:
    """Columns that every row carries: what a number may be compared with."""
    name, flags = processor()
    best = next((f for f in ("amx_int8", "avx512_vnni", "avx_vnni", "avx2") if f in flags), "")
    return {
        "date": date.today().isoformat(),
        "machine": f"{name} {best}".strip(),
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def interleaved(samplers: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """``rounds`` samples (seconds) of each, taken in turn, so that what disturbs one disturbs its neighbours too."""
    for sample in samplers.values():
        sample()
    taken: dict[str, list[float]] = {name: [] for name in samplers}
    for _ in range(rounds):
        for name, sample in samplers.items():
            taken[name].append(sample())
    return taken


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def summary(samples: list[float], against: dict[str, list[float]]) -> dict[str, str]:
    """Milliseconds (median, quartiles) and for every baseline the median of the pairs' ratios: above 1 is faster."""
    low, _, high = quantiles(samples, n=4, method="inclusive")
    row = {"ms": f"{median(samples) * 1e3:.4g}", "ms_low": f"{low * 1e3:.4g}", "ms_high": f"{high * 1e3:.4g}"}
    for name, baseline in against.items():
        ratios = [b / s for b, s in zip(baseline, samples, strict=True)]
        row[f"x_{name}"] = f"{median(ratios):.3g}"
    return row


def torchao_int8() -> Callable[[nn.Module], nn.Module] | None:
    """torchao's int8 mixed-precision training of a linear layer, or None where torchao is not installed."""
    try:
        from torchao import quantize_
        from torchao.prototype.quantized_training import int8_mixed_precision_training
    except ImportError:
        return None

    def change(layer):
        holder = nn.Sequential(layer)
        quantize_(holder, int8_mixed_precision_training())
        return holder[0]

    return change


def append(path: Path, rows: list[dict[str, str]]) -> None:
    """Add rows to a CSV; columns are those of its first row ever."""
    path.parent.mkdir(parents=True, exist_ok=True)
    exists = path.exists()
    columns = list(csv.DictReader(path.open()).fieldnames) if exists else list(rows[0])
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        if not exists:
            writer.writeheader()
        writer.writerows(rows)


def latest(path: Path, *keys: str) -> list[dict[str, str]]:
    """Rows of a CSV, the last of each value of ``keys``, in the order of their first appearance."""
    if not path.exists():
        return []
    kept: dict[tuple, dict[str, str]] = {}
    for row in csv.DictReader(path.open()):
        kept[tuple(row[k] for k in keys)] = row
    return list(kept.values())


def table(rows: list[dict[str, str]], columns: dict[str, str]) -> str:
    """A Markdown table; ``columns`` maps keys of the rows to headings."""
    lines = ["| " + " | ".join(columns.values()) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(row.get(key, "") for key in columns) + " |" for row in rows]
    return "\n".join(lines)


def where(rows: list[dict[str, str]]) -> str:
    found = sorted({(r["machine"], r["torch"], r["threads"], r["date"]) for r in rows})
    loads = [float(r["load"]) for r in rows]
    machines = "; ".join(f"{m}, torch {t}, {n} threads, {d}" for m, t, n, d in found)
    return f"{machines}, load average {min(loads):.1f} to {max(loads):.1f}"


OPS = {
    "layer": "tokens, out, in",
    "configuration": "configuration",
    "what": "what",
    "ms": "ms",
    "ms_low": "lower quartile",
    "ms_high": "upper quartile",
    "x_float32": "times float32",
    "x_bfloat16": "times bfloat16",
    "int8_share": "int8 product's share",
}
STEPS = {
    "model": "model",
    "configuration": "configuration",
    "ms": "ms a step",
    "ms_low": "lower quartile",
    "ms_high": "upper quartile",
    "x_float32": "times float32",
    "forward_share": "forward",
    "backward_share": "backward",
    "int8_share": "int8 products, scaled",
    "replaced_share": "replaced by HOT",
}
NARROW = {"features": "in = out", "exact_ms": "exact ms", "ms": "HOT ms", "x_float32": "times exact"}


def percent(text: str) -> float:
    return float(text.rstrip("%")) / 100


def limit(row: dict[str, str], default: dict[str, str] | None) -> str:
    """How much faster the exact step of ``row`` can become at all; ``default``: HOT's step of the same model."""
    rest = 1 - percent(row["replaced_share"])
    text = (
        f"{row['model']}: a backward of these layers that cost nothing would make the {row['configuration']} step "
        f"{1 / rest:.2f} times as fast"
    )
    if default is not None:
        products = percent(default["int8_share"]) / float(default["x_float32"])  # of the exact step's time
        text += (
            f", one that costs the int8 products as they run and nothing for transform and quantization "
            f"{1 / (rest + products):.2f} times; HOT default comes to {default['x_float32']}"
        )
    return text + ". The rest is the forward, the head, the loss, attention and AdamW.\n"


def growth_plot(rows: list[dict[str, str]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    axes_of = {
        "tokens": "tokens, 1024 x 1024",
        "width": "in = out, 2048 tokens",
        "layers": "layers of 512, 1024 tokens",
    }
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for axis, (kind, title) in zip(axes, axes_of.items(), strict=True):
        chosen = [r for r in rows if r["along"] == kind]
        for name in dict.fromkeys(r["configuration"] for r in chosen):
            line = sorted((int(r["value"]), float(r["ms"])) for r in chosen if r["configuration"] == name)
            axis.plot(*zip(*line, strict=True), marker="o", label=name)
        axis.set(xscale="log", yscale="log", xlabel=title, ylabel="forward and backward, ms")
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(RESULTS / "bench_growth.png", dpi=110)


def write_pages() -> None:
    ops = latest(RESULTS / "bench_ops.csv", "layer", "configuration", "what")
    steps = latest(RESULTS / "bench_step.csv", "model", "configuration")
    defaults = {r["model"]: r for r in steps if r["configuration"] == "HOT default"}
    growth = latest(RESULTS / "bench_growth.csv", "along", "value", "configuration")
    narrow = latest(RESULTS / "bench_narrow.csv", "features", "configuration")
    start = latest(RESULTS / "bench_start.csv", "start")
    parts = [
        "# Speed on the CPU\n",
        "Made by `benchmarks/bench_page.py` from the CSV files beside it. Times are medians; a ratio is the median "
        "over interleaved pairs, above 1 is faster than the baseline. The share of the int8 product is the time of its "
        "bare `torch._int_mm` calls into memory that is already there, measured in the same run: what remains if "
        "everything else cost nothing. In whole steps it is that of the products as they run, with the scaling of "
        "their sums. A load average well above the number of threads says that others used the machine: its ratios "
        "are not those of an idle one.\n",
    ]
    if ops:
        torchao = any(r["configuration"].startswith("torchao") for r in ops)
        bar = [r for r in ops if r["what"] == "backward + compression"]
        rest = [r for r in ops if r["what"] != "backward + compression"]
        parts += [
            "## One linear layer: backward with the forward's compression\n",
            f"`python benchmarks/bench_ops.py layers` on {where(ops)}. Those named `bf16` have bfloat16 tensors."
            + (" *torchao int8* is its int8_mixed_precision_training: the forward is quantized too." if torchao else "")
            + "\n",
            table(bar, OPS) + "\n",
            "## One linear layer: forward, and both together\n",
            table(rest, OPS) + "\n",
        ]
    if steps:
        parts += [
            "## Whole training steps\n",
            f"`python benchmarks/bench_step.py` on {where(steps)}. Forward, loss, backward, AdamW; one model and one "
            "optimizer (fused, Trainer's default), patched and unpatched between samples. Shares are of the step; "
            "*replaced by HOT* are the products in the backward of the layers that HOT patches.\n",
            table(steps, STEPS) + "\n",
            *[limit(r, defaults.get(r["model"])) for r in steps if r.get("replaced_share")],
        ]
    if growth:
        growth_plot(growth)
        parts += [
            "## How cost grows\n",
            f"`python benchmarks/bench_ops.py growth` on {where(growth)}.\n",
            "![forward and backward against tokens, width and layers](bench_growth.png)\n",
        ]
    if made := latest(RESULTS / "bench_quantizers.csv", "quantizer"):
        columns = {
            "quantizer": "4096 x 3072, float32",
            "reference_ms": "reference, ms",
            "inductor_ms": "through inductor, ms",
            "kernels_ms": "kernels, ms",
            "inductor_first_call_s": "inductor's first call, s",
            "inductor_equal": "inductor's integers equal",
        }
        parts += [
            "## The quantizers alone\n",
            f"`python benchmarks/bench_ops.py quantizers` on {where(made)}.\n",
            table(made, columns) + "\n",
        ]
    if start:
        columns = {"start": "process", "seconds": "seconds until the kernels are loaded"}
        parts += [
            "## The first start\n",
            f"`python benchmarks/bench_ops.py start` on {where(start)}. `apply_hot` loads the kernels; the first "
            "process on a machine compiles them.\n",
            table(start, columns) + "\n",
        ]
    (RESULTS / "bench.md").write_text("\n".join(parts))
    if narrow:
        write_narrow(narrow)


def write_narrow(rows: list[dict[str, str]]) -> None:
    parts = [
        "# Narrow layers\n",
        "Backward of one float32 layer with the forward's compression, 2,048 tokens, against the exact backward: "
        "below 1 HOT costs more than it saves. `HOTConfig.min_features` leaves such layers exact.\n",
        f"`python benchmarks/bench_ops.py narrow` on {where(rows)}.\n",
    ]
    for name in dict.fromkeys(r["configuration"] for r in rows):
        parts += [f"## {name}\n", table([r for r in rows if r["configuration"] == name], NARROW) + "\n"]
    (RESULTS / "narrow.md").write_text("\n".join(parts))


if __name__ == "__main__":
    write_pages()

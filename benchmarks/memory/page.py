"""docs/results/memory.md and its plot, from memory.csv (bytes, loss) and memory_seconds.csv (interleaved steps)."""

from __future__ import annotations

from bench_page import RESULTS, latest, where

from .workloads import WORKLOADS

TABLE = RESULTS / "memory.csv"
SECONDS = RESULTS / "memory_seconds.csv"
MIB = 2**20

HEAD = """# Memory, time and loss, side by side

`python benchmarks/compare_memory.py`, every row in a process of its own, torch {torch}. Kept: bytes that autograd saves
for the backward, each storage once, counted by saved-tensor hooks. Without loss: less what logits and loss keep.
Resident: the growth of the process's peak in its first step, with gradients, optimizer state and everything temporary.
Rows without a loss ran three steps. All are from before HOT's loss ran in chunks of tokens, which spares HOT's rows the
logits ([peaks.md](peaks.md)). What the numbers mean is in [memory.md](../memory.md).

Seconds (`--time`): a step of forward, loss, backward and AdamW on the same parameters, median of interleaved rounds;
the ratio is the median of the pairs'.
{where}.

![bytes kept](memory.png)
"""


def rows() -> list[dict]:
    return latest(TABLE, "workload", "method")


def share(value: str, of: str) -> str:
    return f"{int(value) / int(of):.0%}"


def table(mine: list[dict], seconds: dict[str, dict], losses: bool) -> list[str]:
    base = mine[0]
    head = ["method", "kept, MiB", f"of {base['method']}", "without loss, MiB", "of it", "resident, MiB"]
    head += ["s / step", f"time, of {base['method']}"]
    if losses:
        head += ["held-out loss", f"above {base['method']}"]
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    for row in mine:
        time = seconds.get(row["method"])
        cells = [
            row["method"],
            f"{int(row['kept']) / MIB:,.1f}",
            share(row["kept"], base["kept"]),
            f"{int(row['kept_without_loss']) / MIB:,.1f}",
            share(row["kept_without_loss"], base["kept_without_loss"]),
            f"{int(row['resident']) / MIB:,.0f}",
            *((f"{float(time['ms']) / 1e3:.2f}", f"{1 / float(time['x_base']):.2f}") if time else ("", "")),
        ]
        if losses:
            both = row["loss"] and base["loss"]
            cells += [row["loss"], f"{float(row['loss']) - float(base['loss']):+.4f}" if both else ""]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def write() -> None:
    import torch

    done, timed = rows(), latest(SECONDS, "workload", "method")
    head = HEAD.format(torch=torch.__version__.split("+")[0], where=where(timed) if timed else "Not measured yet")
    lines = [head.rstrip()]
    for name, spec in WORKLOADS.items():
        mine = [r for r in done if r["workload"] == name]
        if not mine:
            continue
        seconds = {r["method"]: r for r in timed if r["workload"] == name}
        losses = any(r["loss"] for r in mine)
        lines += ["", f"## {spec.title}" + (f", loss after {spec.steps} steps" if losses else ""), ""]
        lines += table(mine, seconds, losses)
    (RESULTS / "memory.md").write_text("\n".join(lines) + "\n")
    draw(done, timed)


def draw(done: list[dict], timed: list[dict]) -> None:
    from matplotlib.figure import Figure

    present = [w for w in WORKLOADS if any(r["workload"] == w for r in done)]
    figure = Figure(figsize=(11, 3.2 * len(present)), layout="constrained")
    for axes, name in zip(figure.subplots(len(present), 2, squeeze=False), present, strict=True):
        mine = [r for r in done if r["workload"] == name]
        seconds = {r["method"]: float(r["ms"]) / 1e3 for r in timed if r["workload"] == name}
        labels = [r["method"] for r in mine]
        inner = [int(r["kept_without_loss"]) / MIB for r in mine]
        outer = [int(r["kept"]) / MIB - i for r, i in zip(mine, inner, strict=True)]
        axes[0].barh(labels, inner, color="#5e81ac", label="blocks, embeddings, head")
        axes[0].barh(labels, outer, left=inner, color="#b7c4d6", label="logits and loss")
        axes[0].invert_yaxis()
        axes[0].set_xlabel("MiB kept for the backward")
        axes[0].set_title(WORKLOADS[name].title, fontsize=9, loc="left")
        axes[0].legend(fontsize=7, loc="lower right")
        for row, x in zip(mine, inner, strict=True):
            if row["method"] in seconds:
                y = seconds[row["method"]]
                axes[1].plot(x, y, "o", color="#d08770", markersize=5)
                axes[1].annotate(row["method"], (x, y), fontsize=6.5, xytext=(4, 3), textcoords="offset points")
        axes[1].set_xlabel("MiB kept without loss")
        axes[1].set_ylabel("seconds per step")
        axes[1].set_xlim(left=0)
        axes[1].set_ylim(bottom=0)
        for a in axes:
            a.spines[["top", "right"]].set_visible(False)
    figure.savefig(RESULTS / "memory.png", dpi=110)

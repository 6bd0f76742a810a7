"""Which term of the paper's arithmetic costs how much, in which layers: errors of single gradients, one term off at a
time, by kind of layer. Builds on the fidelity harness."""

from __future__ import annotations

import csv
import statistics
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from fidelity.capture import capture
from fidelity.report import markdown
from fidelity.single import relative_error
from fidelity.store import Store
from torch import Tensor, nn
from tqdm import tqdm
from transformers import default_data_collator

from hot_hf import ops
from hot_hf.demo.tasks import Task
from hot_hf.ops import reference

KEY, VALUES = ("task", "layer", "gradient", "term"), ("error", "torch")
TOKENS = 2048
TASKS = ("code", "prose", "digits")


@dataclass(frozen=True)
class Term:
    """``compute(x, g, W)``: the gradient with the paper's arithmetic but for one term."""

    gradient: str
    name: str
    compute: Callable[[Tensor, Tensor, Tensor], Tensor]


def _g_x(bits: int = 4, block: int = 16, per_token: bool = False, rounding: str = "pseudo_stochastic"):
    return lambda x, g, w: ops.grad_input(g, w, bits, block, per_token, rounding, 0, torch.float32)


def _g_w(fmt: str = "hla_int8", rank: int = 8, per_feature: bool = False, rounding: str = "pseudo_stochastic"):
    def compute(x, g, w):
        packed, scale = ops.compress(x, fmt, rank, 16, per_feature, rounding, 0)
        return ops.grad_weight(g, packed, scale, fmt, x.shape[1], rank, 16, per_feature, rounding, 3, torch.float32)

    return compute


def _projected(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    return reference.project_tokens(g, 8).t() @ reference.project_tokens(x, 8)


TERMS = (
    Term("g_x", "the paper, per tensor", _g_x()),
    Term("g_x", "without the transform", _g_x(block=1)),
    Term("g_x", "nearest rounding", _g_x(rounding="nearest")),
    Term("g_x", "per-token scales", _g_x(per_token=True)),
    Term("g_x", "8 bits", _g_x(bits=8)),
    Term("g_w", "the paper, r=8 INT8 per tensor", _g_w()),
    Term("g_w", "nearest rounding", _g_w(rounding="nearest")),
    Term("g_w", "per-feature scales", _g_w(per_feature=True)),
    Term("g_w", "without rounding (r=8 in float32)", _projected),
    Term("g_w", "rank 12", _g_w(rank=12)),
    Term("g_w", "rank 16 (all of it)", _g_w(rank=16)),
)


def measure(name: str, task: Task, store: Store) -> None:
    """Errors of every TERM in the layers of ``task``'s starting model, on held-out rows; what is stored is kept."""
    model = task.make_model(0)
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and _block(n) is not None]
    step = max(1, len({_block(n) for n in names}) // 4)  # of SmolLM2's 30 blocks: 0, 7, 14, 21, 28
    names = [n for n in names if _block(n) % step == 0]
    if all(store.find(task=name, layer=n, gradient=t.gradient, term=t.name) for n in names for t in TERMS):
        return
    first = task.held_out[0]
    tokens = len(first["input_ids"]) if "input_ids" in first else 5  # of an image: 4 patches and CLS
    rows = [task.held_out[i] for i in range(min(len(task.held_out), TOKENS // tokens))]
    layers = capture(model, default_data_collator(rows), names)
    for layer, (x, g, w) in tqdm(layers.items(), desc=f"{name}: terms"):
        truth = {"g_x": g.double() @ w.double(), "g_w": g.double().t() @ x.double()}
        for term in TERMS:
            if store.find(task=name, layer=layer, gradient=term.gradient, term=term.name) is None:
                error = relative_error(term.compute(x, g, w), truth[term.gradient])
                store.add(
                    task=name, layer=layer, gradient=term.gradient, term=term.name, error=error, torch=torch.__version__
                )


def _block(name: str) -> int | None:
    """The number of the block that a layer is in."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


def section(folder: Path) -> str:
    """The table by kind of layer, and what it says; empty where nothing has been measured."""
    path = folder / "training_terms.csv"
    if not path.is_file():
        return ""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    parts = [
        "## Where the paper's preset fails, and why\n",
        "Relative Frobenius errors of single gradients in the model that training starts from, by kind of layer (means "
        "over the blocks measured), with the paper's arithmetic and with one term of it changed. Where LQS chooses "
        "per-token scales, the paper's g_x is the line of that name. `python benchmarks/compare_methods.py --terms` "
        "measures them; [fidelity.md](fidelity.md) has more kinds of arithmetic, as means over all layers.\n",
    ]
    for task in dict.fromkeys(r["task"] for r in rows):
        mine = [r for r in rows if r["task"] == task]
        kinds = list(dict.fromkeys(r["layer"].rsplit(".", 1)[-1] for r in mine))
        lines, means = [], {}
        for term in TERMS:
            found = [r for r in mine if (r["gradient"], r["term"]) == (term.gradient, term.name)]
            errors = {k: [float(r["error"]) for r in found if r["layer"].rsplit(".", 1)[-1] == k] for k in kinds}
            means[term] = {k: statistics.mean(v) for k, v in errors.items() if v}
            lines.append(
                [term.gradient, term.name, *(f"{means[term][k]:.3f}" if k in means[term] else "" for k in kinds)]
            )
        parts += [f"### {task}\n", markdown(["gradient", "arithmetic", *kinds], lines), *_reading(means, mine)]
    return "\n".join(parts)


def _reading(means: dict[Term, dict[str, float]], rows: list[dict[str, str]]) -> list[str]:
    """The worst kinds of layer under the paper's arithmetic, and the term whose change takes most of the error away."""
    said = []
    for gradient in ("g_x", "g_w"):
        paper, *others = [t for t in TERMS if t.gradient == gradient and means[t]]
        worst = sorted(means[paper], key=means[paper].get, reverse=True)[:2]
        average = {t: statistics.mean(means[t].values()) for t in (paper, *others)}
        best = min(others, key=average.get)
        said.append(
            f"{gradient}: largest errors in {' and '.join(worst)}; {best.name} brings the mean from "
            f"{average[paper]:.3f} to {average[best]:.3f}"
            + "".join(f", {t.name} to {average[t]:.3f}" for t in others if t is not best)
            + "."
        )
        depth: dict[int, list[float]] = {}
        for r in rows:
            if (r["gradient"], r["term"]) == (gradient, paper.name):
                depth.setdefault(_block(r["layer"]), []).append(float(r["error"]))
        said.append(
            f"{gradient} of the paper by depth: "
            + ", ".join(f"block {block} {statistics.mean(errors):.3f}" for block, errors in sorted(depth.items()))
            + "."
        )
    return [f"- {textwrap.fill(s, 118, subsequent_indent='  ')}" for s in said] + [""]

#!/usr/bin/env python
"""Select a plan by budget for a task of ``hot-hf demo``, and check it on micro-batches it has not seen.

    python benchmarks/select_plan.py --task text --max-grad-error 0.15
    python benchmarks/select_plan.py --task vision --max-bytes 12% --warm-steps 100

The check uses none of the selection's own code: whole gradients, all tokens, float32 sums. Per layer: the error of g_x
and of g_w of single micro-batches and of the sum of g_w over all of them, given the g that reaches the layer. For the
whole model: its gradient against that of exact training, single and summed, for the plan and for presets. Writes the
plan and its plot into docs/results/plans, adds to checks.csv there and writes README.md from it.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import time
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import default_data_collator

from hot_hf import HOTConfig, SelectedPlan, apply_hot, fix_selection, remove_hot
from hot_hf.commands.plan_plot import plot
from hot_hf.demo import tasks
from hot_hf.layers import HOTMixin
from hot_hf.memory import SavedTensors

RESULTS = Path(__file__).parent.parent / "docs" / "results" / "plans"
ERRORS = ("layer_grad_input", "layer_grad_weight", "layer_grad_weight_summed", "model_single", "model_summed")
TIMES = ("seconds_measuring", "seconds_exact")
FIELDS = ("plan", "what", "batches", *ERRORS, "layers_over", "kept_bytes", *TIMES, "torch")


class LayerErrors:
    """Each patched layer's own gradients against exact ones of the same x and g."""

    def __init__(self, model: nn.Module) -> None:
        self.norms: dict[tuple[str, str], list[float]] = {}
        self.sums: dict[str, list[Tensor]] = {}
        self._pending: dict[str, tuple[Tensor, Tensor]] = {}
        self._handles = [m.register_forward_hook(self._forward) for m in model.modules() if isinstance(m, HOTMixin)]
        self._layers = {m.hot.name: m for m in model.modules() if isinstance(m, HOTMixin)}

    def _forward(self, layer: HOTMixin, args: tuple, y: Tensor) -> None:
        x = args[0]
        y.register_hook(lambda g: self._pending.__setitem__(layer.hot.name, (x.detach(), g)))

        if x.requires_grad:
            node = y.grad_fn  # its first output is g_x, before other readers of x add theirs
            node.register_hook(lambda grads, _: self._input(layer, grads[0]))

    def _input(self, layer: HOTMixin, value: Tensor | None) -> None:
        _, g = self._pending[layer.hot.name]
        if value is not None:
            self._add(layer.hot.name, "grad_input", value, g @ layer.matrix.detach())

    def _add(self, name: str, what: str, value: Tensor, exact: Tensor) -> None:
        norms = self.norms.setdefault((name, what), [0.0, 0.0])
        norms[0] += (value - exact).norm().item() ** 2
        norms[1] += exact.norm().item() ** 2

    def backward_done(self) -> None:
        """After each backward, whose gradients started from zero."""
        for name, (x, g) in self._pending.items():
            exact = g.reshape(-1, g.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
            value = self._layers[name].weight.grad
            self._add(name, "grad_weight", value, exact)
            sums = self.sums.setdefault(name, [torch.zeros_like(exact), torch.zeros_like(exact)])
            sums[0] += value - exact
            sums[1] += exact
        self._pending.clear()

    def largest(self, budget: float) -> dict[str, float]:
        """Of all layers, and how many of them have an error above ``budget``."""
        for handle in self._handles:
            handle.remove()
        errors = {key: (e / r) ** 0.5 for key, (e, r) in self.norms.items()}
        errors |= {(n, "grad_weight_summed"): (e.norm() / x.norm()).item() for n, (e, x) in self.sums.items()}
        kinds = ("grad_input", "grad_weight", "grad_weight_summed")
        found = {f"layer_{kind}": max(e for (_, k), e in errors.items() if k == kind) for kind in kinds}
        return {**found, "layers_over": len({name for (name, _), e in errors.items() if e > budget})}


def backward(model: nn.Module, batch: dict) -> None:
    model.zero_grad()
    model(**batch).loss.backward()


def check(model: nn.Module, exact: list[dict[str, Tensor]], batches: list[dict], budget: float | None) -> dict:
    """Errors of a patched model on ``batches``, whose exact gradients are given; of its layers against a budget."""
    layers = None if budget is None else LayerErrors(model)
    with SavedTensors(model) as saved:
        loss = model(**batches[0]).loss
    kept = saved.hot_bytes
    del loss
    squares, total = [0.0, 0.0], {}
    for batch, want in zip(batches, exact, strict=True):
        backward(model, batch)
        if layers is not None:
            layers.backward_done()
        for name, p in model.named_parameters():
            if p.grad is not None:
                error = p.grad - want[name]
                squares[0] += error.norm().item() ** 2
                squares[1] += want[name].norm().item() ** 2
                total[name] = total.get(name, 0) + error
    sums = [sum(t.norm().item() ** 2 for t in total.values())]
    sums.append(sum(sum(w[name] for w in exact).norm().item() ** 2 for name in total))
    return {
        **(layers.largest(budget) if layers is not None else {}),
        "model_single": (squares[0] / squares[1]) ** 0.5,
        "model_summed": (sums[0] / sums[1]) ** 0.5,
        "kept_bytes": kept,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--task", choices=("text", "vision"), required=True)
    parser.add_argument("--max-grad-error", type=float)
    parser.add_argument("--max-bytes")
    parser.add_argument("--batches", type=int, default=4, help="micro-batches that are measured (default: %(default)s)")
    parser.add_argument("--fresh", type=int, default=4, help="micro-batches of the check (default: %(default)s)")
    parser.add_argument("--warm-steps", type=int, default=0, help="exact steps before (a model from scratch)")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()

    steps = args.warm_steps + args.batches + args.fresh
    task = tasks.text(steps=steps) if args.task == "text" else tasks.vision()
    model = task.make_model(0).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.arguments["learning_rate"])
    loader = DataLoader(
        task.train,
        task.arguments["per_device_train_batch_size"],
        shuffle=True,
        collate_fn=default_data_collator,
        generator=torch.Generator().manual_seed(0),
        drop_last=True,
    )
    stream = (batch for _ in itertools.count() for batch in loader)

    def train(count: int) -> float:
        """Steps of training; seconds of the fastest one."""
        seconds = []
        for batch in itertools.islice(stream, count):
            start = time.perf_counter()
            backward(model, batch)
            seconds.append(time.perf_counter() - start)
            optimizer.step()
        return min(seconds, default=0.0)

    train(args.warm_steps)
    config = HOTConfig(
        selection="budget",
        max_grad_error=args.max_grad_error,
        max_bytes=args.max_bytes,
        lqs_batches=args.batches,
    )
    apply_hot(model, config)
    measuring = train(args.batches)
    fix_selection(model)
    plan = SelectedPlan.of(model)
    name = f"{task.name}_{args.max_grad_error or args.max_bytes.replace('%', 'pct')}"
    plan.save(args.output / f"{name}.json")
    plot(plan, args.output / f"{name}.png")
    print(str(plan).split("layers:")[0].rsplit("\n", 1)[0])
    print("\n".join(line for line in str(plan).splitlines() if "layers:" in line or "MiB" in line))

    batches = list(itertools.islice(stream, args.fresh))
    configs = {"the plan": HOTConfig.from_plan(plan), **{p: HOTConfig.from_preset(p) for p in ("default", "fast")}}
    remove_hot(model)
    exact, start = [], time.perf_counter()
    for batch in batches:
        backward(model, batch)
        exact.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    seconds = (time.perf_counter() - start) / len(batches)
    rows = []
    for what, of in configs.items():
        apply_hot(model, of)
        found = check(model, exact, batches, (args.max_grad_error or 1.0) if what == "the plan" else None)
        times = (measuring, seconds) if what == "the plan" else ("", "")
        rows.append({
            "plan": name, "what": what, "batches": len(batches), **found, "seconds_measuring": times[0],
            "seconds_exact": times[1], "torch": torch.__version__,
        })  # fmt: skip
        print(rows[-1])
        remove_hot(model)
    store(args.output, name, rows)


def store(output: Path, name: str, rows: list[dict]) -> None:
    """Replace this plan's rows of checks.csv, and write the page."""
    path = output / "checks.csv"
    old = list(csv.DictReader(path.open())) if path.is_file() else []
    rows = sorted([r for r in old if r["plan"] != name] + rows, key=lambda r: r["plan"])
    rows = [{k: f"{v:.4g}" if isinstance(v, float) else str(v) for k, v in row.items()} for row in rows]
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    (output / "README.md").write_text(page(output, rows))


def page(output: Path, rows: list[dict]) -> str:
    lines = [
        "# Selected plans, and what they did on fresh micro-batches",
        "",
        "Written by `benchmarks/select_plan.py`; how plans are selected is in [selection.md](../../selection.md).",
        "Errors are relative Frobenius norms, on the CPU. Columns of layers: the largest over all layers, of one",
        "gradient and of the sum of g_w over the fresh micro-batches; how many have one above the budget. Columns of",
        "the model: the gradient of all parameters against that of exact training, of one micro-batch and of the sum;",
        "errors of g_x in the layers above come on top there.",
        "",
    ]
    for name in dict.fromkeys(row["plan"] for row in rows):
        plan = SelectedPlan.load(output / f"{name}.json")
        budget = ", ".join(f"`{k}={v!r}`" for k, v in plan.budget.items())
        of = [row for row in rows if row["plan"] == name]
        lines += [
            f"## {name.split('_')[0]}, {budget}",
            "",
            f"[{name}.json]({name}.json), {len(plan.layers)} layers of {plan.model}, {plan.bytes / 2**20:.2f} of "
            f"{plan.exact_bytes / 2**20:.2f} MiB kept. A measured micro-batch took "
            f"{float(of[0]['seconds_measuring']):.1f} s, an exact one {float(of[0]['seconds_exact']):.2f} s.",
            "",
            f"![plan]({name}.png)",
            "",
            "| layers | g_x | kept |",
            "|---|---|---|",
        ]
        for label, count in Counter(choice.plan.label() for choice in plan.layers.values()).most_common():
            bits, kept = label.split(" / ")
            lines.append(f"| {count} | {bits} | `{kept}` |")
        lines += [
            "",
            "| | batches | layer g_x | layer g_w | layer g_w summed | layers over | model | model summed | MiB kept |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for row in of:
            cells = [row["what"], row["batches"]]
            cells += [f"{float(row[k]):.3f}" if row.get(k) else "" for k in ERRORS]
            cells.insert(5, row.get("layers_over") or "")
            lines.append("| " + " | ".join([*cells, f"{int(row['kept_bytes']) / 2**20:.2f}"]) + " |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

#!/usr/bin/env python
"""Is the low-rank step in two dimensions worth it on image tokens, against the package's formats at equal bytes?

A small ViT with 4x4 patches of 2x2 pixels and CLS on scikit-learn's digits. After some exact steps, for every linear
layer that HOT patches: the bytes kept of x and the error of g_w, of single micro-batches and of their sum, under

* the package's formats; the `hla` ones take blocks of 16 tokens of the flattened sequence, CLS among them;
* raster: each image's 16 patches are a block, rows by sequency; CLS tokens fill blocks of their own, all rows kept;
* two-dimensional: the same, but the 16 patches are a 4x4 tile, rows by the sum of two sequencies (the low-pass order of
  LBP-WHT, Yang et al., NeurIPS 2023, arXiv 2309.15275).

With --train also the demo's training from scratch, exact and with some of them.

    python benchmarks/image_order.py --train       # writes docs/results/image_order.md
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean
from types import MethodType

import torch
import torch.nn.functional as F
from bench_page import machine
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import ViTConfig, ViTForImageClassification, default_data_collator, set_seed

from hot_hf import HOTConfig, ops
from hot_hf.demo import tasks
from hot_hf.demo.train import coverage, train
from hot_hf.ops import reference

RESULT = Path(__file__).parent.parent / "docs" / "results" / "image_order.md"
WARM, MEASURED, SEEDS = 200, 16, (0, 1, 2)
RANKS = (4, 6, 8, 12, 16)


@dataclass(frozen=True)
class Format:
    """A format of the package: what it keeps of x (images, tokens, in_features), and g_w from that."""

    name: str
    rank: int = 16

    def keep(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return ops.compress(x.flatten(0, 1), self.name, self.rank, 16, True, "nearest", 0)

    def grad_weight(self, g: Tensor, packed: Tensor, scale: Tensor, features: int) -> Tensor:
        settings = (self.name, features, self.rank, 16, True, "nearest", 0, g.dtype)
        return ops.grad_weight(g.flatten(0, 1), packed, scale, *settings)


def low_pass(side: int) -> Tensor:
    """The transform of a square tile, rows with the smallest sum of both sequencies first, then the smaller larger."""
    h = reference.hadamard_matrix(side)[reference.sequency_order(side)]
    pairs = sorted(product(range(side), repeat=2), key=lambda pair: (sum(pair), max(pair), pair))
    return torch.kron(h, h)[[side * vertical + horizontal for vertical, horizontal in pairs]] / side


ROWS = {"raster": reference.hadamard_matrix(16)[reference.sequency_order()] / 4, "two-dimensional": low_pass(4)}


@dataclass(frozen=True)
class Projection:
    """The first ``rank`` of ``ROWS[order]`` of each image's 16 patches, and every row of blocks of 16 CLS tokens; one
    scale per feature."""

    order: str
    rank: int
    bits: int = 8

    def quantized(self, t: Tensor, bits: int) -> tuple[Tensor, Tensor]:
        low = ROWS[self.order][: self.rank].to(t) @ t[:, 1:]
        return reference.quantize(torch.cat((low.flatten(0, 1), reference.project_tokens(t[:, 0], 16))), bits, 0)

    def keep(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, scale = self.quantized(x, self.bits)
        return (reference.pack_int4(q) if self.bits == 4 else q), scale

    def grad_weight(self, g: Tensor, packed: Tensor, scale: Tensor, features: int) -> Tensor:
        g_int, g_scale = self.quantized(g, 8)
        x_int = reference.unpack_int4(packed, features) if self.bits == 4 else packed
        return reference.scaled_product(g_int.t(), x_int, g_scale, scale, g.dtype)


WAYS = {
    **{f"`hla_int{bits}` r={r}": Format(f"hla_int{bits}", r) for bits in (8, 4) for r in RANKS},
    **{f"raster r={r}, INT8": Projection("raster", r) for r in RANKS},
    **{f"two-dimensional r={r}, INT{bits}": Projection("two-dimensional", r, bits) for bits in (8, 4) for r in RANKS},
    "`ht_int4`": Format("ht_int4"),
    "`int8`": Format("int8"),
}
TRAINED = ("`ht_int4`", *(way.format(r) for r in (8, 4) for way in ("`hla_int8` r={}", "two-dimensional r={}, INT8")))
Row = tuple[float, float, float]  # bytes per element of x, error of single micro-batches, of their sum


class Linear(torch.autograd.Function):
    """``F.linear`` with g_w from what a way keeps and g_x as HOT's default has it."""

    @staticmethod
    def forward(ctx, x, weight, bias, way):
        ctx.way = way
        ctx.save_for_backward(weight, *way.keep(x))
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, g):
        weight, *kept = ctx.saved_tensors
        grad_x = ops.grad_input(g.flatten(0, 1), weight, 8, 16, True, "nearest", 0, g.dtype)
        return grad_x.view(*g.shape[:2], -1), ctx.way.grad_weight(g, *kept, weight.shape[1]), g.sum((0, 1)), None


def patch(model: nn.Module, linears: list[str], way: Format | Projection) -> None:
    for layer in map(model.get_submodule, linears):
        layer.forward = MethodType(lambda self, x: Linear.apply(x, self.weight, self.bias, way), layer)


def small_vit(seed: int) -> nn.Module:
    set_seed(seed)
    return ViTForImageClassification(ViTConfig(
        image_size=8, patch_size=2, num_channels=1, hidden_size=128, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=512, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=10,
    ))  # fmt: skip


def measured(task: tasks.Task, linears: list[str]) -> dict[str, Row]:
    """Every way's row, of MEASURED micro-batches after WARM exact steps; errors are means over layers."""
    model, seen = task.make_model(0), {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    loader = DataLoader(task.train, 64, shuffle=True, collate_fn=default_data_collator, drop_last=True)
    batches = (batch for _ in range(100) for batch in loader)
    kept, single, total = dict.fromkeys(WAYS, 0), dict.fromkeys(WAYS, 0.0), defaultdict(float)
    elements = 0

    def watch(layer, args, y, name):
        y.register_hook(lambda g: seen.__setitem__(name, (args[0].detach(), g)))

    for name in linears:
        model.get_submodule(name).register_forward_hook(partial(watch, name=name))
    for step in tqdm(range(WARM + MEASURED), "steps, then errors"):
        optimizer.zero_grad()
        model(**next(batches)).loss.backward()
        optimizer.step()
        for name, (x, g) in seen.items() if step >= WARM else ():
            exact = g.flatten(0, 1).t() @ x.flatten(0, 1)
            elements += x.numel()
            total["exact", name] += exact
            for label, way in WAYS.items():
                packed, scale = way.keep(x)
                error = way.grad_weight(g, packed, scale, x.shape[-1]) - exact
                kept[label] += packed.nbytes + scale.nbytes
                single[label] += (error.norm() / exact.norm()).item() / MEASURED
                total[label, name] += error
    summed = {w: sum((total[w, n].norm() / total["exact", n].norm()).item() for n in linears) for w in WAYS}
    return {w: (kept[w] / elements, single[w] / len(linears), summed[w] / len(linears)) for w in WAYS}


def compared(rows: dict[str, Row]) -> list[str]:
    """The two-dimensional ways that are better than ``ht_int4``, and those that no format of the package covers."""
    formats = [rows[label] for label, way in WAYS.items() if isinstance(way, Format)]
    two = {label: row for label, row in rows.items() if label.startswith("two-dimensional")}
    default = rows["`ht_int4`"]
    better = [f"{w} ({row[0]:.3f} bytes)" for w, row in two.items() if row[1] < default[1] or row[2] < default[2]]
    alone = [w for w, row in two.items() if not any(all(map(float.__le__, other, row)) for other in formats)]
    return [
        f"- Either error smaller than with `ht_int4` ({default[0]:.3f} bytes): {'; '.join(better) or 'none'}.",
        f"- No format of the package has as few bytes and both errors as small: {'; '.join(alone) or 'none'}.",
    ]


def trained(task: tasks.Task, linears: list[str], rows: dict[str, Row]) -> list[str]:
    """A table: exact training and everything in TRAINED."""
    lines = [
        f"Trained from scratch for {task.arguments['max_steps']} steps by an autograd.Function of the script, g_x as "
        f"HOT's default has it: means of seeds {', '.join(map(str, SEEDS))}, smallest and largest in brackets; "
        f"{len(task.held_out)} images held out.",
        "",
        "| | bytes per element of x | held-out loss | held-out accuracy |",
        "|---|---|---|---|",
    ]
    for label in ("exact", *TRAINED):
        prepare = partial(patch, linears=linears, way=WAYS[label]) if label in WAYS else None
        runs = [train(task, None, label, linears, seed, prepare=prepare) for seed in SEEDS]
        cells = []
        for values, form in (([r.held_out_loss for r in runs], ".3f"), ([r.held_out_accuracy for r in runs], ".1%")):
            cells.append(f"{mean(values):{form}} ({min(values):{form}} to {max(values):{form}})")
        lines.append(f"| {label} | {rows[label][0] if label in rows else 4:.3f} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--train", action="store_true", help="train with some of them as well")
    args = parser.parse_args()
    task, where = replace(tasks.vision(), make_model=small_vit), machine()
    linears = coverage(task, HOTConfig()).patched
    rows = measured(task, linears)
    lines = [
        "# The low-rank step on image tokens, in one dimension and in two",
        "",
        f"`python benchmarks/image_order.py{' --train' * args.train}` on {where['machine']}, torch {where['torch']}, "
        f"{where['threads']} threads, {where['date']}.",
        "",
        f"A ViT of 4 layers, 128 wide, 16 patches of 2x2 pixels and CLS, after {WARM} exact steps on scikit-learn's "
        f"digits: {MEASURED} micro-batches of 64 images, the {len(linears)} linear layers that HOT patches. Bytes: "
        "integers and scales. Errors: relative Frobenius error of g_w, mean over layers. The `hla` formats take blocks "
        "of 16 tokens of the flattened sequence. Raster and two-dimensional are integers in plain torch, of the "
        "script: an image's 16 patches are a block, its r rows those of the lowest sequency or, as a 4x4 tile, of the "
        "lowest sum of two; CLS tokens fill blocks of their own, all rows kept.",
        "",
        "| kept of x | bytes per element | error, single micro-batches | error, their sum |",
        "|---|---|---|---|",
        *("| {} | {:.3f} | {:.3f} | {:.3f} |".format(w, *row) for w, row in sorted(rows.items(), key=lambda i: i[1])),
        "",
        "Of the two-dimensional ways:",
        "",
        *compared(rows),
    ]
    if args.train:
        lines += ["", *trained(task, linears, rows)]
    RESULT.write_text("\n".join(lines) + "\n")
    print(RESULT.read_text())


if __name__ == "__main__":
    main()

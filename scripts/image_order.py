#!/usr/bin/env python
"""Does the low-rank step do better on image tokens in two dimensions, with CLS kept out of it?

A small ViT with 4x4 patches of 2x2 pixels and CLS on scikit-learn's digits. First, after some exact steps, for every
linear layer inside its blocks the error of g_w under INT8 HLA, of single micro-batches and of their sum, three ways:

* flattened: blocks of 16 tokens of the flattened sequence, CLS among them, rows by sequency: without token_grid;
* raster: each image's 16 patches are a block, rows by sequency; CLS tokens quantized as they are;
* two-dimensional: the same blocks, rows by the sum of two sequencies (LBP-WHT's low-pass order): with token_grid.

With --train also the demo's training from scratch, exact and with each.

    python scripts/image_order.py --train       # writes docs/results/image_order.md
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import ViTConfig, ViTForImageClassification, default_data_collator, set_seed

from hot_hf import HOTConfig, ops
from hot_hf.demo import data, tasks
from hot_hf.demo.train import coverage, train
from hot_hf.ops.reference import hadamard_matrix, quantize, sequency_order

RESULT = Path(__file__).parent.parent / "docs" / "results" / "image_order.md"
GRID, WARM, MEASURED, SEEDS = [1, 4, 4], 200, 16, (0, 1, 2)
RANKS = (4, 6, 8, 10, 12)


def small_vit() -> nn.Module:
    return ViTForImageClassification(ViTConfig(
        image_size=8, patch_size=2, num_channels=1, hidden_size=128, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=512, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=10,
    ))  # fmt: skip


def flattened(g: Tensor, x: Tensor, rank: int) -> Tensor:
    g, x = g.flatten(0, 1), x.flatten(0, 1)
    packed, scale = ops.compress(x, "hla_int8", rank, 16, True, "nearest", 0)
    return ops.grad_weight(g, packed, scale, "hla_int8", x.shape[1], rank, 16, True, "nearest", 0, torch.float32)


def raster(g: Tensor, x: Tensor, rank: int) -> Tensor:
    matrix = hadamard_matrix(16).float()[sequency_order()[:rank]] / 4
    projected = (torch.cat((t[:, 0], (matrix @ t[:, 1:]).flatten(0, 1))) for t in (g, x))
    (g_int, g_scale), (x_int, x_scale) = (quantize(t, 8, 0) for t in projected)
    return g_scale[:, None] * (g_int.float().t() @ x_int.float()) * x_scale


def two_dimensional(g: Tensor, x: Tensor, rank: int) -> Tensor:
    g, x = g.flatten(0, 1), x.flatten(0, 1)
    packed, scale = ops.compress_grid(x, 8, rank, GRID, True, "nearest", 0)
    return ops.grad_weight_grid(g, packed, scale, 8, x.shape[1], rank, GRID, True, "nearest", 0, torch.float32)


WAYS = {"flattened": flattened, "raster, CLS apart": raster, "two-dimensional, CLS apart": two_dimensional}
TRAINED = {
    "exact": None,
    "`ht_int4`": HOTConfig(),
    "`hla_int8` r=8, flattened": HOTConfig(activation_format="hla_int8"),
    "`hla_int8` r=8, two-dimensional": HOTConfig(activation_format="hla_int8", token_grid=GRID),
    "`hla_int8` r=4, flattened": HOTConfig(activation_format="hla_int8", rank=4),
    "`hla_int8` r=4, two-dimensional": HOTConfig(activation_format="hla_int8", rank=4, token_grid=GRID),
}


def trained() -> list[str]:
    """A table: every configuration of TRAINED, means over SEEDS."""

    def make_model(seed: int) -> nn.Module:
        set_seed(seed)
        return small_vit()

    task = replace(tasks.vision(), make_model=make_model)
    linears = coverage(task, HOTConfig()).patched
    lines = ["| | held-out loss | held-out accuracy | KiB of inputs kept |", "|---|---|---|---|"]
    for label, config in TRAINED.items():
        runs = [train(task, config, label, linears, seed) for seed in SEEDS]
        loss, accuracy = (sum(getattr(r, f"held_out_{w}") for r in runs) / len(runs) for w in ("loss", "accuracy"))
        lines.append(f"| {label} | {loss:.3f} | {accuracy:.1%} | {runs[0].kept_linear_bytes / 1024:,.0f} |")
    steps = task.arguments["max_steps"]
    return [f"Trained from scratch for {steps} steps, g_x INT8 per token, means of seeds {SEEDS}:", "", *lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--train", action="store_true", help="train with each as well")
    args = parser.parse_args()
    set_seed(0)
    model = small_vit()
    train, _ = data.digits()
    loader = DataLoader(train, 64, shuffle=True, collate_fn=default_data_collator, drop_last=True)
    batches = (batch for _ in range(100) for batch in loader)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)

    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def watch(name: str):
        def forward(layer, args, y):
            y.register_hook(lambda g: seen.__setitem__(name, (args[0].detach(), g)))

        return forward

    for _ in range(WARM):
        optimizer.zero_grad()
        loss = model(**next(batches)).loss
        loss.backward()
        optimizer.step()
    for name, layer in model.vit.named_modules():
        if isinstance(layer, nn.Linear) and "layers" in name:
            layer.register_forward_hook(watch(name))

    single: dict[tuple[str, int], list[Tensor]] = {}
    total: dict[tuple[str, int, str], list[Tensor]] = {}
    for _ in range(MEASURED):
        optimizer.zero_grad()
        model(**next(batches)).loss.backward()
        optimizer.step()
        for name, (x, g) in seen.items():
            exact = g.flatten(0, 1).t() @ x.flatten(0, 1)
            for label, way in WAYS.items():
                for rank in RANKS:
                    error = way(g, x, rank) - exact
                    single.setdefault((label, rank), []).append(error.norm() / exact.norm())
                    sums = total.setdefault((label, rank, name), [torch.zeros_like(exact), torch.zeros_like(exact)])
                    sums[0] += error
                    sums[1] += exact
    lines = [
        "# The low-rank step on image tokens, in one dimension and in two",
        "",
        "Written by `scripts/image_order.py`: a ViT of 4 layers, 128 wide, 16 patches of 2x2 pixels and CLS, after",
        f"{WARM} exact steps on scikit-learn's digits (training loss {loss.item():.3f}); {MEASURED} micro-batches of",
        f"64 images, {len(seen)} linear layers. Relative Frobenius error of g_w under INT8 HLA, mean over layers: of",
        "single micro-batches / of their sum. An image's 17 tokens keep 17r/16 rows flattened, r + 1 otherwise.",
        "",
        "| rank | " + " | ".join(WAYS) + " |",
        "|---" * (len(WAYS) + 1) + "|",
    ]
    for rank in RANKS:
        cells = []
        for label in WAYS:
            summed = [(e.norm() / x.norm()).item() for (w, r, _), (e, x) in total.items() if (w, r) == (label, rank)]
            cells.append(f"{torch.stack(single[label, rank]).mean():.3f} / {sum(summed) / len(summed):.3f}")
        lines.append(f"| {rank} | " + " | ".join(cells) + " |")
    if args.train:
        lines += ["", *trained()]
    RESULT.write_text("\n".join(lines) + "\n")
    print(RESULT.read_text())


if __name__ == "__main__":
    main()

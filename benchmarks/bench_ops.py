"""Time one linear layer on the CPU: exact in float32 and bfloat16 against HOT, in interleaved rounds.

    python benchmarks/bench_ops.py layers      # shapes of ViT-B, SmolLM2-135M and Llama-3-8B
    python benchmarks/bench_ops.py narrow      # the crossover that HOTConfig.min_features stands for
    python benchmarks/bench_ops.py growth      # against tokens, width and layers
    python benchmarks/bench_ops.py quantizers  # the compiled kernels against the reference, eager and through inductor
    python benchmarks/bench_ops.py start       # loading the kernels, with and without compiling them

Rows are appended to docs/results/bench_*.csv; benchmarks/bench_page.py makes the pages, also at the end of each run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from bench_page import RESULTS, append, interleaved, machine, summary, timed, torchao_int8, write_pages
from torch import nn

from hot_hf import HOTConfig, apply_hot, gradients
from hot_hf.ops import reference
from hot_hf.ops.cpu import BACKEND as cpu

LAYERS = {  # name: (tokens, out_features, in_features)
    "bar 1": (4096, 3072, 768),
    "bar 2": (4096, 768, 3072),
    "bar 3": (2048, 4096, 4096),
    "ViT-B attention, batch 8": (1576, 768, 768),
    "ViT-B MLP in, batch 8": (1576, 3072, 768),
    "SmolLM2 attention, 4x256": (1024, 576, 576),
    "SmolLM2 gate/up, 4x256": (1024, 1536, 576),
    "SmolLM2 down, 4x256": (1024, 576, 1536),
    "Llama-3-8B gate/up": (1024, 14336, 4096),
}
TORCHAO = "torchao int8"  # its forward is in int8 too; nothing is compressed
PRESETS: dict[str, Callable[[], HOTConfig]] = {
    "default": HOTConfig,
    "fast": HOTConfig.fast,
    "paper": HOTConfig.paper,
    "smallest": HOTConfig.smallest,
}


def preset(name: str) -> HOTConfig:
    """A preset with narrow layers included; lqs as it decides most often, since a layer being measured is exact."""
    config = PRESETS[name]()
    config.min_features = 1
    if config.grad_input_granularity == "lqs":
        config.grad_input_granularity = "per_token"
    return config


Change = Callable[[nn.Module], nn.Module]


def patched(hot: str, layer: nn.Module) -> nn.Module:
    apply_hot(layer, preset(hot))
    return layer


@dataclass
class Contender:
    """One layer and its tensors; every sample starts without gradients."""

    layer: nn.Module
    x: torch.Tensor
    g: torch.Tensor

    @classmethod
    def make(cls, shape: tuple[int, int, int], dtype: torch.dtype, change: Change = lambda layer: layer) -> Contender:
        tokens, out_features, in_features = shape
        layer = change(nn.Linear(in_features, out_features, dtype=dtype))
        x = torch.randn(tokens, in_features).to(dtype).requires_grad_()
        return cls(layer, x, torch.randn(tokens, out_features).to(dtype))

    def clear(self) -> None:
        self.x.grad = None
        for parameter in self.layer.parameters():
            parameter.grad = None

    def compression(self) -> float:
        hot = getattr(self.layer, "hot", None)
        return 0.0 if hot is None else timed(lambda: gradients.keep(self.x, hot.plan, 0, share=False))

    def sample(self) -> dict[str, float]:
        self.clear()
        outputs: list[torch.Tensor] = []
        forward = timed(lambda: outputs.append(self.layer(self.x)))
        backward = timed(lambda: outputs.pop().backward(self.g))
        return {
            "forward": forward,
            "forward + backward": forward + backward,
            "backward + compression": backward + self.compression(),
        }


def int8_product(shape: tuple[int, int, int], hot: str) -> Callable[[], float]:
    """Bare products of the two gradients under a preset, without allocation."""
    tokens, out_features, in_features = shape
    config = preset(hot)
    kept = tokens
    if config.activation_format.startswith("hla"):
        kept = reference.padded(tokens, 16) // 16 * config.rank
    g, w, x = (
        torch.randint(-127, 128, size, dtype=torch.int8)
        for size in ((tokens, out_features), (out_features, in_features), (kept, in_features))
    )
    folded = g[:kept].t() if kept <= tokens else g.new_ones(out_features, kept)
    out_x = torch.empty(tokens, in_features, dtype=torch.int32)
    out_w = torch.empty(out_features, in_features, dtype=torch.int32)
    return lambda: timed(lambda: (torch._int_mm(g, w, out=out_x), torch._int_mm(folded, x, out=out_w)))


def compare(shape: tuple[int, int, int], hots: list[str], rounds: int) -> tuple[dict, dict]:
    """Samples by contender and measure, and the int8 products' by preset."""
    contenders = {"float32": Contender.make(shape, torch.float32), "bfloat16": Contender.make(shape, torch.bfloat16)}
    changes = {f"HOT {hot}": partial(patched, hot) for hot in hots}
    if (torchao := torchao_int8()) is not None:
        changes[TORCHAO] = torchao
    for name, change in changes.items():
        contenders[name] = Contender.make(shape, torch.float32, change)
        contenders[f"{name}, bf16"] = Contender.make(shape, torch.bfloat16, change)
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}

    def sampler(name: str) -> Callable[[], float]:
        def take() -> float:
            seen[name].append(contenders[name].sample())
            contenders[name].clear()
            return 0.0

        return take

    products = {f"int8 {hot}": int8_product(shape, hot) for hot in hots}
    times = interleaved({name: sampler(name) for name in contenders} | products, rounds)
    samples = {
        name: {what: [s[what] for s in taken[1:]] for what in taken[0]}  # the first is the warm-up
        for name, taken in seen.items()
    }
    return samples, times


def layers(args: argparse.Namespace) -> None:
    for shape in LAYERS.values():
        if args.bar and shape not in list(LAYERS.values())[:3]:
            continue
        samples, products = compare(shape, args.presets, args.rounds if max(shape) < 8192 else 3)
        rows = []
        for name, measures in samples.items():
            for what, values in measures.items():
                against = {base: samples[base][what] for base in ("float32", "bfloat16")}
                row = {**machine(), "layer": ", ".join(map(str, shape)), "configuration": name, "what": what}
                row |= summary(values, against) | {"int8_share": ""}
                if name.startswith("HOT") and what == "backward + compression":
                    product = products["int8 " + name.removeprefix("HOT ").removesuffix(", bf16")]
                    shares = [p / v for p, v in zip(product, values, strict=True)]
                    row["int8_share"] = f"{median(shares):.0%}"
                rows.append(row)
                if what == "backward + compression":
                    print(row["layer"], name, row["ms"], "ms", row["x_float32"], row["x_bfloat16"], row["int8_share"])
        append(RESULTS / "bench_ops.csv", rows)


def narrow(args: argparse.Namespace) -> None:
    what = "backward + compression"
    for features in (16, 32, 64, 128, 256, 512, 1024):
        samples, _ = compare((2048, features, features), ["default", "fast"], 4 * args.rounds)
        exact = samples["float32"][what]
        for name in ("HOT default", "HOT fast"):
            row = {**machine(), "features": str(features), "configuration": name}
            row |= {"exact_ms": f"{median(exact) * 1e3:.3g}"} | summary(samples[name][what], {"float32": exact})
            print(features, name, row["exact_ms"], row["ms"], row["x_float32"])
            append(RESULTS / "bench_narrow.csv", [row])


def growth(args: argparse.Namespace) -> None:
    def stack(depth: int, width: int, hot: str | None) -> nn.Sequential:
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
        if hot is not None:
            apply_hot(model, preset(hot))
        return model

    cases = [("tokens", n, (n, 1024, 1)) for n in (256, 512, 1024, 2048, 4096, 8192)]
    cases += [("width", w, (2048, w, 1)) for w in (64, 128, 256, 512, 1024, 2048)]
    cases += [("layers", d, (1024, 512, d)) for d in (1, 2, 4, 8, 16, 32)]
    for along, value, (tokens, width, depth) in cases:
        models = {"exact float32": stack(depth, width, None)}
        models |= {f"HOT {hot}": stack(depth, width, hot) for hot in args.presets}
        x, g = torch.randn(tokens, width).requires_grad_(), torch.randn(tokens, width)

        def sampler(model: nn.Module, x: torch.Tensor = x, g: torch.Tensor = g) -> Callable[[], float]:
            return lambda: timed(lambda: model(x).backward(g))

        taken = interleaved({name: sampler(model) for name, model in models.items()}, args.rounds)
        rows = [
            {**machine(), "along": along, "value": str(value), "configuration": name}
            | summary(samples, {"float32": taken["exact float32"]})
            for name, samples in taken.items()
        ]
        append(RESULTS / "bench_growth.csv", rows)
        print(along, value, {row["configuration"]: row["ms"] for row in rows})


def quantizers(args: argparse.Namespace) -> None:
    g, token_scale = torch.randn(4096, 3072), torch.rand(4096)
    cases = {  # name: (arguments, reference, kernels)
        "hadamard_quantize, rows": ((g, 8, 1, 16, True), reference.hadamard_quantize, cpu.hadamard_quantize),
        "hadamard_quantize, columns": ((g, 8, 0, 16, True), reference.hadamard_quantize, cpu.hadamard_quantize),
        "project_quantize": ((g, 8, 8, True), reference.project_quantize, cpu.project_quantize),
        "fold_quantize": ((g, token_scale, True), reference.fold_quantize, cpu.fold_quantize),
    }
    for name, (arguments, plain, fused) in cases.items():
        compiled = torch.compile(plain, dynamic=True)
        first = timed(partial(compiled, *arguments))
        works = {"reference": plain, "inductor": compiled, "kernels": fused}
        taken = interleaved({k: partial(timed, partial(work, *arguments)) for k, work in works.items()}, args.rounds)
        equal = bool((compiled(*arguments)[0] == plain(*arguments)[0]).all())
        row = {**machine(), "quantizer": name, "inductor_first_call_s": f"{first:.3g}", "inductor_equal": str(equal)}
        row |= {f"{k}_ms": f"{median(v) * 1e3:.3g}" for k, v in taken.items()}
        append(RESULTS / "bench_quantizers.csv", [row])
        print(row)


def start(args: argparse.Namespace) -> None:
    code = (
        "import time; from hot_hf.ops.cpu import BACKEND as cpu; t = time.time(); cpu.warm_up(); print(time.time() - t)"
    )
    with tempfile.TemporaryDirectory() as cache:
        for name in ("the first on a machine: compiles", "every later one"):
            result = subprocess.run(
                [sys.executable, "-c", code],
                capture_output=True,
                text=True,
                check=True,
                env={**os.environ, "HOT_HF_CACHE": cache},
            )
            seconds = f"{float(result.stdout):.3g}"
            append(RESULTS / "bench_start.csv", [{**machine(), "start": name, "seconds": seconds}])
            print(name, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("layers", "narrow", "growth", "quantizers", "start"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--presets", nargs="+", default=["default", "fast"], choices=list(PRESETS))
    parser.add_argument("--bar", action="store_true", help="layers: only the three largest shapes of the comparison")
    args = parser.parse_args()
    torch.manual_seed(0)
    commands = {"layers": layers, "narrow": narrow, "growth": growth, "quantizers": quantizers, "start": start}
    commands[args.what](args)
    write_pages()


if __name__ == "__main__":
    main()

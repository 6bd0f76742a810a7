"""Bytes and operations of every step of a HOT layer, and the ceilings that follow: docs/results/roofline.md.

    python scripts/roofline.py

Nothing is measured here. ``must`` counts every input once and every output once; ``moves`` is what the Triton kernels
read and write by construction, operands of a product once (the repeats come from L2).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from hot_hf import HOTConfig
from hot_hf.ops.reference import TOKEN_BLOCK, padded

OUTPUT = Path(__file__).parents[1] / "docs" / "results" / "roofline.md"
TILE_ROWS, TILE_COLUMNS = 128, 64  # of the token quantizers: a maximum of 4 bytes per tile and column (or row)


@dataclass(frozen=True)
class Device:
    """Bytes and operations per second. int8 by the datasheet; copy and bfloat16 as measured on such a device."""

    name: str
    copy: float
    bfloat16: float
    int8: float
    bfloat16_datasheet: float

    @property
    def int8_likely(self) -> float:
        """int8 at the share of the datasheet that bfloat16 products reach."""
        return self.int8 * self.bfloat16 / self.bfloat16_datasheet


H200 = Device("H200", copy=4.3e12, bfloat16=790e12, int8=1979e12, bfloat16_datasheet=989e12)

# (name, tokens, in_features, out_features)
SHAPES = (
    ("ViT-B q, k, v, out (batch 64)", 64 * 197, 768, 768),
    ("ViT-B fc1", 64 * 197, 768, 3072),
    ("ViT-B fc2", 64 * 197, 3072, 768),
    ("Llama-3-8B q, o (8,192 tokens)", 8192, 4096, 4096),
    ("Llama-3-8B k, v", 8192, 4096, 1024),
    ("Llama-3-8B gate, up", 8192, 4096, 14336),
    ("Llama-3-8B down", 8192, 14336, 4096),
)
CONFIGS = {"default": HOTConfig(), "fast": HOTConfig.fast(), "smallest": HOTConfig.smallest()}


@dataclass(frozen=True)
class Step:
    """One kernel (with its second launch). operations: of integer products, a multiply-add is two."""

    name: str
    phase: str
    must: float
    moves: float
    operations: float = 0.0

    def seconds(self, device: Device, int8: float) -> float:
        return max(self.moves / device.copy, self.operations / int8)

    def bound(self, device: Device) -> str:
        return "memory" if self.moves / device.copy > self.operations / device.int8 else "product"


def maxima(rows: int, columns: int) -> float:
    """Bytes of the tile maxima along one axis of (rows, columns): written, then read by the reduction."""
    return 2 * 4 * -(-rows // TILE_ROWS) * columns


def steps(tokens: int, inputs: int, outputs: int, config: HOTConfig, size: int = 2) -> list[Step]:
    """The steps of one layer's forward and backward, gradients and weights of ``size`` bytes an element."""
    n, i, o = tokens, inputs, outputs
    bits, fmt = config.grad_input_bits, config.activation_format
    projected = fmt.startswith("hla")
    kept_bytes = 0.5 if fmt.endswith("int4") else 1.0
    depth = padded(n, TOKEN_BLOCK) // TOKEN_BLOCK * config.rank if projected else n
    x_out, g_width, w_out = kept_bytes * depth * i, bits / 8 * n * o, bits / 8 * o * i
    result = []
    if projected:
        result.append(
            Step("x: project, quantize", "forward", size * n * i + x_out, 2 * size * n * i + x_out + maxima(n, i))
        )
    else:
        result.append(Step("x: transform, quantize", "forward", size * n * i + x_out, size * n * i + x_out))
    written = g_width + depth * o
    g_maxima = maxima(n, o) + 2 * 4 * n * -(-o // TILE_COLUMNS)
    result += [
        Step("g: both quantizations", "backward", size * n * o + written, 2 * size * n * o + written + g_maxima),
        Step("W: transform, quantize", "backward", size * o * i + w_out, 2 * size * o * i + w_out + maxima(o, i)),
        Step("grad_input", "backward", *[g_width + w_out + size * n * i] * 2, 2 * n * o * i),
    ]
    result.append(Step("grad_weight", "backward", *[depth * o + x_out + size * o * i] * 2, 2 * depth * o * i))
    return result


def speedups(
    tokens: int, inputs: int, outputs: int, config: HOTConfig, device: Device, int8: float
) -> tuple[float, float]:
    """Ceilings of backward, and of forward + backward, against bfloat16 products at their measured rate."""
    product = 2 * tokens * inputs * outputs / device.bfloat16
    seconds = {"forward": 0.0, "backward": 0.0}
    for step in steps(tokens, inputs, outputs, config):
        seconds[step.phase] += step.seconds(device, int8)
    return 2 * product / seconds["backward"], 3 * product / (product + sum(seconds.values()))


def page(device: Device) -> str:
    lines = [
        "# What the hardware allows",
        "",
        f"Written by `python scripts/roofline.py`; counted, not measured. {device.name}: {device.copy / 1e12:.1f} TB/s",
        f"copy and {device.bfloat16 / 1e12:.0f} TFLOP/s bfloat16 (measured), {device.int8 / 1e12:,.0f} TOP/s int8 "
        "(datasheet). A step takes at least the",
        "longer of its bytes and its operations; steps follow one another. The baseline is the bfloat16 products",
        "alone, at their measured rate.",
        "",
        "## Ceilings against bfloat16",
        "",
        f"int8 at the datasheet's rate, and in brackets at the share of it that bfloat16 products reach "
        f"({device.bfloat16 / device.bfloat16_datasheet:.0%}).",
        "",
        "| layer | tokens | in | out | "
        + " | ".join(f"{c}: backward | {c}: forward + backward" for c in CONFIGS)
        + " |",
        "|---|---|---|---|" + "---|---|" * len(CONFIGS),
    ]
    for name, n, i, o in SHAPES:
        cells = []
        for config in CONFIGS.values():
            sheet, likely = (speedups(n, i, o, config, device, rate) for rate in (device.int8, device.int8_likely))
            cells += [f"{a:.2f} ({b:.2f})" for a, b in zip(sheet, likely, strict=True)]
        lines.append(f"| {name} | {n:,} | {i:,} | {o:,} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "Products alone would give 2 x at full depth and 2.67 x with the projection to half of it, at equal shares of",
        "the datasheet; what is missing from that is the quantizers' traffic, most where a layer is narrow.",
    ]
    for label, config in CONFIGS.items():
        lines += ["", f"## Steps of `{label}`: {config.plan().label()}", ""]
        lines += [
            "| layer | step | must move, MB | moves, MB | G operations | at least, us | bound by |",
            "|---|---|---|---|---|---|---|",
        ]
        for name, n, i, o in SHAPES:
            for step in steps(n, i, o, config):
                numbers = f"{step.must / 1e6:.1f} | {step.moves / 1e6:.1f} | {step.operations / 1e9:.1f}"
                microseconds = step.seconds(device, device.int8) * 1e6
                lines.append(f"| {name} | {step.name} | {numbers} | {microseconds:.1f} | {step.bound(device)} |")
    lines += [
        "",
        "## Where the kernels move more than they must",
        "",
        "- Scales over tokens need the whole tensor before the first integer: g, W and a projected x are read twice. A",
        "  second read that still lies in the L2 cache (50 MB) costs less than counted here: possible for all tensors",
        "  of ViT-B but fc1's g and fc2's x (77 MB).",
        "- `ht_int4` and `int8` go over each token of x twice, the second time in the caches (a program takes as few",
        "  tokens as that asks for, 8 to 32), and store with the tokens innermost: the products read them as they are.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(page(H200))
    print(args.output)


if __name__ == "__main__":
    main()

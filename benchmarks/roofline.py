"""Bytes and operations of every step of a HOT layer, and the ceilings that follow: docs/results/roofline.md.

    python benchmarks/roofline.py

Nothing is measured here. ``must`` counts every input once and every output once; ``moves`` is what the Triton kernels
read from memory and write to it by construction, operands of a product once (the repeats come from L2); ``cached`` is
what they read a second time and an ideal L2 cache still holds.
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
    cache: float = 50 * 2**20  # bytes of L2
    processors: int = 132
    shared: int = 227 * 2**10  # bytes of shared memory per processor that a kernel can have

    @property
    def on_chip(self) -> float:
        """Bytes that programs can hold in shared memory across a barrier."""
        return self.processors * self.shared

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
    """One kernel (with its second launch). operations: of integer products, a multiply-add is two; cached: bytes read
    from L2 that ``moves`` leaves out. They cost no time here, so that ``seconds`` is a lower bound."""

    name: str
    phase: str
    must: float
    moves: float
    operations: float = 0.0
    cached: float = 0.0

    def seconds(self, device: Device, int8: float) -> float:
        return max(self.moves / device.copy, self.operations / int8)

    def bound(self, device: Device) -> str:
        return "memory" if self.moves / device.copy > self.operations / device.int8 else "product"


def maxima(rows: int, columns: int) -> float:
    """Bytes of the tile maxima along one axis of (rows, columns): written, then read by the reduction."""
    return 2 * 4 * -(-rows // TILE_ROWS) * columns


def found(read: float, written: float, between: float, cache: float) -> float:
    """Of ``read`` bytes, what a second pass in the opposite order finds in a cache that drops what is oldest, if
    ``between`` bytes were written after the first pass and ``written`` are, evenly, during the second."""
    return min(read, max(0.0, cache - between) / (1 + written / read))


def tokens_per_program(device: Device, row_bytes: float) -> int:
    """As ``hot_hf.ops.triton.tuning``, which says why."""
    return next((t for t in (32, 16) if 2.5 * t * row_bytes <= device.cache / device.processors), 8)


def twice(name: str, phase: str, read: float, written: float, maxima: float, device: Device) -> Step:
    """A quantizer of two launches, the second in the opposite order."""
    cached = found(read, written, maxima / 2, device.cache)
    return Step(name, phase, read + written, 2 * read - cached + written + maxima, cached=cached)


def in_steps(name: str, phase: str, tokens: int, row: float, row_written: float, device: Device) -> Step:
    """A quantizer whose programs go over their own rows twice, two programs at a time per processor."""
    at_a_time = min(tokens, 2 * device.processors * tokens_per_program(device, row))
    cached = tokens / at_a_time * found(at_a_time * row, at_a_time * row_written, 0, device.cache)
    must = tokens * (row + row_written)
    return Step(name, phase, must, must + tokens * row - cached, cached=cached)


def kept_rows(tokens: int, config: HOTConfig) -> int:
    """The contraction of grad_weight's product."""
    if not config.activation_format.startswith("hla"):
        return tokens
    return padded(tokens, TOKEN_BLOCK) // TOKEN_BLOCK * config.rank


def steps(
    tokens: int, inputs: int, outputs: int, config: HOTConfig, size: int = 2, device: Device = H200
) -> list[Step]:
    """The steps of one layer's forward and backward, gradients and weights of ``size`` bytes an element."""
    n, i, o = tokens, inputs, outputs
    bits, fmt = config.grad_input_bits, config.activation_format
    kept_bytes = 0.5 if fmt.endswith("int4") else 1.0
    depth = kept_rows(n, config)
    x_out, g_width, w_out = kept_bytes * depth * i, bits / 8 * n * o, bits / 8 * o * i
    g_maxima = maxima(n, o) + 2 * 4 * n * -(-o // TILE_COLUMNS)
    if fmt.startswith("hla"):
        x = twice("x: project, quantize", "forward", size * n * i, x_out, maxima(n, i), device)
    else:
        x = in_steps("x: transform, quantize", "forward", n, size * i, kept_bytes * i, device)
    return [
        x,
        twice("g: both quantizations", "backward", size * n * o, g_width + depth * o, g_maxima, device),
        twice("W: transform, quantize", "backward", size * o * i, w_out, maxima(o, i), device),
        Step("grad_input", "backward", *[g_width + w_out + size * n * i] * 2, 2 * n * o * i),
        Step("grad_weight", "backward", *[depth * o + x_out + size * o * i] * 2, 2 * depth * o * i),
    ]


@dataclass(frozen=True)
class WaysOverG:
    """Bytes of memory traffic for both quantizations of g, from g to its integers, by three ways.

    second_read: as the kernels do. float32: one read by programs of whole rows, which store what is quantized along the
    tokens as float32 until its scales are known. barrier: one read, g kept in shared memory until all programs have
    met; None where it does not fit. g: its own bytes; cached: of the second read.
    """

    g: float
    second_read: float
    cached: float
    float32: float
    barrier: float | None


def ways_over_g(tokens: int, outputs: int, config: HOTConfig, size: int = 2, device: Device = H200) -> WaysOverG:
    n, o, depth = tokens, outputs, kept_rows(tokens, config)
    g, integers = size * n * o, config.grad_input_bits / 8 * n * o + depth * o
    step = steps(n, o, o, config, size, device)[1]
    stored, of_features = 4 * depth * o, maxima(n, o)
    again = stored - found(stored, depth * o, of_features / 2, device.cache)
    once = g + integers + of_features
    return WaysOverG(g, step.moves, step.cached, once + stored + again, once if g <= device.on_chip else None)


def speedups(
    tokens: int, inputs: int, outputs: int, config: HOTConfig, device: Device, int8: float
) -> tuple[float, float]:
    """Ceilings of backward, and of forward + backward, against bfloat16 products at their measured rate."""
    product = 2 * tokens * inputs * outputs / device.bfloat16
    seconds = {"forward": 0.0, "backward": 0.0}
    for step in steps(tokens, inputs, outputs, config, device=device):
        seconds[step.phase] += step.seconds(device, int8)
    return 2 * product / seconds["backward"], 3 * product / (product + sum(seconds.values()))


def page(device: Device) -> str:
    lines = [
        "# What the hardware allows",
        "",
        f"Written by `python benchmarks/roofline.py`; counted, not measured. {device.name}: {device.copy / 1e12:.1f}",
        f"TB/s copy and {device.bfloat16 / 1e12:.0f} TFLOP/s bfloat16 (measured), {device.int8 / 1e12:,.0f} TOP/s int8 "
        "(datasheet). A step takes at least the",
        "longer of its bytes and its operations; steps follow one another. The baseline is the bfloat16 products",
        f"alone, at their measured rate. What a second read finds in the L2 cache ({device.cache / 2**20:.0f} MiB, "
        "oldest out first) is counted",
        "apart and costs no time here: its bandwidth was not measured.",
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
            "| layer | step | must move, MB | moves, MB | and from L2, MB | G operations | at least, us | bound by |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for name, n, i, o in SHAPES:
            for step in steps(n, i, o, config, device=device):
                numbers = " | ".join(f"{b / 1e6:.1f}" for b in (step.must, step.moves, step.cached))
                numbers += f" | {step.operations / 1e9:.1f}"
                microseconds = step.seconds(device, device.int8) * 1e6
                lines.append(f"| {name} | {step.name} | {numbers} | {microseconds:.1f} | {step.bound(device)} |")
    lines += ["", *again(device)]
    return "\n".join(lines) + "\n"


def again(device: Device) -> list[str]:
    """The section on what is read more than once."""
    lines = [
        "## Why g is read twice",
        "",
        "Scales over tokens need all of g before the first integer. Three ways from g to both its quantizations,",
        "counted, not measured, in MB from and to memory:",
        "",
        "- second read: as the kernels do. The second launch takes the tiles in the opposite order, with only the",
        "  reduction of the maxima in between, and finds in L2 what still lies there.",
        "- float32: one read of g, and the values that are quantized along the tokens stored in float32 until their",
        "  scales are known, then read (from L2 where they lie there). As bfloat16 they would give other integers.",
        f"- barrier: one read, g held in shared memory ({device.on_chip / 1e6:.1f} MB on all "
        f"{device.processors} processors) until all programs have met.",
        "",
        "| layer | config | g | second read | and from L2 | float32 | barrier |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, n, _, o in SHAPES:
        for label in ("default", "fast"):
            ways = ways_over_g(n, o, CONFIGS[label], device=device)
            barrier = "does not fit" if ways.barrier is None else f"{ways.barrier / 1e6:.1f}"
            numbers = (ways.g, ways.second_read, ways.cached, ways.float32)
            lines.append(f"| {name} | {label} | " + " | ".join(f"{b / 1e6:.1f}" for b in numbers) + f" | {barrier} |")
    return [
        *lines,
        "",
        "Storing float32 moves more than the second read for every layer. A g that fits in shared memory fits in L2 as",
        "well, so that a barrier would save reads from L2 and the row maxima, not a read of memory.",
        "",
        "## What else is read twice",
        "",
        "- W, and an x that is projected: the same two launches, in the same opposite orders.",
        "- x of `ht_int4` and `int8`: each program goes over its tokens twice, the second time back from the end. It",
        "  takes as few tokens (8 to 32) as let two programs per processor find theirs in L2; at 8 they may not. It",
        "  stores with the tokens innermost, so that grad_weight's product reads what was kept without a copy. Fewer",
        "  than 32 leave parts of 32-byte sectors for L2 to put together: more requests to it, not counted here.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(page(H200))
    print(args.output)


if __name__ == "__main__":
    main()

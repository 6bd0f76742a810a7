"""``hot-hf doctor --tune``: from which width on a HOT layer is faster than an exact one, on this machine."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import nn
from tqdm import tqdm

from ..config import HOTConfig
from ..patching import apply_hot

WIDTHS = (64, 128, 256, 512, 1024, 2048)
ROUNDS = 15


@dataclass(frozen=True)
class Timing:
    """Medians of forward and backward of one square layer, in seconds, and the median ratio of neighbouring samples."""

    width: int
    exact: float
    hot: float
    ratio: float  # above 1: HOT is faster


def _layer(width: int, device: torch.device, dtype: torch.dtype, config: HOTConfig | None) -> nn.Linear:
    layer = nn.Linear(width, width, device=device, dtype=dtype)
    if config is not None:
        apply_hot(layer, config)
    return layer


def _seconds(layer: nn.Linear, x: torch.Tensor, g: torch.Tensor) -> float:
    x.grad = layer.weight.grad = layer.bias.grad = None
    start = time.perf_counter()
    layer(x).backward(g)
    if x.device.type != "cpu":
        torch.accelerator.synchronize(x.device)
    return time.perf_counter() - start


def measure_widths(
    config: HOTConfig,
    tokens: int = 2048,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    widths: tuple[int, ...] = WIDTHS,
    rounds: int | None = None,
) -> list[Timing]:
    """Time square layers exact and with ``config``, taking turns.

    Args:
        tokens: rows of the input (tokens, width); dtype, device: of input and weight; rounds: samples of each.
    """
    granularity = "per_token" if config.grad_input_granularity == "lqs" else config.grad_input_granularity
    config = replace(
        config, min_features=1, compress="inputs", grad_input_granularity=granularity
    )  # no measuring phase
    device, timings = torch.device(device), []
    for width in tqdm(widths, desc="widths", leave=False):
        exact, hot = _layer(width, device, dtype, None), _layer(width, device, dtype, config)
        x = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)
        g = torch.randn(tokens, width, device=device, dtype=dtype)
        pairs = [(_seconds(exact, x, g), _seconds(hot, x, g)) for _ in range((rounds or ROUNDS) + 1)]
        del pairs[0]  # warms up
        exact_times, hot_times = zip(*pairs, strict=True)
        timings.append(Timing(width, median(exact_times), median(hot_times), median(e / h for e, h in pairs)))
    return timings


def crossover(timings: list[Timing]) -> int | None:
    """The smallest width from which on HOT was never slower; None if it was at the largest."""
    found = None
    for timing in sorted(timings, key=lambda t: -t.width):
        if timing.ratio < 1:
            break
        found = timing.width
    return found


def report(timings: list[Timing], title: str) -> str:
    """A table, and what to write into the configuration."""
    lines = [title, f"{'in = out':>10}{'exact, ms':>12}{'HOT, ms':>12}{'times exact':>13}"]
    lines += [f"{t.width:>10}{t.exact * 1e3:>12.3g}{t.hot * 1e3:>12.3g}{t.ratio:>13.2f}" for t in timings]
    width = crossover(timings)
    if width is None:
        lines.append("HOT is not faster at any of these widths: use it here for memory, not for speed.")
    else:
        lines.append(
            f"For speed: HOTConfig(min_features={width}). Narrower layers stay exact then, and keep their whole input."
        )
    return "\n".join(lines)

"""Launching: on the tensor's device, with the options that keep float operations those of the reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def on_device(device: torch.device):
    """A context in which ``device`` is the current one: Triton launches on the current device, not the tensor's."""
    if device.type == "cpu":  # the interpreter
        return nullcontext()
    return torch.get_device_module(device).device(device)


@dataclass(frozen=True)
class Launch:
    """What would have run: see ``recording``."""

    kernel: Any
    args: tuple
    constants: dict[str, Any]
    warps: int
    stages: int


_recorded: list[Launch] | None = None


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Collect launches instead of running them, for compilation ahead of time; launchers then take meta tensors."""
    global _recorded
    before, _recorded = _recorded, []
    try:
        yield _recorded
    finally:
        _recorded = before


def launch(kernel, grid: tuple[int, ...], like: Tensor, *args, warps: int, stages: int = 1, **constants) -> None:
    """Run ``kernel`` on ``like``'s device. ``enable_fp_fusion`` stays off: a fused multiply-add rounds once, not twice,
    and integers would differ from the reference."""
    if _recorded is not None:
        _recorded.append(Launch(kernel, args, constants, warps, stages))
        return
    with on_device(like.device):
        kernel[grid](*args, **constants, num_warps=warps, num_stages=stages, enable_fp_fusion=False)


def log2(n: int) -> int:
    """Of a power of two."""
    return n.bit_length() - 1


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()

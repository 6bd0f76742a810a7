"""Launching: on the tensor's device, with the options that keep float operations those of the reference."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor


def on_device(device: torch.device):
    """A context in which ``device`` is the current one: Triton launches on the current device, not the tensor's."""
    if device.type == "cpu":  # the interpreter
        return nullcontext()
    return torch.get_device_module(device).device(device)


def launch(kernel, grid: tuple[int, ...], like: Tensor, *args, warps: int, stages: int = 1, **constants) -> None:
    """Run ``kernel`` on ``like``'s device. ``enable_fp_fusion`` stays off: a fused multiply-add rounds once, not twice,
    and integers would differ from the reference."""
    with on_device(like.device):
        kernel[grid](*args, **constants, num_warps=warps, num_stages=stages, enable_fp_fusion=False)


def log2(n: int) -> int:
    """Of a power of two."""
    return n.bit_length() - 1


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()

"""Bytes of an optimizer's state, by formula: it exists only after a first step."""

from __future__ import annotations

from torch import nn

OPTIMIZERS = ("adamw", "adamw_8bit", "adafactor", "momentum", "sgd")


def optimizer_bytes(model: nn.Module, optimizer: str) -> int:
    """State of ``optimizer`` for the trainable parameters, as torch, transformers and bitsandbytes allocate it."""
    total = 0
    for p in model.parameters():
        if not p.requires_grad:
            continue
        if optimizer == "adamw":
            total += 2 * p.numel() * p.element_size() + 4  # and the step
        elif optimizer == "adamw_8bit":  # bitsandbytes: small tensors stay whole; one float32 scale per 256 values
            total += 2 * (p.numel() + 4 * -(-p.numel() // 256)) if p.numel() >= 4096 else 8 * p.numel()
        elif optimizer == "adafactor":
            total += 4 * (p.numel() // p.shape[-1] + p.numel() // p.shape[-2] if p.dim() > 1 else p.numel())
        elif optimizer == "momentum":
            total += p.numel() * p.element_size()
        elif optimizer != "sgd":
            raise ValueError(f"optimizer {optimizer!r} is not known; choose one of {list(OPTIMIZERS)}.")
    return total

"""Which backend computes for a tensor: chosen by its device, never by a global switch."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch

from . import cpu, reference


def backend_for(x: torch.Tensor) -> ModuleType:
    """The module whose primitives run on ``x``'s device; the plain torch path where no kernels exist."""
    return _backend(x.device.type, x.device.index)


@cache
def _backend(device_type: str, index: int | None) -> ModuleType:
    return cpu if device_type == "cpu" else reference

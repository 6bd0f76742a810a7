"""What each mode of a block costs in time, relative to the block's exact forward and backward."""

from __future__ import annotations

import torch

# Whole steps of ViT-B and SmolLM2 on a CPU (docs/results/bench.md, docs/results/memory.md). Only their order and rough
# distance matter: they decide which block gives up speed first. Checkpointing adds a forward, a third of the step.
FLOAT32 = {"exact": 1.0, "inputs": 0.75, "block": 0.9, "checkpoint": 0.75 + 1 / 3}
# Where the device multiplies the model's type natively, exact products are as fast as HOT's. Of GPUs nothing was
# measured; this order is assumed there for every type.
NATIVE = {"exact": 1.0, "inputs": 1.05, "block": 1.2, "checkpoint": 1.05 + 1 / 3}


def relative_costs(device: str, dtype: torch.dtype) -> dict[str, float]:
    """Mode to time, for blocks that compute in ``dtype`` on a device of type ``device``."""
    return FLOAT32 if device == "cpu" and dtype in (torch.float32, torch.float64) else NATIVE

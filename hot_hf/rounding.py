"""The key of stochastic rounding: (seed, layer, step, rank), with no generator and no global state."""

from __future__ import annotations

import zlib

import torch

_MASK = (1 << 64) - 1


def _mix(z: int) -> int:
    """SplitMix64's finalizer: neighbouring keys give unrelated streams."""
    z = (z + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def layer_seed(seed: int, layer: str, step: int) -> int:
    """A non-negative 62-bit key for one layer in one step on this rank; ``+ 1`` to ``+ 3`` are other operands'."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if distributed else 0
    key = 0
    for part in (seed, zlib.crc32(layer.encode()), step, rank):
        key = _mix(key ^ _mix(part))
    return key >> 4 << 2 & (1 << 62) - 1


class StepClock:
    """The step number of one model, shared by its layers.

    It advances at the first forward after a backward, but never inside a backward: a checkpointed recompute sees the
    step of the forward that it repeats. ``HOTCallback`` or a loop of one's own may ``set`` it instead.
    """

    def __init__(self) -> None:
        self.step = 0
        self._backward_seen = False

    def forward(self) -> int:
        inside_backward = torch._C._current_graph_task_id() != -1
        if self._backward_seen and not inside_backward:
            self.step += 1
            self._backward_seen = False
        return self.step

    def backward(self, grad=None) -> None:
        self._backward_seen = True

    def set(self, step: int) -> None:
        """Continue from ``step``, so that a resumed run rounds as the uninterrupted one would have."""
        self.step, self._backward_seen = step, False

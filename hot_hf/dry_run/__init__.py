"""A model's training step on tensors without data: what it keeps and what it takes at its peak, before it is run."""

from .autocast import FakeAutocast
from .live import LiveBytes
from .meta import MetaForward, device_type
from .optimizer import OPTIMIZERS, optimizer_bytes
from .step import DryRun, StepBytes, batch_without_data, without_data

__all__ = [
    "OPTIMIZERS",
    "DryRun",
    "FakeAutocast",
    "LiveBytes",
    "MetaForward",
    "StepBytes",
    "batch_without_data",
    "device_type",
    "optimizer_bytes",
    "without_data",
]

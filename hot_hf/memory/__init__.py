"""Bytes kept for the backward: measured on a living model, and estimated from a configuration alone."""

from .prediction import Estimate, Estimator, estimate, largest_batch
from .saved import KeptStorage, Measurement, SavedTensors, measure

__all__ = [
    "Estimate",
    "Estimator",
    "KeptStorage",
    "Measurement",
    "SavedTensors",
    "estimate",
    "largest_batch",
    "measure",
]

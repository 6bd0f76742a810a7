"""Bytes kept for the backward: measured on a living model, and estimated from a configuration alone."""

from .prediction import Estimate, Estimator, estimate, largest_batch
from .saved import Kept, Measurement, SavedTensors, measure

__all__ = ["Estimate", "Estimator", "Kept", "Measurement", "SavedTensors", "estimate", "largest_batch", "measure"]

"""The arithmetic of HOT: torch operators (``operators.py``) on the backend of each tensor's device."""

from . import reference
from .backend import REFERENCE, Backend
from .dispatch import backend_for
from .operators import (
    FORMATS,
    GRAD_INPUT_SEED,
    GRAD_WEIGHT_SEED,
    OPERATORS,
    compress,
    grad_both,
    grad_input,
    grad_weight,
)

__all__ = [
    "FORMATS",
    "GRAD_INPUT_SEED",
    "GRAD_WEIGHT_SEED",
    "OPERATORS",
    "REFERENCE",
    "Backend",
    "backend_for",
    "compress",
    "grad_both",
    "grad_input",
    "grad_weight",
    "reference",
]

"""Hadamard-based optimized training (HOT) for Hugging Face models."""

from .config import HOTConfig
from .layers import HOTLinear
from .patching import HOTPatchError, apply_hot, remove_hot
from .report import CoverageReport
from .selection import fix_selection

__all__ = [
    "CoverageReport",
    "HOTConfig",
    "HOTLinear",
    "HOTPatchError",
    "apply_hot",
    "fix_selection",
    "remove_hot",
]
__version__ = "0.1.0"

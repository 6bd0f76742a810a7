"""Hadamard-based optimized training (HOT) for Hugging Face models."""

from importlib import import_module

from .config import HOTConfig
from .layers import HOTLinear
from .patching import HOTPatchError, apply_hot, remove_hot, report_of
from .report import CoverageReport
from .selection import fix_selection

__all__ = [
    "CoverageReport",
    "HOTCallback",
    "HOTConfig",
    "HOTLinear",
    "HOTPatchError",
    "apply_hot",
    "fix_selection",
    "install",
    "remove_hot",
    "report_of",
    "uninstall",
]
__version__ = "0.1.0"

_LAZY = {"HOTCallback": ".callback", "install": ".auto", "uninstall": ".auto"}


def __getattr__(name: str):
    """What needs transformers is imported when it is asked for; ``AutoModelFor...`` are those of ``hot_hf.auto``."""
    module = ".auto" if name.startswith("AutoModel") else _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module, __name__), name)

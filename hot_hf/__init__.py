"""Hadamard-based optimized training (HOT) for Hugging Face models."""

from importlib import import_module
from typing import TYPE_CHECKING

from ._version import __version__ as __version__
from .config import HOTConfig
from .layers import HOTLinear
from .patching import HOTPatchError, apply_hot, remove_hot, report_of
from .plan import Plan
from .report import CoverageReport
from .saving import config_of
from .selected_plan import SelectedPlan
from .selection import fix_selection

if TYPE_CHECKING:
    from .auto import install, uninstall
    from .callback import HOTCallback

__all__ = [
    "CoverageReport",
    "HOTCallback",
    "HOTConfig",
    "HOTLinear",
    "HOTPatchError",
    "Plan",
    "SelectedPlan",
    "apply_hot",
    "config_of",
    "fix_selection",
    "install",
    "remove_hot",
    "report_of",
    "uninstall",
]
# What needs transformers is imported when it is asked for.
_LAZY = {"HOTCallback": ".callback", "install": ".auto", "uninstall": ".auto"}


def __getattr__(name: str):
    """``HOTCallback``, ``install``, and ``AutoModelFor...``, which are those of ``hot_hf.auto``."""
    module = ".auto" if name.startswith("AutoModel") else _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module, __name__), name)


def __dir__() -> list[str]:
    """Also the Auto classes, which are made when they are asked for."""
    from .auto import auto_names

    return sorted({*globals(), *__all__, *auto_names()})

"""A step that fits: for each block the mode of ``compress`` with which the predicted peak stays within a budget."""

from .at_run import configure_fit, fit_at_run, forget_fit, notes_on_fit
from .costs import relative_costs
from .fitter import Fitted, Fitter, largest_that_fits

__all__ = [
    "Fitted",
    "Fitter",
    "configure_fit",
    "fit_at_run",
    "forget_fit",
    "largest_that_fits",
    "notes_on_fit",
    "relative_costs",
]

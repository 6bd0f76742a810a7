"""What each layer does, chosen from its own gradients: the paper's LQS, or plans within a budget."""

from .budget import Budget
from .fix import fix_selection
from .lqs import GranularityProbe
from .probe import BudgetProbe

__all__ = ["Budget", "BudgetProbe", "GranularityProbe", "fix_selection"]

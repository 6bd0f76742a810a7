"""What each layer does, chosen from its own gradients: the paper's LQS, or plans within a budget."""

from .fix import fix_selection
from .lqs import GranularityProbe

__all__ = ["GranularityProbe", "fix_selection"]

"""The end of measuring, on all ranks at once."""

from __future__ import annotations

import torch
from torch import nn

from ..config import Plan
from .lqs import GranularityProbe


def fix_selection(model: nn.Module) -> dict[str, Plan]:
    """End measuring now: reduce over ranks if there are several, and give every probed layer its plan.

    With several processes it must be called on all of them, at the same step.

    Returns:
        plan by layer name. A layer that recorded nothing gets per_token from lqs, the safer choice.
    """
    measuring = [m for m in model.modules() if getattr(m, "hot", None) is not None and m.hot.probe is not None]
    device = next(model.parameters()).device if measuring else torch.device("cpu")
    probed = [m.hot for m in measuring if isinstance(m.hot.probe, GranularityProbe)]
    chosen = {}
    if probed:
        errors = add_over_ranks(torch.tensor([hot.probe.summary for hot in probed]).double(), device)
        for hot, summary in zip(probed, errors.tolist(), strict=True):
            hot.plan, hot.probe = hot.probe.conclude(summary), None
            chosen[hot.name] = hot.plan
    return chosen


def add_over_ranks(values: torch.Tensor, device: torch.device, largest: bool = False) -> torch.Tensor:
    """The sum (or maximum) of a CPU tensor over all ranks, communicated on ``device``; itself in one process."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return values
    values = values.to(device)
    op = torch.distributed.ReduceOp.MAX if largest else torch.distributed.ReduceOp.SUM
    torch.distributed.all_reduce(values, op)
    return values.cpu()

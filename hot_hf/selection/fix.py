"""The end of measuring, on all ranks at once."""

from __future__ import annotations

from dataclasses import astuple

import torch
from torch import nn

from ..layer_kinds import hot_layers
from ..plan import Plan
from .candidates import Shape
from .lqs import GranularityProbe
from .probe import BudgetProbe


def fix_selection(model: nn.Module) -> dict[str, Plan]:
    """End measuring now: reduce over ranks if there are several, and give every probed layer its plan.

    With several processes it must be called on all of them, at the same step.

    Returns:
        plan by layer name. A layer that recorded nothing gets per_token from lqs, the safer choice, and its configured
        plan from a budget.

    Raises:
        ValueError: when ``max_bytes`` cannot be met.
    """
    measuring = [m for m in hot_layers(model) if m.hot.probe is not None]
    device = next(model.parameters()).device if measuring else torch.device("cpu")
    probed = [m.hot for m in measuring if isinstance(m.hot.probe, GranularityProbe)]
    chosen = {}
    if probed:
        errors = add_over_ranks(torch.tensor([hot.probe.summary for hot in probed]).double(), device)
        for hot, summary in zip(probed, errors.tolist(), strict=True):
            hot.take(hot.probe.conclude(summary))
            chosen[hot.name] = hot.plan
    budgeted = [m.hot for m in measuring if isinstance(m.hot.probe, BudgetProbe)]
    for budget in {id(hot.probe.budget): hot.probe.budget for hot in budgeted}.values():
        if budget.choices is None:
            probes = [hot.probe for hot in budgeted if hot.probe.budget is budget]
            _reduce(probes, device)
            budget.choose(probes)
    for hot in budgeted:
        hot.take(hot.probe.decided())
        chosen[hot.name] = hot.plan
    return chosen


def _reduce(probes: list[BudgetProbe], device: torch.device) -> None:
    """Give all ranks the same measurements: sums of what was recorded, the largest of sizes."""
    sums = torch.stack([
        torch.cat((torch.tensor([p.recorded]).double(), p.input_sums.vector(), p.weight_sums.vector())) for p in probes
    ])  # fmt: skip
    place = {p.name: i for i, p in enumerate(probes)}
    sizes = torch.tensor([
        (
            p.tokens, p.uses, p.needs_input, p.needs_weight, *(astuple(p.shape)[1:] if p.shape else (0,) * 5),
            -place.get(p.leader, i),  # where ranks differ, the smallest
        )
        for i, p in enumerate(probes)
    ])  # fmt: skip
    sums, sizes = add_over_ranks(sums, device), add_over_ranks(sizes, device, largest=True)
    for probe, total, size in zip(probes, sums, sizes.tolist(), strict=True):
        split = 1 + probe.input_sums.vector().numel()
        probe.recorded = int(total[0])
        probe.input_sums.set(total[1:split])
        probe.weight_sums.set(total[split:])
        probe.tokens, probe.uses, needs_input, needs_weight, *shape, leader = size
        probe.needs_input, probe.needs_weight = bool(needs_input), bool(needs_weight)
        probe.shape = Shape(probe.tokens, *shape)
        probe.leader = probes[-leader].name


def add_over_ranks(values: torch.Tensor, device: torch.device, largest: bool = False) -> torch.Tensor:
    """The sum (or maximum) of a CPU tensor over all ranks, communicated on ``device``; itself in one process."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return values
    values = values.to(device)
    op = torch.distributed.ReduceOp.MAX if largest else torch.distributed.ReduceOp.SUM
    torch.distributed.all_reduce(values, op)
    return values.cpu()

"""HOTLinear: nn.Linear with HOT's backward. Made by swapping the class of a living module, never built by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MethodType
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import compiling
from .autograd import HOTFunction
from .buffer import compress
from .config import HOTConfig
from .layer_plan import Plan
from .rounding import StepClock, layer_seed
from .selection import BudgetProbe, Choice, GranularityProbe

if TYPE_CHECKING:
    from .monitor import KeptMeter


@dataclass
class HOTState:
    """What apply_hot leaves on a module, as the plain attribute ``hot``: no tensor, no buffer, no parameter."""

    name: str
    original_class: type
    plan: Plan
    seed: int = 0
    share: bool = True
    clock: StepClock = field(default_factory=StepClock)
    probe: GranularityProbe | BudgetProbe | None = None
    choice: Choice | None = None  # what a budget measured of the plan
    called: bool = False
    config: HOTConfig | None = None  # of the whole model, shared by its layers
    meter: KeptMeter | None = None  # counts what is kept while a callback measures
    traces: int = field(default_factory=lambda: compiling.traces)  # of any layer, before this one was patched

    def __post_init__(self) -> None:
        compiling.count_layer(self)

    def enter(self) -> None:
        """What every forward does first: note the call."""
        if torch.compiler.is_compiling():
            p = self.plan  # by value: as an argument it would be guarded by identity, a version for every layer
            compiling.tracing(
                p.grad_input_bits, p.grad_input_granularity, p.activation_format, p.rank, p.block_size,
                p.token_grid is not None,
            )  # fmt: skip
        else:
            self.called = True


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is split over processes; by name, so that torch.distributed.tensor is not imported."""
    return type(tensor).__name__ == "DTensor"


def hot_linear(hot: HOTState, x: Tensor, weight: Tensor, bias: Tensor | None, part: str = "") -> Tensor:
    """``F.linear(x, weight, bias)``, bit for bit, with the backward that ``hot`` plans.

    ``weight`` may be a view of the Parameter; ``part`` names it where one module holds several. While a selection
    measures, and under stochastic rounding, which draws anew in every step, a compiled model leaves its graph here.
    """
    if hot.probe is None and hot.plan.rounding != "stochastic":
        return _linear(hot, x, weight, bias, part)
    if torch.compiler.is_compiling():
        return compiling.outside_graph(_stateful_linear, hot, x, weight, bias, part)
    return _stateful_linear(hot, x, weight, bias, part)


def _stateful_linear(hot: HOTState, x: Tensor, weight: Tensor, bias: Tensor | None, part: str) -> Tensor:
    if hot.probe is not None and (choice := hot.probe.ready()) is not None:
        hot.plan, hot.choice, hot.probe = choice, hot.probe.choice, None
    return _linear(hot, x, weight, bias, part)


def _linear(hot: HOTState, x: Tensor, weight: Tensor, bias: Tensor | None, part: str) -> Tensor:
    plan = hot.plan
    # Counted without gradients too: the first pass of reentrant checkpointing is the forward of its step.
    step = hot.clock.forward() if plan.rounding == "stochastic" else 0
    needs_product = x.requires_grad or weight.requires_grad
    if (plan.exact and hot.probe is None) or not needs_product or not torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    if not x.is_floating_point():
        raise TypeError(
            f"{hot.name or 'the root module'}: HOT layers take floating-point inputs, got {x.dtype}; "
            "convert the input, or leave this layer out with HOTConfig(exclude=[...])."
        )
    if is_dtensor(weight) or is_dtensor(x):
        raise RuntimeError(
            f"{hot.name or 'the root module'}: the weight or input is a DTensor, as under tensor or sequence "
            "parallelism. HOT does not split its integer products: use FSDP2 or ZeRO-3 instead, or leave this layer "
            "out with HOTConfig(exclude=[...])."
        )
    if hot.probe is not None:  # measuring: exact meanwhile
        return hot.probe.watch(F.linear(x, weight, bias), x, weight)
    seed = 0
    if plan.rounding == "stochastic":
        seed = layer_seed(hot.seed, f"{hot.name}.{part}" if part else hot.name, step)
    kept = scale = None
    if weight.requires_grad:
        kept, scale = (x, None) if plan.activation_format == "none" else compress(x, plan, seed, hot.share)
        if hot.meter is not None and not torch.compiler.is_compiling():
            hot.meter.add(kept, scale)
    y = HOTFunction.apply(x, weight, bias, kept, scale, plan, seed)
    if plan.rounding == "stochastic":
        y.register_hook(hot.clock.backward)
    return y


class HOTMixin:
    """The forward of every patched layer; ``hot`` is its HOTState."""

    hot: HOTState

    def forward(self, input: Tensor) -> Tensor:
        self.hot.enter()
        return hot_linear(self.hot, input, self.weight, self.bias)

    @property
    def matrix(self) -> Tensor:
        """The weight as (out_features, in_features)."""
        return self.weight

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, hot={self.hot.plan.label()}"


class HOTLinear(HOTMixin, nn.Linear):
    """A patched nn.Linear."""


def swap_class(module: nn.Module, cls: type) -> None:
    """Change the class, and with it the bound forward that accelerate's hooks remember (DESIGN decision 1)."""
    old = type(module).forward
    module.__class__ = cls
    for attribute in ("forward", "_old_forward"):
        if getattr(module.__dict__.get(attribute), "__func__", None) is old:
            module.__dict__[attribute] = MethodType(cls.forward, module)

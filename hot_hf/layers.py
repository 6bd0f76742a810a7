"""HOTLinear: nn.Linear with HOT's backward. Made by swapping the class of a living module, never built by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import gradients, torch_compile
from .autograd import HOTFunction
from .class_swap import Swapped, register
from .config import HOTConfig
from .plan import Plan
from .rounding import StepClock, layer_seed
from .selected_plan import Choice


class Probe(Protocol):
    """What measures a layer before its plan is chosen (``selection/``); the layer is exact meanwhile."""

    choice: Choice | None  # what a budget has measured of the plan, once chosen

    def watch(self, y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """What the layer returns in place of its output ``y``, equal to it, so that its gradient is seen."""

    def ready(self) -> Plan | None:
        """The plan, once enough was measured."""


class Meter(Protocol):
    """What counts the bytes that layers keep, while somebody measures."""

    def add(self, *tensors: Tensor | None) -> None: ...


@dataclass
class HOTState:
    """What apply_hot leaves on a module, as the plain attribute ``hot``: no tensor, no buffer, no parameter."""

    name: str
    plan: Plan
    config: HOTConfig  # of the whole model, shared by its layers
    clock: StepClock
    probe: Probe | None = None  # while it measures
    choice: Choice | None = None  # what a budget has measured of the plan
    chosen: bool = False  # the plan, by a selection
    paused: bool = False  # in a block that is exact: the layer is what it was
    called: bool = False
    meter: Meter | None = None
    traces: int = field(default_factory=lambda: torch_compile.traces)  # of any layer, before this one was patched

    def __post_init__(self) -> None:
        torch_compile.count_layer(self)

    def enter(self) -> None:
        """What every forward does first: note the call."""
        if torch.compiler.is_compiling():
            p = self.plan  # by value: as an argument it would be guarded by identity, a version for every layer
            torch_compile.tracing(
                p.grad_input_bits, p.grad_input_granularity, p.activation_format, p.rank, p.block_size
            )
        else:
            self.called = True

    def take(self, plan: Plan) -> None:
        """End measuring, with ``plan``."""
        self.plan, self.choice, self.probe, self.chosen = plan, self.probe.choice, None, True


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is split over processes; by name, so that torch.distributed.tensor is not imported."""
    return type(tensor).__name__ == "DTensor"


def hot_linear(hot: HOTState, x: Tensor, weight: Tensor, bias: Tensor | None, part: str = "") -> Tensor:
    """``F.linear(x, weight, bias)``, bit for bit, with the backward that ``hot`` plans.

    ``weight`` may be a view of the Parameter; ``part`` names it where one module holds several. While a selection
    measures, and under stochastic rounding, which draws anew in every step, a compiled model leaves its graph here.
    """
    if torch_compile.is_plain_here() or not isinstance(x, Tensor):  # a Proxy of torch.fx
        return F.linear(x, weight, bias)
    if hot.probe is None and hot.plan.rounding != "stochastic":
        return _linear(hot, x, weight, bias, part)
    if torch.compiler.is_compiling():
        return torch_compile.outside_graph(_stateful_linear, hot, x, weight, bias, part)
    return _stateful_linear(hot, x, weight, bias, part)


def _stateful_linear(hot: HOTState, x: Tensor, weight: Tensor, bias: Tensor | None, part: str) -> Tensor:
    if hot.probe is not None and (plan := hot.probe.ready()) is not None:
        hot.take(plan)
    return _linear(hot, x, weight, bias, part)


def _linear(hot: HOTState, x: Tensor, weight: Tensor, bias: Tensor | None, part: str) -> Tensor:
    plan = hot.plan
    # Counted without gradients too: the first pass of reentrant checkpointing is the forward of its step.
    step = hot.clock.forward() if plan.rounding == "stochastic" else 0
    needs_product = x.requires_grad or weight.requires_grad
    if (plan.exact and hot.probe is None) or hot.paused or not needs_product or not torch.is_grad_enabled():
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
        seed = layer_seed(hot.config.seed, f"{hot.name}.{part}" if part else hot.name, step)
    kept = scale = None
    if weight.requires_grad:
        kept, scale = gradients.keep(x, plan, seed, hot.config.share)
        if hot.meter is not None and not torch.compiler.is_compiling():
            hot.meter.add(kept, scale)
    y = HOTFunction.apply(x, weight, bias, kept, scale, plan, seed)
    if plan.rounding == "stochastic":
        y.register_hook(hot.clock.backward)
    return y


class HOTMixin(Swapped):
    """The forward of every patched layer; ``hot`` is its HOTState."""

    hot: HOTState

    @classmethod
    def members(cls, original: type) -> dict[str, Any]:
        return {"__name__": f"HOT{original.__name__}", "__module__": __name__}

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

    hot_original_class = nn.Linear


register(HOTMixin, HOTLinear)

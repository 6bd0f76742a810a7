"""HOTLinear: nn.Linear with HOT's backward. Made by swapping the class of a living module, never built by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .autograd import HOTFunction
from .buffer import compress
from .config import Plan
from .rounding import StepClock, layer_seed
from .selection import GranularityProbe


@dataclass
class HOTState:
    """What apply_hot leaves on a module, as the plain attribute ``hot``: no tensor, no buffer, no parameter."""

    name: str
    original_class: type
    plan: Plan
    seed: int = 0
    share: bool = True
    clock: StepClock = field(default_factory=StepClock)
    probe: GranularityProbe | None = None
    called: bool = False


class HOTMixin:
    """The forward of every patched layer; ``hot`` is its HOTState."""

    hot: HOTState

    def forward(self, x: Tensor) -> Tensor:
        hot, weight = self.hot, self.weight
        if not torch.compiler.is_compiling():
            hot.called = True
        if hot.probe is not None and (choice := hot.probe.ready()) is not None:
            hot.plan, hot.probe = choice, None
        plan = hot.plan
        needs_product = x.requires_grad or weight.requires_grad
        if plan.exact or not needs_product or not torch.is_grad_enabled():
            return F.linear(x, weight, self.bias)
        if not x.is_floating_point():
            raise TypeError(
                f"{hot.name or 'the root module'}: HOT layers take floating-point inputs, got {x.dtype}; "
                "convert the input, or leave this layer out with HOTConfig(exclude=[...])."
            )
        if hot.probe is not None:  # measuring: exact meanwhile
            y = F.linear(x, weight, self.bias)
            y.register_hook(hot.probe.record)
            return y
        seed = 0
        if plan.rounding == "stochastic":
            seed = layer_seed(hot.seed, hot.name, hot.clock.forward())
        kept = scale = None
        if weight.requires_grad:
            kept, scale = (x, None) if plan.activation_format == "none" else compress(x, plan, seed, hot.share)
        y = HOTFunction.apply(x, weight, self.bias, kept, scale, plan, seed)
        if plan.rounding == "stochastic":
            y.register_hook(hot.clock.backward)
        return y

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, hot={self.hot.plan.label()}"


class HOTLinear(HOTMixin, nn.Linear):
    """A patched nn.Linear."""


_swapped: dict[type, type] = {nn.Linear: HOTLinear}


def hot_class_of(cls: type) -> type:
    """The patched class of a Linear class; a subclass that was opted in gets one of its own, made once."""
    if cls not in _swapped:
        body = {"__module__": __name__, "__doc__": cls.__doc__, "__reduce_ex__": _reduce}
        _swapped[cls] = type(f"HOT{cls.__name__}", (HOTMixin, cls), body)
    return _swapped[cls]


def _reduce(module: HOTMixin, protocol: int):
    """Copy and pickle by the original class: one made here cannot be imported by name."""
    return _new_patched, (module.hot.original_class,), module.__dict__


def _new_patched(cls: type) -> HOTMixin:
    patched = hot_class_of(cls)
    return patched.__new__(patched)

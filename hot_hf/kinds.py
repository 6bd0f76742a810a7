"""The kinds of layers HOT patches: a new one is a mixin with its forward and a row here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from . import experts
from .conv1d import HOTConv1DMixin, HOTFalconMixin
from .layers import HOTLinear, HOTMixin


@dataclass(frozen=True)
class LayerKind:
    """``mixin`` brings the forward; ``features`` gives (out_features, in_features) of a module, ``weight`` (one of)
    its weights.

    ``measured=False``: the layer takes no part in lqs and keeps per-token scales.
    """

    mixin: type[HOTMixin]
    features: Callable[[nn.Module], tuple[int, int]]
    weight: Callable[[nn.Module], Tensor] = lambda m: m.weight
    measured: bool = True


LINEAR = LayerKind(HOTMixin, lambda m: (m.out_features, m.in_features))
CONV1D = LayerKind(HOTConv1DMixin, lambda m: (m.nf, m.nx))
FALCON = LayerKind(HOTFalconMixin, LINEAR.features)
# How many tokens an expert sees changes with every batch: one scale per tensor, fixed early, would not fit later.
EXPERTS = LayerKind(experts.HOTExpertsMixin, experts.features, experts.first_weight, measured=False)

# By name, so that nothing of transformers is imported to patch a model that does not use it.
KINDS: dict[str, LayerKind] = {
    "torch.nn.modules.linear.Linear": LINEAR,
    "transformers.pytorch_utils.Conv1D": CONV1D,
    "transformers.models.falcon.modeling_falcon.FalconLinear": FALCON,
}


def original_class(module: nn.Module) -> type:
    """The class of ``module`` without HOT."""
    return module.hot.original_class if isinstance(module, HOTMixin) else type(module)


def kind_of(module: nn.Module) -> LayerKind | None:
    """The row of ``module``; None for what is no linear layer, and for subclasses, whose forward may be their own."""
    cls = original_class(module)
    row = KINDS.get(f"{cls.__module__}.{cls.__qualname__}")
    return EXPERTS if row is None and experts.follows_interface(module) else row


def is_linear(module: nn.Module) -> bool:
    """Whether the coverage report lists ``module`` as a linear layer, patched or not."""
    return isinstance(module, nn.Linear) or kind_of(module) is not None


def features(module: nn.Module) -> tuple[int, int]:
    """(out_features, in_features) of a linear layer of any kind; of the first product for experts."""
    return (kind_of(module) or LINEAR).features(module)


_swapped: dict[type, type] = {nn.Linear: HOTLinear}


def hot_class_of(cls: type, mixin: type[HOTMixin] = HOTMixin) -> type:
    """The patched class of a layer's class, made once."""
    if cls not in _swapped:
        body = {"__module__": __name__, "__doc__": cls.__doc__, "__reduce_ex__": _reduce}
        _swapped[cls] = type(f"HOT{cls.__name__}", (mixin, cls), body)
    return _swapped[cls]


def _reduce(module: HOTMixin, protocol: int):
    """Copy and pickle by the original class: one made here cannot be imported by name."""
    cls = module.hot.original_class
    return _new_patched, (cls, hot_class_of(cls).__mro__[1]), module.__dict__


def _new_patched(cls: type, mixin: type[HOTMixin]) -> HOTMixin:
    patched = hot_class_of(cls, mixin)
    return patched.__new__(patched)

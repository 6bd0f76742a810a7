"""The kinds of layers HOT patches: a new one is a mixin with its forward and a row here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from . import experts
from .class_swap import original_class
from .conv1d import HOTConv1DMixin, HOTFalconMixin
from .layers import HOTMixin


@dataclass(frozen=True)
class LayerKind:
    """``mixin`` brings the forward; ``features`` gives (out_features, in_features) of a module, ``weight`` (one of)
    its weights.

    ``measured=False``: the layer takes no part in a selection and keeps per-token scales.
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
LAYER_KINDS: dict[str, LayerKind] = {
    "torch.nn.modules.linear.Linear": LINEAR,
    "transformers.pytorch_utils.Conv1D": CONV1D,
    "transformers.models.falcon.modeling_falcon.FalconLinear": FALCON,
}


def kind_of(module: nn.Module) -> LayerKind | None:
    """The row of ``module``; None for what is no linear layer, and for subclasses, whose forward may be their own."""
    cls = original_class(module)
    row = LAYER_KINDS.get(f"{cls.__module__}.{cls.__qualname__}")
    return EXPERTS if row is None and experts.follows_interface(module) else row


def is_linear(module: nn.Module) -> bool:
    """Whether the coverage report lists ``module`` as a linear layer, patched or not."""
    return isinstance(module, nn.Linear) or kind_of(module) is not None


def kind_or_linear(module: nn.Module) -> LayerKind:
    """The row of a linear layer; that of nn.Linear for its subclasses."""
    return kind_of(module) or LINEAR


def hot_layers(model: nn.Module) -> list[HOTMixin]:
    """The patched layers of ``model``, each once."""
    return [m for m in model.modules() if isinstance(m, HOTMixin)]

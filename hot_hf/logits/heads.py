"""Heads that hand on deferred logits: made by swapping the class of a living module, as HOT layers are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..class_swap import Swapped, own_forward, release, swap, swapped_class
from ..layers import HOTMixin, is_dtensor
from ..saved_hooks import in_backward, in_checkpoint, refuses_hooks
from .cross_entropy import Projection
from .deferred import DeferredLogits
from .steps import HANDLERS as HANDLERS  # filled by its import

# Below this many bytes of logits the loss is computed as ever.
SMALLEST_BYTES = 16 << 20


class HOTHeadMixin(Swapped):
    """A linear output head whose logits are deferred in training, while it has ``hot_head``; they are what they were
    everywhere else."""

    hot_head: bool

    @classmethod
    def members(cls, original: type) -> dict[str, Any]:
        return {"__name__": original.__name__, "__module__": original.__module__}

    def forward(self, input: Tensor) -> Tensor:
        if not (self.training and defers(self)) or _stands_aside(input, self.weight):
            return super().forward(input)
        return DeferredLogits.of(input, self.weight, self.bias, Projection.at(input))


def defers(head: nn.Module) -> bool:
    """Whether ``head`` may hand on deferred logits: not where fully_shard has it released after its forward."""
    return "hot_head" in head.__dict__ and not any(c.__name__ == "FSDPModule" for c in type(head).__mro__)


def _stands_aside(hidden: Tensor, weight: Tensor) -> bool:
    """Whether the logits must be made here: nothing to save, or somebody else decides what is kept or when weights are
    there."""
    if refuses_hooks() or torch.jit.is_tracing() or not torch.is_grad_enabled():
        return True
    if not (hidden.requires_grad or weight.requires_grad) or not hidden.is_floating_point() or hidden.dim() < 2:
        return True
    if hidden.numel() // hidden.shape[-1] * weight.shape[0] * hidden.element_size() < SMALLEST_BYTES:
        return True
    if in_checkpoint() or in_backward():  # a head that is computed again
        return True
    return is_dtensor(weight) or is_dtensor(hidden) or hasattr(weight, "ds_id")  # ZeRO-3 releases it after the head


def defer_heads(heads: list[nn.Module]) -> None:
    """Let those of ``heads``, the layers of a model's output embedding, that are plain linear layers defer their
    logits."""
    for head in heads:
        if isinstance(head, HOTHeadMixin):  # sharded since it was last restored
            head.hot_head = True
        elif type(head) is nn.Linear and own_forward(head) is None:
            head.hot_head = True
            swap(head, swapped_class(HOTHeadMixin, nn.Linear))


def notes_on_heads(model: nn.Module, heads: list[nn.Module]) -> list[str]:
    """Lines for the coverage report: which of ``heads`` defers its logits, which does not and why."""
    names = {id(module): name or "the root module" for name, module in model.named_modules()}
    notes = []
    for head in heads:
        name = names.get(id(head), "the output embedding")
        if isinstance(head, HOTMixin):
            notes.append(f"loss: {name} is patched itself (skip_heads=False): its logits are made whole")
        elif isinstance(head, HOTHeadMixin) and not defers(head):
            notes.append(f"loss: {name} is sharded by itself: its logits are made whole")
        elif not isinstance(head, HOTHeadMixin):
            notes.append(
                f"loss: {name} is a {type(head).__name__} with a forward of its own: its logits are made whole"
            )
        elif name.endswith(".base_layer"):
            notes.append(f"loss: an adapter adds to what {name} gives: the logits are made whole")
        else:
            notes.append(f"loss: in chunks of tokens; the logits of {name} are made where something else reads them")
    return notes


def restore_heads(model: nn.Module) -> None:
    """Let every head be what it was."""
    for module in list(model.modules()):
        if "hot_head" in module.__dict__:
            release(module, "hot_head")

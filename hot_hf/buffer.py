"""Packed activations: one copy per tensor, however many layers read it (SPEC section 4, DESIGN decision 4)."""

from __future__ import annotations

import threading
from collections import OrderedDict

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from . import ops
from .layer_plan import Plan

# q/k/v and gate/up follow each other; every decoder layer returns to the encoder's output after six other tensors.
REMEMBERED = 16


class _Recent(threading.local):
    """The last few compressed tensors of this thread. Everything is held weakly: a freed graph frees its buffers."""

    def __init__(self) -> None:
        self.entries: OrderedDict[tuple, tuple] = OrderedDict()

    def find(self, key: tuple, x: Tensor) -> tuple[Tensor, Tensor] | None:
        entry = self.entries.get(key)
        if entry is None:
            return None
        seen, version, packed, scale = (entry[0](), entry[1], entry[2](), entry[3]())
        if seen is not x or version != x._version or packed is None or scale is None:
            del self.entries[key]
            return None
        self.entries.move_to_end(key)
        return packed, scale

    def add(self, key: tuple, x: Tensor, packed: Tensor, scale: Tensor) -> None:
        self.entries[key] = (TensorWeakRef(x), x._version, TensorWeakRef(packed), TensorWeakRef(scale))
        while len(self.entries) > REMEMBERED:
            self.entries.popitem(last=False)


_recent = _Recent()


def _shareable(x: Tensor) -> bool:
    # Under compilation common-subexpression elimination does the sharing; functorch wrappers change their meaning
    # with the level; inference tensors have no version to check.
    return not (torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(x) or x.is_inference())


def compress(x: Tensor, plan: Plan, seed: int, share: bool) -> tuple[Tensor, Tensor]:
    """The packed form of ``x`` (any leading dimensions) under ``plan``, shared with earlier readers of ``x``.

    Returns:
        packed integers and scales, as ``ops.compress``; the same two objects for the same unchanged ``x``.
    """
    grid = plan.grid(x.numel() // x.shape[-1] if x.shape[-1] else 0)
    per_feature = plan.grad_weight_granularity == "per_feature"
    if grid is not None:
        compress_, arguments = ops.compress_grid, (
            ops.FORMATS[plan.activation_format].bits, plan.rank, grid, per_feature, plan.rounding
        )  # fmt: skip
    else:
        transforms = getattr(ops.FORMATS[plan.activation_format], "transform", False)
        # g_x's block alone: readers that differ in it share all the same
        block_size = plan.block_size if transforms else 1
        compress_ = ops.compress
        arguments = (plan.activation_format, plan.rank, block_size, per_feature, plan.rounding)
    if not (share and _shareable(x)):
        return compress_(x.detach().reshape(-1, x.shape[-1]), *arguments, seed)
    # Not keyed by the seed: layers that read one tensor keep one copy, rounded with the seed of the first of them.
    key = (id(x), *arguments)  # never under torch.compile, where it would be a guard that no other x fulfils
    if (found := _recent.find(key, x)) is not None:
        return found
    packed, scale = compress_(x.detach().reshape(-1, x.shape[-1]), *arguments, seed)
    _recent.add(key, x, packed, scale)
    return packed, scale

"""What is active while a block's forward runs: it sees each function called and holds what that function saves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..logits.deferred import DeferredLogits
from ..saved_hooks import in_checkpoint, top_hooks
from .functions import BitDropout, BitReLU, RecomputedAttention
from .hold import Exact, Groups, Hook, Identity, Recipe, View, is_fake
from .kinds import CENTERED, CODECS, KINDS, RECOMPUTED, Codec, is_constant_in_groups, is_smooth

# Below this a scale and a kernel launch cost more than the bytes are worth: statistics, biases, single rows.
SMALLEST = 4096


class BlockContext(TorchFunctionMode):
    """Enter around one block's forward. ``codecs`` gives the codec of each kind, None for exact.

    A tensor is packed only when its consumer is in ``KINDS`` and it takes part in the gradient: masks, rotary tables,
    packed buffers, statistics, parameters and whatever an unknown function saves stay as they are.
    """

    def __init__(self, codecs: dict[str, Codec | None] | None = None) -> None:
        super().__init__()
        self.codecs = CODECS if codecs is None else codecs
        self.outer: tuple[Hook, Hook] | None = top_hooks()
        self.codec: Codec | None = None  # of the function that is running
        self.centered = False  # whether that function subtracts means
        self.differentiable: set[int] = set()  # storages of its arguments that need a gradient
        # One copy per tensor, for as long as this forward runs; the bytes themselves belong to the graph.
        self.held: dict[tuple, tuple[Identity, Any]] = {}

    def __enter__(self) -> BlockContext:
        # Inside a checkpoint each saved tensor is asked for once, which copies that nodes share are not.
        stands_aside = in_checkpoint()
        self.hooks = nullcontext() if stands_aside else torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        self.hooks.__enter__()
        return super().__enter__()

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        self.hooks.__exit__(*error)
        self.held.clear()

    # Saved-tensor hook

    def pack(self, tensor: Tensor) -> Exact | Groups | Recipe | View:
        """The copy that there is, if it is good enough for the function that is running; a better one takes its place
        for all who hold it."""
        rounds = self.codec is not None and self.packable(tensor)
        if not rounds and not self.shareable(tensor):
            return Exact(tensor, self.outer)
        held = self.find(tensor)
        if held is not None and (not held.rounded or (rounds and (held.centered or not self.centered))):
            return held
        better = Groups(tensor, self.codec, self.outer, self.centered) if rounds else Exact(tensor, self.outer)
        if held is not None:
            held.become(better)
        self.remember(tensor, better)
        return better

    def unpack(self, held: Any) -> Tensor:
        return held.value()

    def shareable(self, tensor: Tensor) -> bool:
        return (
            (type(tensor) is Tensor or is_fake(tensor))  # neither a Parameter nor a layout of its own
            and tensor.is_floating_point()
            and tensor.numel() >= SMALLEST
        )

    def packable(self, tensor: Tensor) -> bool:
        return (
            self.shareable(tensor)
            and tensor.dim() > 1
            and tensor.shape[-1] > 1
            and (tensor.requires_grad or tensor.untyped_storage()._cdata in self.differentiable)
            and tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()  # not expanded
        )

    def find(self, tensor: Tensor) -> Any | None:
        entry = self.held.get(Identity.key(tensor))
        if entry is None or not entry[0].alive():
            return None
        return entry[1] if entry[1].shape == tensor.shape else View(entry[1], tensor.shape)

    def remember(self, tensor: Tensor, held: Any) -> None:
        self.held[Identity.key(tensor)] = (Identity(tensor), held)

    # Function mode

    def __torch_function__(self, func: Callable, types, args=(), kwargs=None) -> Any:
        kwargs = kwargs or {}
        if not torch.is_grad_enabled() or DeferredLogits in types or not self.decides():
            return func(*args, **kwargs)
        replacement = REPLACED.get(func)
        if replacement is not None and (out := replacement(self, *args, **kwargs)) is not NotImplemented:
            return out
        name = getattr(func, "__name__", "")
        self.codec = self.codecs.get(KINDS[name]) if name in KINDS and is_smooth(name, args, kwargs) else None
        self.centered = name in CENTERED
        if self.codec is not None:
            self.differentiable = {
                a.untyped_storage()._cdata for a in args if isinstance(a, Tensor) and a.requires_grad
            }
        try:
            out = func(*args, **kwargs)
        finally:
            self.codec, self.centered = None, False
        if self.held and name in RECOMPUTED and isinstance(out, Tensor) and self.packable(out):
            self.note_recipe(func, args, kwargs, out)
        return out

    def decides(self) -> bool:
        """Whether what is saved here comes to this context: not inside a checkpoint, or other hooks, in its block. What
        runs there must run alike when it is run again, outside of this context."""
        return top_hooks() == (self.pack, self.unpack)

    def note_recipe(self, func: Callable, args: tuple, kwargs: dict, out: Tensor) -> None:
        """Remember how ``out`` is computed from what is held already, if it is, in case it is saved later."""
        if self.find(out) is not None:  # x.to(its own type) is x
            return
        ingredients, from_held = [], False
        for a in args:
            if isinstance(a, Tensor):
                held = self.find(a)
                from_held = from_held or held is not None
                if held is None:
                    if a.numel() >= SMALLEST and not isinstance(a, nn.Parameter) and a.shape[-1] > 1:
                        return  # a large tensor that nobody holds: keeping it for this would cost its bytes
                    held = Exact(a, self.outer)
                a = held
            ingredients.append(a)
        recipe = Recipe(func, tuple(ingredients), kwargs, out.shape)
        scaled_up = recipe.rounded and KINDS.get(func.__name__) == "product" and not _keeps_groups(args)
        if from_held and not scaled_up and not any(isinstance(v, Tensor) for v in kwargs.values()):
            self.remember(out, recipe)


def _keeps_groups(factors: tuple) -> bool:
    """Whether a product scales each group of one of its factors as a whole. A factor that differs within a group may be
    the inverse of what it meets there: x / std of each column would be 0 where x was rounded to 0, though its own
    values are as large there as in any other column."""
    tensors = [x for x in factors if isinstance(x, Tensor)]
    return any(all(y is x or is_constant_in_groups(y, x) for y in factors) for x in tensors)


def _attention(
    context: BlockContext,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    codec = context.codecs.get("attention")
    if codec is None or not all(t.requires_grad and context.packable(t) for t in (query, key, value)):
        return NotImplemented
    options = {"dropout_p": dropout_p, "is_causal": is_causal, **options}
    return RecomputedAttention.apply(query, key, value, attn_mask, codec, options)


def _dropout(
    context: BlockContext, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if inplace or not training or not 0 < p < 1 or not input.requires_grad or input.numel() < SMALLEST:
        return NotImplemented
    return BitDropout.apply(input, p)


def _relu(context: BlockContext, input: Tensor, inplace: bool = False) -> Tensor:
    if inplace or not input.requires_grad or input.numel() < SMALLEST:
        return NotImplemented
    return BitReLU.apply(input)


REPLACED: dict[Callable, Callable] = {
    F.scaled_dot_product_attention: _attention,
    F.dropout: _dropout,
    F.relu: _relu,
    torch.relu: _relu,
    Tensor.relu: _relu,
}

"""What is active while a block's forward runs: it sees each function called and holds what that function saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..logits.deferred import DeferredLogits
from ..saved_hooks import top_hooks
from .functions import BitDropout, BitReLU, RecomputedAttention
from .hold import Exact, Groups, Hook, Identity, Recipe, View, is_fake
from .kinds import CODECS, KINDS, QUOTIENTS, RECOMPUTED, Codec

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
        self.divisor: Tensor | None = None  # of the function that is running, where it has one
        self.differentiable: set[int] = set()  # storages of its arguments that need a gradient
        # One copy per tensor, for as long as this forward runs; the bytes themselves belong to the graph.
        self.held: dict[tuple, tuple[Identity, Any]] = {}

    def __enter__(self) -> BlockContext:
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        self.hooks.__enter__()
        return super().__enter__()

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        self.hooks.__exit__(*error)
        self.held.clear()

    # Saved-tensor hook

    def pack(self, tensor: Tensor) -> Exact | Groups | Recipe | View:
        if self.codec is None or not self.packable(tensor) or self.is_divisor(tensor):
            return Exact(tensor, self.outer)
        held = self.find(tensor)
        if held is None:
            held = Groups(tensor, self.codec, self.outer)
            self.remember(tensor, held)
        return held

    def unpack(self, held: Any) -> Tensor:
        return held.value()

    def packable(self, tensor: Tensor) -> bool:
        return (
            tensor.is_floating_point()
            and (type(tensor) is Tensor or is_fake(tensor))  # neither a Parameter nor a layout of its own
            and tensor.numel() >= SMALLEST
            and tensor.dim() > 1
            and tensor.shape[-1] > 1
            and (tensor.requires_grad or tensor.untyped_storage()._cdata in self.differentiable)
            and tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()  # not expanded
        )

    def is_divisor(self, tensor: Tensor) -> bool:
        return self.divisor is not None and Identity.key(tensor) == Identity.key(self.divisor)

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
        self.codec = self.codecs.get(KINDS.get(name, "")) if _is_smooth(name, args, kwargs) else None
        self.divisor = _divisor(name, args, kwargs)
        if self.codec is not None:
            self.differentiable = {
                a.untyped_storage()._cdata for a in args if isinstance(a, Tensor) and a.requires_grad
            }
        try:
            out = func(*args, **kwargs)
        finally:
            self.codec = self.divisor = None
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
        divisor = _divisor(getattr(func, "__name__", ""), args, kwargs)
        for a in args:
            if isinstance(a, Tensor):
                held = self.find(a) if a is not divisor else None
                from_held = from_held or held is not None
                if held is None:
                    if a.numel() >= SMALLEST and not isinstance(a, nn.Parameter) and a.shape[-1] > 1:
                        return  # a large tensor that nobody holds: keeping it for this would cost its bytes
                    held = Exact(a, self.outer)
                a = held
            ingredients.append(a)
        if from_held and not any(isinstance(v, Tensor) for v in kwargs.values()):
            self.remember(out, Recipe(func, tuple(ingredients), kwargs, out.shape))


def _is_smooth(name: str, args: tuple, kwargs: dict) -> bool:
    """Whether rounding its argument moves the function's derivative a little: of ``pow`` that of whole exponents."""
    if name != "pow":
        return True
    exponent = args[1] if len(args) > 1 else kwargs.get("exponent")
    return isinstance(exponent, (int, float)) and exponent >= 1 and float(exponent).is_integer()


def _divisor(name: str, args: tuple, kwargs: dict) -> Tensor | None:
    """What a quotient divides by, where that is a tensor."""
    found = args[1] if len(args) > 1 else kwargs.get("other")
    return found if name in QUOTIENTS and isinstance(found, Tensor) else None


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

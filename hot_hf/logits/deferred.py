"""Logits that are not there yet: made when somebody other than the loss looks at them.

A head in training hands on a ``DeferredLogits``. What models do with logits on the way to their loss (``steps.py``) is
noted down and applied to hidden states, or to chunks of logits; the cross-entropy is computed in chunks. Anything else
makes the logits, once, with their ordinary graph, and goes on with them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .cross_entropy import Projection

# What a tensor tells without its values: they are not made for it.
METADATA = frozenset({
    *("shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "__len__"),
    *("dtype", "is_floating_point", "is_complex", "element_size", "layout", "is_sparse", "is_quantized", "is_nested"),
    *("device", "get_device", "is_cpu", "is_cuda", "is_meta", "is_mps", "is_xpu", "names", "__hash__"),
    *("requires_grad", "grad_fn", "is_leaf", "output_nr", "_version", "is_inference", "register_hook"),
})  # fmt: skip

# What can be done without them, by the name of the function (``steps.py``): given the function and its arguments, the
# first of which is a DeferredLogits, the result, or NotImplemented.
HANDLERS: dict[str, Callable] = {}


class DeferredLogits(torch.Tensor):
    """(..., out_features): ``project(hidden, weight, bias)``, hidden (..., in_features) with the same leading shape.

    To autograd it is a tensor like any other, with a gradient function that leads to hidden states and head: what does
    not go through ``__torch_function__`` (an autograd.Function of somebody's own, C++) is right as well.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    project: Projection
    origin: Callable[[], Tensor] | None  # makes it from the logits that it was derived from
    versions: tuple[int, int]  # of hidden states and weight, when the head ran
    made: Tensor | None

    @staticmethod
    def of(hidden: Tensor, weight: Tensor, bias: Tensor | None, project: Projection) -> DeferredLogits:
        return _Defer.apply(hidden, weight, bias, project, None, (hidden._version, weight._version))

    def derived(self, hidden: Tensor, project: Projection, origin: Callable[[], Tensor]) -> DeferredLogits:
        """These logits in another shape or after one more step; ``origin`` makes them from ``self.real()``."""
        self.check()
        return _Defer.apply(hidden, self.weight, self.bias, project, origin, (hidden._version, self.versions[1]))

    def real(self) -> Tensor:
        """The logits, made at the first call, with the graph that they would have had.

        Raises:
            RuntimeError: where the head has changed since, as after an optimizer step.
        """
        if self.made is None:
            with torch.enable_grad():
                if self.origin is not None:
                    self.made = self.origin()
                else:
                    self.check()
                    self.made = self.project(self.hidden, self.weight, self.bias)
        return self.made

    def check(self) -> None:
        """Raise where hidden states or the head's weight are no longer what they were, or not there."""
        changed = (self.hidden._version, self.weight._version) != self.versions
        if changed or self.weight.untyped_storage().nbytes() == 0:
            raise RuntimeError(
                "hot_hf: these logits were asked for after the head's weight had changed (an optimizer step) or was "
                "released (by a parallel engine), or after their hidden states were changed in place. Look at them "
                "before that, or write HOTConfig(chunked_loss=False)."
            )

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.__name__ if func.__name__ != "__get__" else func.__self__.__name__
        if name in METADATA:
            return super().__torch_function__(func, types, args, kwargs)
        handler = HANDLERS.get(name)
        if handler is not None and isinstance(args[0], DeferredLogits) and args[0].made is None:
            out = handler(func, *args, **kwargs)
            if out is not NotImplemented:
                return out
        args, kwargs = tree_map(_real, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map(_value, (args, kwargs or {}))
        return func(*args, **kwargs)


def _real(of: Any) -> Any:
    return of.real() if isinstance(of, DeferredLogits) else of


def _value(of: Any) -> Any:
    return of.real().detach() if isinstance(of, DeferredLogits) else of


class _Defer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, project: Projection, origin, versions):
        shape = (*hidden.shape[:-1], weight.shape[0])
        out = torch.Tensor._make_wrapper_subclass(DeferredLogits, shape, dtype=project.result, device=hidden.device)
        out.hidden, out.weight, out.bias, out.project = hidden, weight, bias, project
        out.origin, out.versions, out.made = origin, versions, None
        ctx.save_for_backward(hidden, weight, bias)
        ctx.project = project
        return out

    @staticmethod
    def backward(ctx, grad):
        needs = ctx.needs_input_grad[:3]
        with torch.enable_grad():
            inputs = [
                None if t is None else t.detach().requires_grad_(n)
                for t, n in zip(ctx.saved_tensors, needs, strict=True)
            ]
            logits = ctx.project(*inputs)
        grads = iter(torch.autograd.grad(logits, [t for t, n in zip(inputs, needs, strict=True) if n], grad))
        return (*(next(grads) if n else None for n in needs), None, None, None)

"""What may happen to logits before the loss without making them: one handler per function, by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .cross_entropy import chunks, linear_cross_entropy
from .deferred import HANDLERS, DeferredLogits


def _step(logits: DeferredLogits, step: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None):
    """``step`` on each element (or each column); ``dtype`` where it changes the type."""
    project = logits.project.then(step, dtype or logits.dtype)
    return logits.derived(logits.hidden, project, lambda: step(logits.real()))


def _reshaped(logits: DeferredLogits, change: Callable[[Tensor], Tensor]):
    """``change`` of the leading dimensions alone, which the same call makes of hidden states."""
    return logits.derived(change(logits.hidden), logits.project, lambda: change(logits.real()))


def _cast(func, logits, *args, **kwargs):
    dtypes = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}
    dtype = dtypes[func.__name__]
    return logits if dtype == logits.dtype else _step(logits, lambda t: t.to(dtype), dtype)


def _to(func, logits, *args, **kwargs):
    wanted = [*args, *kwargs.values()]
    if not set(kwargs) <= {"dtype", "device"} or not all(
        isinstance(w, (torch.dtype, torch.device, str)) for w in wanted
    ):
        return NotImplemented
    dtypes = [w for w in wanted if isinstance(w, torch.dtype)]
    if any(torch.empty(0, device=w).device != logits.device for w in wanted if not isinstance(w, torch.dtype)):
        return NotImplemented
    dtype = dtypes[0] if dtypes else logits.dtype
    if not dtype.is_floating_point:
        return NotImplemented
    return logits if dtype == logits.dtype else _step(logits, lambda t: t.to(dtype), dtype)


def _constant(other: Any) -> bool:
    if isinstance(other, Tensor):
        return other.dim() == 0 and not other.requires_grad and not isinstance(other, DeferredLogits)
    return isinstance(other, (int, float)) and not isinstance(other, bool)


def _scale(func, logits, other, **kwargs):
    if kwargs or not _constant(other):
        return NotImplemented
    return _step(logits, lambda t: func(t, other))


def _add(func, logits, other, **kwargs):
    """A constant, or a bias that is no parameter (BART's ``final_logits_bias``)."""
    if kwargs or not isinstance(other, Tensor) or other.requires_grad or isinstance(other, DeferredLogits):
        return _scale(func, logits, other, **kwargs)
    columns = other.numel() == other.shape[-1] == logits.shape[-1] if other.dim() else False
    if not columns or other.dim() > logits.dim() or torch.promote_types(other.dtype, logits.dtype) != logits.dtype:
        return NotImplemented
    return _step(logits, lambda t: func(t, other.flatten()))


def _pointwise(func, logits, **kwargs):
    return NotImplemented if kwargs else _step(logits, func)


def _view(func, logits, *sizes, **kwargs):
    if kwargs or any(isinstance(s, torch.dtype) for s in sizes):
        return NotImplemented
    shape = torch.empty((), device="meta").expand(logits.shape).view(*sizes).shape
    if not shape or shape[-1] != logits.shape[-1]:
        return NotImplemented
    return _reshaped(logits, lambda t: t.reshape(*shape[:-1], t.shape[-1]))


def _contiguous(func, logits, **kwargs):
    return NotImplemented if kwargs else logits


def _getitem(func, logits, index):
    """Slices, positions and masks of tokens; what reaches the last dimension is not for here."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(part is None for part in parts):
        return NotImplemented
    used = sum(part.dim() if isinstance(part, Tensor) and part.dtype == torch.bool else 1 for part in parts)
    ellipses = [i for i, part in enumerate(parts) if part is Ellipsis]
    if ellipses:
        missing = logits.dim() - (used - 1)
        parts[ellipses[0] : ellipses[0] + 1] = [slice(None)] * missing
        used += missing - 1
    if used == logits.dim():
        last = parts.pop()
        if not isinstance(last, slice) or last != slice(None):
            return NotImplemented
    return _reshaped(logits, lambda t: t[tuple(parts)]) if parts else logits


def _detach(func, logits, **kwargs):
    if logits.origin is not None:
        return NotImplemented
    logits.check()
    bias = None if logits.bias is None else logits.bias.detach()
    return DeferredLogits.of(logits.hidden.detach(), logits.weight.detach(), bias, logits.project)


@torch.no_grad()
def _argmax(func, logits, dim=None, keepdim=False):
    """In chunks too: the accuracy that trainers log."""
    if dim not in (-1, logits.dim() - 1) or logits.dim() < 2:
        return NotImplemented
    logits.check()
    hidden = logits.hidden.flatten(0, -2)
    found = [
        logits.project(hidden[part], logits.weight, logits.bias).argmax(-1)
        for part in chunks(len(hidden), logits.shape[-1])
    ]
    out = torch.cat(found).view(logits.shape[:-1]) if found else hidden.new_empty(logits.shape[:-1], dtype=torch.long)
    return out.unsqueeze(-1) if keepdim else out


def _cross_entropy(
    func, logits, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean",
    label_smoothing=0.0,
):  # fmt: skip
    plain = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
    if not plain or reduction not in ("mean", "sum") or logits.dim() != 2 or not len(logits.hidden):
        return NotImplemented
    if not isinstance(target, Tensor) or target.dtype != torch.long or target.shape != logits.shape[:1]:
        return NotImplemented  # also what cross_entropy refuses: it names what is wrong
    logits.check()
    if target.device != logits.device:
        return NotImplemented
    of = (logits.hidden, logits.weight, logits.bias)
    return linear_cross_entropy(*of, target, logits.project, ignore_index, reduction)


HANDLERS.update(
    {
        **dict.fromkeys(("float", "double", "half", "bfloat16"), _cast),
        "to": _to,
        **dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__"), _scale),
        **dict.fromkeys(("div", "divide", "true_divide", "__truediv__"), _scale),
        **dict.fromkeys(("add", "__add__", "__radd__"), _add),
        "tanh": _pointwise,
        **dict.fromkeys(("view", "reshape"), _view),
        "contiguous": _contiguous,
        "__getitem__": _getitem,
        "detach": _detach,
        "argmax": _argmax,
        "cross_entropy": _cross_entropy,
    }
)

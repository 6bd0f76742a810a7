"""What tensors without data cannot answer, answered as real training would: attention, dropout, questions of values."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .autocast import cast, cast_for


class MetaForward(TorchFunctionMode):
    """What a meta tensor cannot answer, answered as real training without padding would.

    Fused attention, whose choice depends on the device, keeps q, k, v, the mask, its output (laid out by token, as the
    kernels write it) and one float32 logsumexp per row. On the CPU attention with dropout is not fused: its parts run.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.__bool__:  # "is this mask all ones", "is nothing packed here"
            return True
        if func is F.scaled_dot_product_attention and (self.device != "cpu" or not _dropout(args, kwargs)):
            if torch.is_autocast_enabled("cpu"):
                args, kwargs = cast(args, kwargs, torch.get_autocast_dtype("cpu"))
            mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
            query, key, value = (kwargs.get(n, args[i] if i < len(args) else None) for i, n in enumerate(_QKV))
            return _FusedAttention.apply(query, key, value, mask)
        if func is F.dropout and self.device != "cpu":
            return _device_dropout(*args, **kwargs)
        args, kwargs = cast_for(func, self.device, args, kwargs)
        return func(*args, **kwargs)


_QKV = ("query", "key", "value")


def _dropout(args, kwargs) -> float:
    return kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)


def _device_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p else input  # keeps a mask of bool


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        *batch, heads, length, _ = query.shape
        out = query.new_empty((*batch, length, heads, value.shape[-1])).transpose(-2, -3)
        logsumexp = query.new_empty((*batch, heads, length), dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx, grad):
        needs = zip(ctx.saved_tensors[:3], ctx.needs_input_grad[:3], strict=True)
        return (*(torch.empty_like(t) if needed else None for t, needed in needs), None)


def device_type(device: str | None) -> str:
    """The type of ``device``; by default that of this machine's accelerator, or the CPU where it has none."""
    if device is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        return "cpu" if found is None else found.type
    try:
        return torch.device(device).type
    except RuntimeError as error:
        raise ValueError(f"device {device!r} is not one that torch knows: {str(error).splitlines()[0]}") from None

"""Replacements for functions whose backward must agree with what was kept, or needs less than autograd keeps."""

from __future__ import annotations

from contextlib import ExitStack

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .hold import Layout, bits_of, mask_of
from .kinds import Codec


class RecomputedAttention(torch.autograd.Function):
    """``F.scaled_dot_product_attention`` that keeps q, k and v in packed groups and neither output nor logsumexp.

    The fused backward takes exp(q k^T - lse): with q and k rounded and lse not, probabilities no longer sum to one, and
    small errors of the logits become large ones of the gradient. Here the backward runs the forward again on what was
    kept: the gradient is that of attention at a nearby point, exact there. Costs one attention forward.
    """

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, codec: Codec, options) -> Tensor:
        device = query.device.type
        ctx.random_state = _random_state(device) if options.get("dropout_p") else None
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)
        ctx.options, ctx.autocast = options, _autocast_state(device)
        ctx.layouts, packed = [], []
        for tensor in (query, key, value):
            layout, *parts = Layout.pack(tensor, codec)
            ctx.layouts.append(layout)
            packed += parts
        ctx.save_for_backward(mask, *packed)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        mask, *packed = ctx.saved_tensors
        needs = ctx.needs_input_grad[:4]
        inputs = [
            layout.unpack(*packed[2 * i : 2 * i + 2]).requires_grad_(needs[i]) for i, layout in enumerate(ctx.layouts)
        ]
        if mask is not None:
            mask = mask.detach().requires_grad_(needs[3])
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            if ctx.autocast is not None:
                stack.enter_context(torch.autocast(**ctx.autocast))
            if ctx.random_state is not None:
                stack.enter_context(_replayed(grad.device.type, ctx.random_state))
            out = F.scaled_dot_product_attention(*inputs, attn_mask=mask, **ctx.options)
        wanted = [t for t, n in zip((*inputs, mask), needs, strict=True) if n]
        grads = iter(torch.autograd.grad(out, wanted, grad))
        return (*(next(grads) if n else None for n in needs), None, None)


class BitDropout(torch.autograd.Function):
    """``F.dropout`` that keeps its mask as bits; values and random numbers are those of the original."""

    @staticmethod
    def forward(ctx, x: Tensor, p: float) -> Tensor:
        if x.device.type in ("cpu", "meta"):
            # torch multiplies by a tensor of 0 and 1 / (1 - p) on the CPU: the same, drawn from ones.
            noise = F.dropout(torch.ones_like(x), p, True)
            mask, out = noise != 0, x * noise
        else:
            out, mask = torch.native_dropout(x, p, True)
        ctx.save_for_backward(bits_of(mask))
        ctx.factor = 1.0 / (1.0 - p) if p < 1 else 0.0
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        (bits,) = ctx.saved_tensors
        return grad * ctx.factor * mask_of(bits, grad.shape), None


class BitReLU(torch.autograd.Function):
    """``F.relu`` that keeps one bit per value: its gradient asks for nothing else."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        out = torch.relu(x)
        ctx.save_for_backward(bits_of(out > 0))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        (bits,) = ctx.saved_tensors
        return grad * mask_of(bits, grad.shape)


def _autocast_state(device: str) -> dict | None:
    if not torch.amp.is_autocast_available(device):
        return None
    return {
        "device_type": device,
        "enabled": torch.is_autocast_enabled(device),
        "dtype": torch.get_autocast_dtype(device),
    }


def _random_module(device: str):
    return torch if device == "cpu" else torch.get_device_module(device)


def _random_state(device: str) -> Tensor | None:
    return None if device == "meta" else _random_module(device).get_rng_state()


class _replayed:
    """The random state of the forward, for as long as it is recomputed."""

    def __init__(self, device: str, state: Tensor) -> None:
        self.module, self.state = _random_module(device), state

    def __enter__(self) -> None:
        self.now = self.module.get_rng_state()
        self.module.set_rng_state(self.state)

    def __exit__(self, *error) -> None:
        self.module.set_rng_state(self.now)

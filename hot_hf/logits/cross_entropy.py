"""Cross-entropy of a linear head in chunks of tokens: logits exist for one chunk at a time.

The gradients of hidden states and head are made chunk by chunk in the forward, beside the loss (the way of Liger
Kernel, arXiv 2410.10989), and scaled in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..gradients import exact_types
from ..saved_hooks import unseen

Step = Callable[[Tensor], Tensor]

# Bytes of one chunk's float32 logits. A chunk needs some three times that; smaller ones make the head's products
# slower: for SmolLM2 (49,152 x 576) 32 MiB are 170 tokens.
CHUNK_BYTES = 32 << 20
# More chunks than this are summed in float32 where the head is in half precision: each sum rounds by 2^-9 (bfloat16),
# 16 of them come to 0.3% of the gradient, 128 to 0.7%, where a product in one piece has 0.1%.
ROUNDED_SUMS = 16


@dataclass(frozen=True)
class Projection:
    """How hidden states become what the loss reads: ``steps(hidden @ weight.T + bias)``.

    ``dtype`` is that of the product, ``result`` that of the last step.
    """

    dtype: torch.dtype
    result: torch.dtype
    steps: tuple[Step, ...] = ()

    @classmethod
    def at(cls, hidden: Tensor) -> Projection:
        """That of a head which is called with ``hidden`` now, in autocast's type where that is on."""
        device = hidden.device.type
        autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast and hidden.dtype != torch.float64 else hidden.dtype
        return cls(dtype, dtype)

    def __call__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """hidden (..., in), weight (out, in), bias (out,) or None; (..., out), differentiable."""
        with exact_types(hidden.device.type):
            bias = None if bias is None else bias.to(self.dtype)
            return self.finish(F.linear(hidden.to(self.dtype), weight.to(self.dtype), bias))

    def finish(self, logits: Tensor) -> Tensor:
        """The steps alone."""
        for step in self.steps:
            logits = step(logits)
        return logits

    def then(self, step: Step, result: torch.dtype) -> Projection:
        return Projection(self.dtype, result, (*self.steps, step))


def chunks(tokens: int, out_features: int) -> Iterator[slice]:
    """Even slices of the tokens, whose float32 logits take at most CHUNK_BYTES each."""
    count = max(1, -(-tokens * out_features * 4 // CHUNK_BYTES))
    size = max(1, -(-tokens // count))
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    project: Projection,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """``F.cross_entropy(project(hidden, weight, bias), target)``, to the rounding of its sums.

    Args:
        hidden: (tokens, in_features); weight: (out_features, in_features); bias: (out_features,) or None.
        target: (tokens,), class indices.
        reduction: "mean" over tokens whose target is not ``ignore_index``, or "sum".

    Returns:
        a scalar of the type that ``project`` ends in.
    """
    return _LinearCrossEntropy.apply(hidden, weight, bias, target, project, ignore_index, reduction)


class _LinearCrossEntropy(torch.autograd.Function):
    """Gradients are those of the sum over tokens, kept unscaled: small ones of a mean would vanish in float16."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, target, project, ignore_index, reduction) -> Tensor:
        needs = ctx.needs_input_grad[:3]
        with exact_types(hidden.device.type):
            loss, grads = _sum_and_gradients(hidden, weight, bias, target, project, ignore_index, needs)
        count = (target != ignore_index).sum() if reduction == "mean" else None
        # The gradients of weight and bias are theirs already, early; those of hidden states are kept for the backward.
        ctx.save_for_backward(hidden, weight, bias, target, count, grads[0])
        ctx.parameter_grads = grads[1:]
        ctx.settings = (project, ignore_index, needs)
        return (loss if count is None else loss / count).to(project.result)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor):
        hidden, weight, bias, target, count, grad_hidden = ctx.saved_tensors
        project, ignore_index, needs = ctx.settings
        # No token that counts: zeros, not 0 / 0.
        factor = grad_output if count is None else grad_output / count.clamp(min=1)
        parameter_grads, ctx.parameter_grads = ctx.parameter_grads, None
        if parameter_grads is None:  # a second backward through the same graph
            with exact_types(hidden.device.type):
                _, (_, *parameter_grads) = _sum_and_gradients(
                    hidden, weight, bias, target, project, ignore_index, needs
                )
        grads = [None if grad_hidden is None else (grad_hidden * factor).to(hidden.dtype)]
        grads += [None if grad is None else grad.mul_(factor) for grad in parameter_grads]
        return (*grads, None, None, None, None)


def _sum_and_gradients(
    hidden, weight, bias, target, project: Projection, ignore_index: int, needs: tuple[bool, ...]
) -> tuple[Tensor, list[Tensor | None]]:
    """The summed loss in float32 (float64), and its gradients of hidden states, weight and bias where ``needs`` asks
    for them."""
    parts = list(chunks(len(target), weight.shape[0]))
    wide = torch.float64 if project.result == torch.float64 else torch.float32
    grad_hidden, grad_weight, grad_bias = (
        torch.zeros_like(t) if n else None for t, n in zip((hidden, weight, bias), needs, strict=True)
    )
    if grad_weight is not None and len(parts) > ROUNDED_SUMS and weight.dtype.itemsize < 4:
        grad_weight = grad_weight.float()
    low, low_bias = weight.to(project.dtype), None if bias is None else bias.to(project.dtype)
    total = hidden.new_zeros((), dtype=wide)
    for part in parts:
        h = hidden[part].to(project.dtype)
        logits = F.linear(h, low, low_bias).requires_grad_(any(needs))
        with torch.enable_grad(), unseen():
            values = project.finish(logits).to(wide)
            loss = F.cross_entropy(values, target[part], ignore_index=ignore_index, reduction="sum")
        total += loss.detach()
        if any(needs):
            (g,) = torch.autograd.grad(loss, logits)
            del logits, values, loss  # before the products: half of what a chunk takes
            if grad_hidden is not None:
                grad_hidden[part] = g @ low
            if grad_weight is not None:
                _add_product(grad_weight, g, h)
            if grad_bias is not None:
                grad_bias += g.sum(0)
    return total, [grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), grad_bias]


def _add_product(total: Tensor, g: Tensor, h: Tensor) -> None:
    """``total += g.T @ h``: g (tokens, out), h (tokens, in), total (out, in)."""
    if total.dtype == g.dtype:
        total.addmm_(g.t(), h)
        return
    rows = max(1, CHUNK_BYTES // (4 * total.shape[1]))  # of a wider type: in slices, or the product were as large again
    for start in range(0, len(total), rows):
        total[start : start + rows] += g[:, start : start + rows].t() @ h

"""The one autograd.Function: an exact forward, and a backward on integer products."""

from __future__ import annotations

import inspect

import torch
import torch.nn.functional as F
from torch import Tensor

from . import gradients
from .plan import Plan


class HOTFunction(torch.autograd.Function):
    """``F.linear`` whose backward follows a ``Plan``.

    Inputs: x (..., in_features), weight (out_features, in_features), bias or None, ``kept`` and ``scale`` (what the
    forward keeps of x: the packed form and its scales; x itself and None for format ``none``; None and None when the
    weight needs no gradient), the plan and the seed of stochastic rounding.

    Everything kept goes through ``save_for_backward``; the weight is saved as it is and quantized in the backward, so
    that a value changed in between is noticed and nothing stale is used (docs/architecture.md, decision 3).
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight, bias, kept, scale, plan: Plan, seed: int) -> Tensor:
        y = F.linear(x, weight, bias)
        # With a bias, and x of three dimensions or more, torch returns a view of the product, and autograd refuses to
        # change a view in place that a Function has made. This is the same memory, not marked as a view.
        if not torch.compiler.is_compiling() and y._is_view():
            y = torch.ops.aten._unsafe_view(y, y.shape)
        return y

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        x, weight, bias, kept, scale, plan, seed = inputs
        needs_x, needs_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        saved, ctx.view = _without_the_view(weight)
        ctx.save_for_backward(
            saved if needs_x else None, kept if needs_weight else None, scale if needs_weight else None
        )
        ctx.plan, ctx.seed = plan, seed
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        ctx.weight_dtype = weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx, grad_output):
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        weight, kept, scale = ctx.saved_tensors
        if ctx.view is not None and needs_x and weight.numel():
            shape, stride, offset = ctx.view
            weight = weight.as_strided(shape, stride, weight.storage_offset() + offset)
        if needs_x and weight.dim() != 2:
            raise RuntimeError(
                f"hot_hf: the {grad_output.shape[-1]} x {ctx.x_shape[-1]} weight of a HOT layer is "
                f"{tuple(weight.shape)} in the backward: ZeRO-3 or another engine released it after the forward and "
                "did not gather it again. "
                "Run the backward through the engine (accelerator.backward, engine.backward)."
            )
        grad_x = grad_w = grad_b = None
        with gradients.exact_types(grad_output.device.type), torch.no_grad():
            g = grad_output.reshape(-1, grad_output.shape[-1])
            plan, seed, in_features = ctx.plan, ctx.seed, ctx.x_shape[-1]
            if needs_x and needs_weight:
                dtypes = (ctx.x_dtype, ctx.weight_dtype)
                grad_x, grad_w = gradients.grad_both(g, weight, kept, scale, plan, seed, *dtypes)
            elif needs_x:
                grad_x = gradients.grad_input(g, weight, plan, seed, ctx.x_dtype)
            elif needs_weight:
                grad_w = gradients.grad_weight(g, kept, scale, plan, seed, in_features, ctx.weight_dtype)
            if needs_x:
                grad_x = grad_x.reshape(ctx.x_shape)
            if needs_bias:
                grad_b = g.sum(0).to(ctx.bias_dtype)
        if torch.is_grad_enabled():  # create_graph=True, and torch.func.grad, which always asks for it
            grad_x, grad_w, grad_b = (
                None if grad is None else _NotTwice.apply(grad, grad_output, weight, kept)
                for grad in (grad_x, grad_w, grad_b)
            )
        return grad_x, grad_w, grad_b, None, None, None, None


# torch binds every call's arguments by this signature, and takes 50 us to work it out each time where it is not stored.
HOTFunction.forward.__signature__ = inspect.signature(HOTFunction.forward)


def _without_the_view(weight: Tensor) -> tuple[Tensor, tuple | None]:
    """What to save of a weight, and how to find it there again: (shape, stride, offset), or None for itself.

    Conv1D and experts compute with a view of their Parameter. ZeRO-3 releases what it gathered by giving the Parameter
    other memory, and a saved view would hold the gathered one until the backward. Elsewhere the view itself is saved:
    FSDP2 empties the storage under it, and hooks that move saved tensors should not move all experts for each.
    """
    if torch.compiler.is_compiling() or not hasattr(parameter := weight._base, "ds_id"):
        return weight, None
    return parameter, (weight.shape, weight.stride(), weight.storage_offset() - parameter.storage_offset())


class _NotTwice(torch.autograd.Function):
    """A gradient that says what is wrong when it is differentiated; it depends on g, the weight and the input."""

    generate_vmap_rule = True

    @staticmethod
    def forward(grad, grad_output, weight, kept) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(
            "hot_hf: the gradient of a HOT layer was differentiated again (a gradient penalty or a Hessian product), "
            f"but its backward is quantized and has no derivative; {_REMEDY}"
        )


_REMEDY = "call hot_hf.remove_hot(model) first, or leave these layers out with HOTConfig(exclude=[...])."

"""The one autograd.Function: an exact forward, and a backward on integer products."""

from __future__ import annotations

import inspect
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from . import ops
from .layer_plan import Plan


class HOTFunction(torch.autograd.Function):
    """``F.linear`` whose backward follows a ``Plan``.

    Inputs: x (..., in_features), weight (out_features, in_features), bias or None, ``kept`` and ``scale`` (what the
    forward keeps of x: the packed form and its scales; x itself and None for format ``none``; None and None when the
    weight needs no gradient), the plan and the seed of stochastic rounding.

    Everything kept goes through ``save_for_backward``; the weight is saved as it is and quantized in the backward, so
    that a value changed in between is noticed and nothing stale is used (DESIGN decision 3).
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight, bias, kept, scale, plan: Plan, seed: int) -> Tensor:
        return F.linear(x, weight, bias)

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
        with exact_types(grad_output.device.type), torch.no_grad():
            g = grad_output.reshape(-1, grad_output.shape[-1])
            if needs_x and needs_weight and ctx.plan.grad_input_bits and _packed_in_order(ctx.plan, g.shape[0]):
                grad_x, grad_w = _grad_both(g, weight, kept, scale, ctx)
                grad_x, needs_x, needs_weight = grad_x.reshape(ctx.x_shape), False, False
            if needs_x:
                grad_x = grad_input(g, weight, ctx.plan, ctx.seed, ctx.x_dtype).reshape(ctx.x_shape)
            if needs_weight:
                grad_w = grad_weight(g, kept, scale, ctx.plan, ctx.seed, ctx.x_shape[-1], ctx.weight_dtype)
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


def exact_types(device_type: str):
    """Autocast off: the caller's may still be on, and float products must run in the types chosen here."""
    available = torch.amp.is_autocast_available(device_type)
    return torch.autocast(device_type, enabled=False) if available else nullcontext()


def _packed_in_order(plan: Plan, tokens: int) -> bool:
    """Whether x was packed as its tokens come, so that both products may share their passes over g."""
    return plan.activation_format != "none" and plan.grid(tokens) is None


def grad_input(g: Tensor, weight: Tensor, plan: Plan, seed: int, dtype: torch.dtype) -> Tensor:
    """The gradient of a layer's input as ``plan`` has it: g (tokens, out), weight (out, in), result (tokens, in)."""
    if plan.grad_input_bits is None:
        return (g @ weight.to(g.dtype)).to(dtype)  # under autocast nn.Linear multiplies in g's type too
    per_token = plan.grad_input_granularity != "per_tensor"
    return ops.grad_input(g, weight, plan.grad_input_bits, plan.block_size, per_token, plan.rounding, seed + 1, dtype)


def _grad_both(g: Tensor, weight: Tensor, kept: Tensor, scale: Tensor, ctx) -> tuple[Tensor, Tensor]:
    plan = ctx.plan
    return ops.grad_both(
        g,
        weight,
        kept,
        scale,
        plan.grad_input_bits,
        plan.activation_format,
        plan.rank,
        plan.block_size,
        plan.grad_input_granularity != "per_tensor",
        plan.grad_weight_granularity == "per_feature",
        plan.rounding,
        ctx.seed,  # seed + 1 to grad_input, seed + 3 to grad_weight
        ctx.x_dtype,
        ctx.weight_dtype,
    )


def grad_weight(
    g: Tensor, kept: Tensor, scale: Tensor | None, plan: Plan, seed: int, in_features: int, dtype: torch.dtype
) -> Tensor:
    """The gradient of a layer's weight as ``plan`` has it, (out, in), from g (tokens, out) and what was kept of x."""
    if plan.activation_format == "none":
        return (g.t() @ kept.reshape(-1, in_features).to(g.dtype)).to(dtype)
    per_feature = plan.grad_weight_granularity == "per_feature"
    if (grid := plan.grid(g.shape[0])) is not None:
        bits = ops.FORMATS[plan.activation_format].bits
        arguments = (bits, in_features, plan.rank, grid, per_feature, plan.rounding, seed + 3, dtype)
        return ops.grad_weight_grid(g, kept, scale, *arguments)
    return ops.grad_weight(
        g,
        kept,
        scale,
        plan.activation_format,
        in_features,
        plan.rank,
        plan.block_size,
        per_feature,
        plan.rounding,
        seed + 3,  # seed: x; + 1 and + 2: g and W of grad_input; + 3: g of grad_weight
        dtype,
    )

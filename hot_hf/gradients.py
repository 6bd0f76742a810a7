"""Where a Plan meets the operators: what is kept of a layer's input, and the two gradients that it gives.

Everything here follows one layer's plan; ``seed`` is that of its stochastic rounding in this step.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from . import ops
from .buffer import shared
from .plan import Plan
from .saved_hooks import is_dropped


def exact_types(device_type: str):
    """Autocast off: the caller's may still be on, and float products must run in the types chosen here."""
    available = torch.amp.is_autocast_available(device_type)
    return torch.autocast(device_type, enabled=False) if available else nullcontext()


def _per_token(plan: Plan) -> bool:
    return plan.grad_input_granularity != "per_tensor"  # lqs that is undecided takes the safer one


def _per_feature(plan: Plan) -> bool:
    return plan.grad_weight_granularity == "per_feature"


def keep(x: Tensor, plan: Plan, seed: int, share: bool) -> tuple[Tensor, Tensor | None]:
    """What the forward keeps of ``x`` (any leading dimensions, in_features).

    Returns:
        packed integers and scales, as ``ops.compress`` gives them; with ``share`` the same two objects for the same
        unchanged ``x``. For format ``none`` x itself and None.
    """
    if plan.activation_format == "none":
        return x, None
    # g_x's block alone: readers that differ in it share all the same.
    block_size = ops.FORMATS[plan.activation_format].kept_block(plan.block_size)
    settings = (plan.activation_format, plan.rank, block_size, _per_feature(plan), plan.rounding)

    # In the forward of a checkpoint only shape and type of what is saved are looked at: memory without values does.
    dropped = not torch.compiler.is_compiling() and is_dropped()

    def compress() -> tuple[Tensor, Tensor]:
        rows = x.detach().reshape(-1, x.shape[-1])
        return ops.compress.fake(rows, *settings, seed) if dropped else ops.compress(rows, *settings, seed)

    # Not keyed by the seed: layers that read one tensor keep one copy, rounded with the seed of the first of them.
    return shared(x, settings, compress) if share and not dropped else compress()


def grad_input(g: Tensor, weight: Tensor, plan: Plan, seed: int, dtype: torch.dtype) -> Tensor:
    """The gradient of a layer's input: g (tokens, out), weight (out, in), result (tokens, in) in ``dtype``."""
    if plan.grad_input_bits is None:
        return (g @ weight.to(g.dtype)).to(dtype)  # under autocast nn.Linear multiplies in g's type too
    settings = (plan.grad_input_bits, plan.block_size, _per_token(plan), plan.rounding, seed + ops.GRAD_INPUT_SEED)
    return ops.grad_input(g, weight, *settings, dtype)


def grad_weight(
    g: Tensor, kept: Tensor, scale: Tensor | None, plan: Plan, seed: int, in_features: int, dtype: torch.dtype
) -> Tensor:
    """The gradient of a layer's weight, (out, in) in ``dtype``, from g (tokens, out) and what ``keep`` gave."""
    if plan.activation_format == "none":
        return (g.t() @ kept.reshape(-1, in_features).to(g.dtype)).to(dtype)
    settings = (plan.rank, plan.block_size, _per_feature(plan), plan.rounding, seed + ops.GRAD_WEIGHT_SEED)
    return ops.grad_weight(g, kept, scale, plan.activation_format, in_features, *settings, dtype)


def grad_both(
    g: Tensor,
    weight: Tensor,
    kept: Tensor,
    scale: Tensor | None,
    plan: Plan,
    seed: int,
    input_dtype: torch.dtype,
    weight_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """``grad_input`` and ``grad_weight``, with fewer passes over g where both are integer products."""
    if plan.grad_input_bits is None or plan.activation_format == "none":
        grad_x = grad_input(g, weight, plan, seed, input_dtype)
        return grad_x, grad_weight(g, kept, scale, plan, seed, weight.shape[1], weight_dtype)
    settings = (
        *(plan.grad_input_bits, plan.activation_format, plan.rank, plan.block_size),
        *(_per_token(plan), _per_feature(plan), plan.rounding, seed),
    )
    return ops.grad_both(g, weight, kept, scale, *settings, input_dtype, weight_dtype)

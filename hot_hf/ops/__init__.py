"""The three operations of a HOT layer as torch operators, dispatched by the device of their first tensor.

``compress`` runs in the forward, ``grad_input`` and ``grad_weight`` in the backward. All are functional and have fakes,
so torch.compile, FakeTensor and export see through them; under compilation equal ``compress`` calls (q/k/v) merge.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from . import formats, reference
from .backends import backend_for
from .formats import FORMATS
from .grid import compress_grid, grad_weight_grid

__all__ = [
    "FORMATS",
    "backend_for",
    "compress",
    "compress_grid",
    "formats",
    "grad_both",
    "grad_input",
    "grad_weight",
    "grad_weight_grid",
    "reference",
]


def _check_matrix(op: str, **tensors: Tensor) -> None:
    for name, t in tensors.items():
        if t.dim() != 2 or not t.is_floating_point():
            raise ValueError(f"hot_hf.ops.{op}: {name} must be a floating-point matrix, got {t.dtype} {tuple(t.shape)}")


def _format(op: str, name: str, rank: int) -> formats.ProjectedFormat | formats.TokenFormat:
    if name not in FORMATS:
        raise ValueError(f"hot_hf.ops.{op}: unknown format {name!r}; choose one of {sorted(FORMATS)}")
    if not 1 <= rank <= reference.TOKEN_BLOCK:
        raise ValueError(f"hot_hf.ops.{op}: rank must be 1 to {reference.TOKEN_BLOCK}, got {rank}")
    return FORMATS[name]


@custom_op("hot_hf::compress", mutates_args=())
def compress(
    x: Tensor, fmt: str, rank: int, block_size: int, per_feature: bool, rounding: str, seed: int
) -> tuple[Tensor, Tensor]:
    """Pack a layer's input for its weight gradient.

    Args:
        x: (tokens, in_features), any floating type and stride.
        fmt: a key of ``FORMATS``; rank: 1 to 16 (``hla_*``); block_size: of the feature transform (``ht_int4``).
        per_feature: one scale per feature (``hla_*``), else one per tensor.

    Returns:
        the packed integers (int8, or uint8 with two 4-bit values each) and their scales (float32, float64 for
        float64 inputs).

    Raises:
        ValueError: on a format, rank or tensor that does not fit.
    """
    _check_matrix("compress", x=x)
    return _format("compress", fmt, rank).compress(backend_for(x), x, rank, block_size, per_feature, rounding, seed)


@compress.register_fake
def _(x, fmt, rank, block_size, per_feature, rounding, seed):
    row = FORMATS[fmt]
    shape = row.packed_shape(x.shape[0], x.shape[1], rank, block_size)
    dtype = torch.uint8 if row.bits == 4 else torch.int8
    # The layout is the backend's: on a GPU the tokens (the contraction) are innermost.
    empty = getattr(backend_for(x), "empty_kept", None)
    packed = x.new_empty(shape, dtype=dtype) if empty is None else empty(x, shape, dtype)
    scale = x.new_empty((row.scale_size(x.shape[0], x.shape[1], per_feature),), dtype=reference.compute_dtype(x))
    return packed, scale


@custom_op("hot_hf::grad_input", mutates_args=())
def grad_input(
    g: Tensor,
    weight: Tensor,
    bits: int,
    block_size: int,
    per_token: bool,
    rounding: str,
    seed: int,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient of a layer's input, SPEC section 2.

    Args:
        g: (tokens, out_features); weight: (out_features, in_features); any floating type and stride.
        bits: 4 or 8; per_token: one scale per token and per input feature, else one per tensor each.

    Returns:
        (tokens, in_features) in ``dtype``.
    """
    _check_matrix("grad_input", g=g, weight=weight)
    if bits not in reference.QMAX:
        raise ValueError(f"hot_hf.ops.grad_input: bits must be 4 or 8, got {bits}")
    return formats.grad_input(backend_for(g), g, weight, bits, block_size, per_token, rounding, seed, dtype)


@grad_input.register_fake
def _(g, weight, bits, block_size, per_token, rounding, seed, dtype):
    return g.new_empty((g.shape[0], weight.shape[1]), dtype=dtype)


@custom_op("hot_hf::grad_weight", mutates_args=())
def grad_weight(
    g: Tensor,
    packed: Tensor,
    scale: Tensor,
    fmt: str,
    in_features: int,
    rank: int,
    block_size: int,
    per_feature: bool,
    rounding: str,
    seed: int,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient of a layer's weight from what ``compress`` kept, SPEC sections 3 and 5.

    Args:
        g: (tokens, out_features), any floating type and stride; packed, scale: from ``compress`` with the same
            ``fmt``, ``rank``, ``block_size`` and ``per_feature``.

    Returns:
        (out_features, in_features) in ``dtype``, contiguous.
    """
    _check_matrix("grad_weight", g=g)
    return _format("grad_weight", fmt, rank).grad_weight(
        backend_for(g), g, packed, scale, in_features, rank, block_size, per_feature, rounding, seed, dtype
    )


@grad_weight.register_fake
def _(g, packed, scale, fmt, in_features, rank, block_size, per_feature, rounding, seed, dtype):
    return g.new_empty((g.shape[1], in_features), dtype=dtype)


@custom_op("hot_hf::grad_both", mutates_args=())
def grad_both(
    g: Tensor,
    weight: Tensor,
    packed: Tensor,
    scale: Tensor,
    bits: int,
    fmt: str,
    rank: int,
    block_size: int,
    per_token: bool,
    per_feature: bool,
    rounding: str,
    seed: int,
    input_dtype: torch.dtype,
    weight_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """``grad_input`` with ``seed + 1`` and ``grad_weight`` with ``seed + 3``, sharing their passes over g.

    Arguments and results are those of the two, with equal values.
    """
    _check_matrix("grad_both", g=g, weight=weight)
    if bits not in reference.QMAX:
        raise ValueError(f"hot_hf.ops.grad_both: bits must be 4 or 8, got {bits}")
    row = _format("grad_both", fmt, rank)
    settings = (bits, row, rank, block_size, per_token, per_feature, rounding, seed, input_dtype, weight_dtype)
    return formats.grad_both(backend_for(g), g, weight, packed, scale, *settings)


@grad_both.register_fake
def _(
    g,
    weight,
    packed,
    scale,
    bits,
    fmt,
    rank,
    block_size,
    per_token,
    per_feature,
    rounding,
    seed,
    input_dtype,
    weight_dtype,
):
    return g.new_empty((g.shape[0], weight.shape[1]), dtype=input_dtype), g.new_empty(weight.shape, dtype=weight_dtype)


def _refuse_double_backward(ctx, *grads):
    raise RuntimeError(
        "hot_hf: the gradient of a HOT layer was differentiated again (a gradient penalty or a Hessian product). "
        "Its backward is quantized and has no derivative: call hot_hf.remove_hot(model), or exclude these layers "
        "with HOTConfig(exclude=[...])."
    )


for _op in (compress, grad_input, grad_weight, grad_both, compress_grid, grad_weight_grid):
    _op.register_autograd(_refuse_double_backward)

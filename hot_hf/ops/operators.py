"""The operations of a HOT layer as torch operators, and the formats in which a layer's input is kept.

``compress`` runs in the forward; ``grad_input``, ``grad_weight``, or both at once, in the backward. All are functional
and have fakes, so torch.compile, FakeTensor and export see through them; under compilation equal ``compress`` calls
(q/k/v) merge. The backend is that of the first tensor's device. What is written here is written once, on functions
that every backend has: backends need only agree on those, integer by integer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.library import custom_op

from . import reference
from .backend import Backend, Quantized
from .dispatch import backend_for
from .reference import TOKEN_BLOCK, padded

# Added to a layer's seed of stochastic rounding, which is that of x: for grad_input (g; W takes one more), for
# grad_weight (g).
GRAD_INPUT_SEED, GRAD_WEIGHT_SEED = 1, 3


@dataclass(frozen=True)
class ProjectedFormat:
    """``hla_*``: the low-rank projection along tokens, one scale per feature (or tensor). K of the product is
    N * rank / 16 (spec.md, section 3)."""

    bits: int

    def kept_block(self, block_size: int) -> int:
        """The block of the feature transform in what is kept; 1 where there is none."""
        return 1

    def packed_shape(self, tokens: int, features: int, rank: int, block_size: int) -> tuple[int, int]:
        rows = padded(tokens, TOKEN_BLOCK) // TOKEN_BLOCK * rank
        return rows, features if self.bits == 8 else (features + 1) // 2

    def scale_size(self, tokens: int, features: int, per_feature: bool) -> int:
        return features if per_feature else 1

    def compress(self, backend: Backend, x, rank, block_size, per_feature, rounding, seed) -> Quantized:
        if self.bits == 4:
            return backend.project_quantize_packed(x, rank, per_feature, rounding, seed)
        return backend.project_quantize(x, 8, rank, per_feature, rounding, seed)

    def meets(self, rank: int, scale: Tensor) -> tuple[int | None, Tensor | None]:
        """How g is quantized to meet what was kept: (rank, None) or (None, scales of tokens)."""
        return rank, None

    def product(self, backend: Backend, g_q: Quantized, packed, scale, in_features, block_size, dtype) -> Tensor:
        # g is not kept, so it stays at 8 bits whatever x was kept in.
        (g_int, g_scale), block = g_q, 1
        if self.bits == 4:
            return backend.packed_product(g_int.t(), packed, g_scale, scale, in_features, block, dtype)
        return backend.scaled_product(g_int.t(), packed, g_scale, scale, dtype)


@dataclass(frozen=True)
class TokenFormat:
    """``ht_int4`` and ``int8``: every token kept, one scale per token, folded into g. K of the product is N (spec,
    section 5). Four bits are behind a Hadamard transform along features, eight need none."""

    bits: int

    def kept_block(self, block_size: int) -> int:
        return block_size if self.bits == 4 else 1

    def packed_shape(self, tokens: int, features: int, rank: int, block_size: int) -> tuple[int, int]:
        columns = padded(features, self.kept_block(block_size))
        return tokens, columns if self.bits == 8 else (columns + 1) // 2

    def scale_size(self, tokens: int, features: int, per_feature: bool) -> int:
        return tokens

    def compress(self, backend: Backend, x, rank, block_size, per_feature, rounding, seed) -> Quantized:
        if self.bits == 4:
            return backend.hadamard_quantize_packed(x, block_size, True, rounding, seed)
        return backend.hadamard_quantize(x, 8, 1, 1, True, rounding, seed)

    def meets(self, rank: int, scale: Tensor) -> tuple[int | None, Tensor | None]:
        return None, scale

    def product(self, backend: Backend, g_q: Quantized, packed, scale, in_features, block_size, dtype) -> Tensor:
        g_int, g_scale = g_q
        if self.bits == 4:
            return backend.packed_product(g_int.t(), packed, g_scale, None, in_features, block_size, dtype)
        return backend.scaled_product(g_int.t(), packed, g_scale, None, dtype)


FORMATS = {
    "hla_int8": ProjectedFormat(bits=8),  # the paper
    "hla_int4": ProjectedFormat(bits=4),  # ours
    "ht_int4": TokenFormat(bits=4),  # ours
    "int8": TokenFormat(bits=8),  # ours
}


def _check(op: str, bits: int = 8, fmt: str | None = None, rank: int = 1, **matrices: Tensor) -> None:
    for name, t in matrices.items():
        if t.dim() != 2 or not t.is_floating_point():
            raise ValueError(f"hot_hf.ops.{op}: {name} must be a floating-point matrix, got {t.dtype} {tuple(t.shape)}")
    if bits not in reference.QMAX:
        raise ValueError(f"hot_hf.ops.{op}: bits must be 4 or 8, got {bits}")
    if fmt is not None and fmt not in FORMATS:
        raise ValueError(f"hot_hf.ops.{op}: unknown format {fmt!r}; choose one of {sorted(FORMATS)}")
    if not 1 <= rank <= TOKEN_BLOCK:
        raise ValueError(f"hot_hf.ops.{op}: rank must be 1 to {TOKEN_BLOCK}, got {rank}")


def _operator(schema: str, fake: Callable) -> Callable:
    """Register ``function(backend, tensor, ...)`` as the operator ``hot_hf::NAME(tensor, ...)``, computed by the
    backend of its first tensor. ``NAME.on_backend`` is ``function``, for a backend of one's choice; ``NAME.fake`` gives
    results of the right shapes without computing them."""

    def register(function: Callable):
        def dispatched(*args):
            return function(backend_for(args[0]), *args)

        op = custom_op(f"hot_hf::{function.__name__}", dispatched, mutates_args=(), schema=schema)
        op.register_fake(fake)
        op.register_autograd(_refuse_double_backward)
        op.register_vmap(_one_by_one(op))
        op.__doc__, op.on_backend, op.fake = function.__doc__, function, fake
        return op

    return register


def _one_by_one(op: Callable) -> Callable:
    """The rule of ``op`` under vmap: scales belong to one sample, so each is computed by itself."""

    def rule(info, in_dims: tuple, *args):
        outputs = []
        for i in range(info.batch_size):
            outputs.append(op(*(a if dim is None else a.select(dim, i) for a, dim in zip(args, in_dims, strict=True))))
        if isinstance(outputs[0], tuple):
            return tuple(map(torch.stack, zip(*outputs, strict=True))), (0,) * len(outputs[0])
        return torch.stack(outputs), 0

    return rule


def _refuse_double_backward(ctx, *grads):
    raise RuntimeError(
        "hot_hf: the gradient of a HOT layer was differentiated again (a gradient penalty or a Hessian product). "
        "Its backward is quantized and has no derivative: call hot_hf.remove_hot(model), or exclude these layers "
        "with HOTConfig(exclude=[...])."
    )


def _fake_compress(x, fmt, rank, block_size, per_feature, rounding, seed):
    row = FORMATS[fmt]
    shape = row.packed_shape(x.shape[0], x.shape[1], rank, block_size)
    # The layout is the backend's: on a GPU the tokens (the contraction) are innermost.
    packed = backend_for(x).empty_kept(x, shape, torch.uint8 if row.bits == 4 else torch.int8)
    size = row.scale_size(x.shape[0], x.shape[1], per_feature)
    return packed, x.new_empty((size,), dtype=reference.compute_dtype(x))


@_operator(
    "(Tensor x, str fmt, SymInt rank, SymInt block_size, bool per_feature, str rounding, SymInt seed)"
    " -> (Tensor, Tensor)",
    _fake_compress,
)
def compress(backend: Backend, x, fmt, rank, block_size, per_feature, rounding, seed) -> Quantized:
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
    _check("compress", fmt=fmt, rank=rank, x=x)
    return FORMATS[fmt].compress(backend, x, rank, block_size, per_feature, rounding, seed)


def _input_product(backend: Backend, g_q: Quantized, weight, bits, block_size, per_token, rounding, seed, dtype):
    g_int, g_scale = g_q
    w_int, w_scale = backend.quantize_operand(weight, bits, 0, block_size, per_token, rounding, seed + 1)
    if w_scale.dtype != g_scale.dtype:  # a float64 weight under float32 gradients, or the other way round
        w_scale, g_scale = w_scale.to(torch.float64), g_scale.to(torch.float64)
    return backend.scaled_product(g_int, w_int, g_scale, w_scale, dtype)


@_operator(
    "(Tensor g, Tensor weight, SymInt bits, SymInt block_size, bool per_token, str rounding, SymInt seed,"
    " ScalarType dtype) -> Tensor",
    lambda g, weight, *settings: g.new_empty((g.shape[0], weight.shape[1]), dtype=settings[-1]),
)
def grad_input(backend: Backend, g, weight, bits, block_size, per_token, rounding, seed, dtype) -> Tensor:
    """The gradient of a layer's input: g times weight over the transformed out axis (spec.md, section 2).

    Args:
        g: (tokens, out_features); weight: (out_features, in_features); any floating type and stride.
        bits: 4 or 8; per_token: one scale per token and per input feature, else one per tensor each.
        seed: of g's rounding, and with 1 added of the weight's.

    Returns:
        (tokens, in_features) in ``dtype``.

    Raises:
        ValueError: on bits or tensors that do not fit.
    """
    _check("grad_input", bits, g=g, weight=weight)
    g_q = backend.quantize_operand(g, bits, 1, block_size, per_token, rounding, seed)
    return _input_product(backend, g_q, weight, bits, block_size, per_token, rounding, seed, dtype)


@_operator(
    "(Tensor g, Tensor packed, Tensor scale, str fmt, SymInt in_features, SymInt rank, SymInt block_size,"
    " bool per_feature, str rounding, SymInt seed, ScalarType dtype) -> Tensor",
    lambda g, packed, scale, fmt, in_features, *settings: g.new_empty((g.shape[1], in_features), dtype=settings[-1]),
)
def grad_weight(
    backend: Backend, g, packed, scale, fmt, in_features, rank, block_size, per_feature, rounding, seed, dtype
) -> Tensor:
    """The gradient of a layer's weight from what ``compress`` kept (spec.md, sections 3 and 5).

    Args:
        g: (tokens, out_features), any floating type and stride; packed, scale: from ``compress`` with the same
            ``fmt``, ``rank``, ``block_size`` and ``per_feature``.

    Returns:
        (out_features, in_features) in ``dtype``, contiguous.

    Raises:
        ValueError: on a format, rank or tensor that does not fit.
    """
    _check("grad_weight", fmt=fmt, rank=rank, g=g)
    row = FORMATS[fmt]
    g_q = backend.quantize_grad(g, *row.meets(rank, scale), per_feature, rounding, seed)
    return row.product(backend, g_q, packed, scale, in_features, block_size, dtype)


def _fake_grad_both(g, weight, *settings):
    input_dtype, weight_dtype = settings[-2:]
    grad_input = g.new_empty((g.shape[0], weight.shape[1]), dtype=input_dtype)
    return grad_input, g.new_empty(weight.shape, dtype=weight_dtype)


@_operator(
    "(Tensor g, Tensor weight, Tensor packed, Tensor scale, SymInt bits, str fmt, SymInt rank, SymInt block_size,"
    " bool per_token, bool per_feature, str rounding, SymInt seed, ScalarType input_dtype, ScalarType weight_dtype)"
    " -> (Tensor, Tensor)",
    _fake_grad_both,
)
def grad_both(
    backend: Backend, g, weight, packed, scale, bits, fmt, rank, block_size, per_token, per_feature, rounding, seed,
    input_dtype, weight_dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``grad_input`` with ``seed + GRAD_INPUT_SEED`` and ``grad_weight`` with ``seed + GRAD_WEIGHT_SEED``, sharing
    their passes over g; arguments and results are those of the two, with equal values."""
    _check("grad_both", bits, fmt, rank, g=g, weight=weight)
    row, seeds = FORMATS[fmt], (seed + GRAD_INPUT_SEED, seed + GRAD_WEIGHT_SEED)
    rows, columns = backend.quantize_both(
        g, bits, block_size, per_token, *row.meets(rank, scale), per_feature, rounding, seeds
    )
    return (
        _input_product(backend, rows, weight, bits, block_size, per_token, rounding, seeds[0], input_dtype),
        row.product(backend, columns, packed, scale, weight.shape[1], block_size, weight_dtype),
    )


OPERATORS = (compress, grad_input, grad_weight, grad_both)

"""What the forward keeps of a layer's input, and the weight gradient made from it (SPEC sections 3 to 5).

A format is a row of ``FORMATS``: how x is packed, and how g is quantized to meet it. Both are written once, on the
primitives of whichever backend holds the tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import reference


@dataclass(frozen=True)
class ProjectedFormat:
    """``hla_*``: the low-rank projection along tokens, one scale per feature. K of the product is N * rank / 16."""

    bits: int

    def packed_shape(self, tokens: int, features: int, rank: int, block_size: int) -> tuple[int, int]:
        rows = reference.padded(tokens, reference.TOKEN_BLOCK) // reference.TOKEN_BLOCK * rank
        return rows, features if self.bits == 8 else (features + 1) // 2

    def scale_size(self, tokens: int, features: int, per_feature: bool) -> int:
        return features if per_feature else 1

    def bytes_per_element(self, rank: int) -> float:
        return rank / 16 * self.bits / 8

    def compress(self, backend, x: Tensor, rank: int, block_size: int, per_feature: bool, rounding: str, seed: int):
        if self.bits == 8:
            return backend.project_quantize(x, 8, rank, per_feature, rounding, seed)
        if (packed := getattr(backend, "project_quantize_packed", None)) is not None:
            return packed(x, rank, per_feature, rounding, seed)
        q, scale = backend.project_quantize(x, 4, rank, per_feature, rounding, seed)
        return backend.pack_int4(q), scale

    def grad_weight(
        self, backend, g, packed, scale, in_features, rank, block_size, per_feature, rounding, seed, dtype, g_q=None
    ) -> Tensor:
        # g is not kept, so it stays at 8 bits whatever x was kept in.
        g_int, g_scale = g_q or backend.project_quantize(g, 8, rank, per_feature, rounding, seed)
        if self.bits == 4 and (fused := getattr(backend, "packed_product", None)) is not None:
            return fused(g_int.t(), packed, g_scale, scale, in_features, 1, dtype)
        x_int = backend.unpack_int4(packed, in_features) if self.bits == 4 else packed
        return backend.scaled_product(g_int.t(), x_int, g_scale, scale, dtype)


@dataclass(frozen=True)
class TokenFormat:
    """``ht_int4`` and ``int8``: every token kept, one scale per token, folded into g. K of the product is N."""

    bits: int
    transform: bool

    def _block(self, block_size: int) -> int:
        return block_size if self.transform else 1

    def packed_shape(self, tokens: int, features: int, rank: int, block_size: int) -> tuple[int, int]:
        columns = reference.padded(features, self._block(block_size))
        return tokens, columns if self.bits == 8 else (columns + 1) // 2

    def scale_size(self, tokens: int, features: int, per_feature: bool) -> int:
        return tokens

    def bytes_per_element(self, rank: int) -> float:
        return self.bits / 8

    def compress(self, backend, x: Tensor, rank: int, block_size: int, per_feature: bool, rounding: str, seed: int):
        block = self._block(block_size)
        if self.bits == 8:
            return backend.hadamard_quantize(x, 8, 1, block, True, rounding, seed)
        if (packed := getattr(backend, "hadamard_quantize_packed", None)) is not None:
            return packed(x, block, True, rounding, seed)
        q, scale = backend.hadamard_quantize(x, 4, 1, block, True, rounding, seed)
        return backend.pack_int4(q), scale

    def grad_weight(
        self, backend, g, packed, scale, in_features, rank, block_size, per_feature, rounding, seed, dtype, g_q=None
    ) -> Tensor:
        block = self._block(block_size)
        g_int, g_scale = g_q or backend.fold_quantize(g, scale, per_feature, rounding, seed)
        if self.bits == 4 and (fused := getattr(backend, "packed_product", None)) is not None:
            return fused(g_int.t(), packed, g_scale, None, in_features, block, dtype)
        x_int = backend.unpack_int4(packed, reference.padded(in_features, block)) if self.bits == 4 else packed
        if block == 1:
            return backend.scaled_product(g_int.t(), x_int, g_scale, None, dtype)
        if (fused := getattr(backend, "scaled_product_hadamard", None)) is not None:
            return fused(g_int.t(), x_int, g_scale, block, in_features, dtype)
        transformed = backend.scaled_product(g_int.t(), x_int, g_scale, None, g_scale.dtype)
        return backend.hadamard(transformed, block)[:, :in_features].to(dtype).contiguous()


FORMATS = {
    "hla_int8": ProjectedFormat(bits=8),  # the paper
    "hla_int4": ProjectedFormat(bits=4),  # ours
    "ht_int4": TokenFormat(bits=4, transform=True),  # ours, SPEC section 5
    "int8": TokenFormat(bits=8, transform=False),  # ours
}


def grad_input(
    backend,
    g: Tensor,
    weight: Tensor,
    bits: int,
    block_size: int,
    per_token: bool,
    rounding: str,
    seed: int,
    dtype,
    g_q: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """HQ, SPEC section 2: g (N, O) times weight (O, I) as an integer product over the transformed O axis.

    ``g_q``: g already quantized. A backend's ``quantize_operand`` may give operands in a form that only its own
    ``scaled_product`` reads.
    """
    quantize = getattr(backend, "quantize_operand", backend.hadamard_quantize)
    g_int, g_scale = g_q or quantize(g, bits, 1, block_size, per_token, rounding, seed)
    w_int, w_scale = quantize(weight, bits, 0, block_size, per_token, rounding, seed + 1)
    if w_scale.dtype != g_scale.dtype:  # a float64 weight under float32 gradients, or the other way round
        w_scale, g_scale = w_scale.to(torch.float64), g_scale.to(torch.float64)
    return backend.scaled_product(g_int, w_int, g_scale, w_scale, dtype)


def grad_both(
    backend,
    g: Tensor,
    weight: Tensor,
    packed: Tensor,
    scale: Tensor,
    bits: int,
    row: ProjectedFormat | TokenFormat,
    rank: int,
    block_size: int,
    per_token: bool,
    per_feature: bool,
    rounding: str,
    seed: int,
    input_dtype,
    weight_dtype,
) -> tuple[Tensor, Tensor]:
    """``grad_input`` with ``seed + 1`` and ``grad_weight`` with ``seed + 3``; a backend's ``quantize_both`` saves them
    a pass over g."""
    input_q = weight_q = None
    if (both := getattr(backend, "quantize_both", None)) is not None:
        along = (rank, None) if isinstance(row, ProjectedFormat) else (None, scale)
        input_q, weight_q = both(g, bits, block_size, per_token, *along, per_feature, rounding, (seed + 1, seed + 3))
    settings = (weight.shape[1], rank, block_size, per_feature, rounding, seed + 3, weight_dtype)
    return (
        grad_input(backend, g, weight, bits, block_size, per_token, rounding, seed + 1, input_dtype, input_q),
        row.grad_weight(backend, g, packed, scale, *settings, weight_q),
    )

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
        q, scale = backend.project_quantize(x, self.bits, rank, per_feature, rounding, seed)
        return (backend.pack_int4(q) if self.bits == 4 else q), scale

    def grad_weight(
        self, backend, g, packed, scale, in_features, rank, block_size, per_feature, rounding, seed, dtype
    ) -> Tensor:
        # g is not kept, so it stays at 8 bits whatever x was kept in.
        g_int, g_scale = backend.project_quantize(g, 8, rank, per_feature, rounding, seed)
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
        q, scale = backend.hadamard_quantize(x, self.bits, 1, self._block(block_size), True, rounding, seed)
        return (backend.pack_int4(q) if self.bits == 4 else q), scale

    def grad_weight(
        self, backend, g, packed, scale, in_features, rank, block_size, per_feature, rounding, seed, dtype
    ) -> Tensor:
        block = self._block(block_size)
        g_int, g_scale = backend.fold_quantize(g, scale, per_feature, rounding, seed)
        x_int = backend.unpack_int4(packed, reference.padded(in_features, block)) if self.bits == 4 else packed
        if block == 1:
            return backend.scaled_product(g_int.t(), x_int, g_scale, None, dtype)
        transformed = backend.scaled_product(g_int.t(), x_int, g_scale, None, g_scale.dtype)
        return backend.hadamard(transformed, block)[:, :in_features].to(dtype).contiguous()


FORMATS = {
    "hla_int8": ProjectedFormat(bits=8),  # the paper
    "hla_int4": ProjectedFormat(bits=4),  # ours
    "ht_int4": TokenFormat(bits=4, transform=True),  # ours, SPEC section 5
    "int8": TokenFormat(bits=8, transform=False),  # ours
}


def grad_input(
    backend, g: Tensor, weight: Tensor, bits: int, block_size: int, per_token: bool, rounding: str, seed: int, dtype
) -> Tensor:
    """HQ, SPEC section 2: g (N, O) times weight (O, I) as an integer product over the transformed O axis."""
    g_int, g_scale = backend.hadamard_quantize(g, bits, 1, block_size, per_token, rounding, seed)
    w_int, w_scale = backend.hadamard_quantize(weight, bits, 0, block_size, per_token, rounding, seed + 1)
    if w_scale.dtype != g_scale.dtype:  # a float64 weight under float32 gradients, or the other way round
        w_scale, g_scale = w_scale.to(torch.float64), g_scale.to(torch.float64)
    return backend.scaled_product(g_int, w_int, g_scale, w_scale, dtype)

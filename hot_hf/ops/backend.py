"""What a device computes with: every function that a backend may override, its default the reference.

A new backend is a subclass, given out by ``dispatch.py`` for the devices that it serves. It need bring nothing: what it
does not override runs in plain torch. What it overrides must give the same integers and scales, bit for bit, and
products equal to a few roundings of float32; the tests of ``tests/ops`` run over it as over the others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import reference

Quantized = tuple[Tensor, Tensor]  # integers and their scale


class Backend:
    """Plain torch, on any device. Arguments and results are those that ``reference`` documents."""

    name = "reference"

    # One step each.
    hadamard = staticmethod(reference.hadamard)
    hadamard_quantize = staticmethod(reference.hadamard_quantize)
    project_quantize = staticmethod(reference.project_quantize)
    fold_quantize = staticmethod(reference.fold_quantize)
    scaled_product = staticmethod(reference.scaled_product)
    pack_int4 = staticmethod(reference.pack_int4)
    unpack_int4 = staticmethod(reference.unpack_int4)

    # Several at once, for a backend to fuse.

    def hadamard_quantize_packed(
        self, x: Tensor, block_size: int, per_slice: bool, rounding: str = "nearest", seed: int = 0
    ) -> Quantized:
        """``pack_int4`` of ``hadamard_quantize`` of rows to 4 bits."""
        q, scale = self.hadamard_quantize(x, 4, 1, block_size, per_slice, rounding, seed)
        return self.pack_int4(q), scale

    def project_quantize_packed(
        self, x: Tensor, rank: int, per_slice: bool, rounding: str = "nearest", seed: int = 0
    ) -> Quantized:
        """``pack_int4`` of ``project_quantize`` to 4 bits."""
        q, scale = self.project_quantize(x, 4, rank, per_slice, rounding, seed)
        return self.pack_int4(q), scale

    def quantize_operand(
        self, x: Tensor, bits: int, dim: int, block_size: int, per_slice: bool, rounding: str = "nearest", seed: int = 0
    ) -> Quantized:
        """``hadamard_quantize`` for one use in ``scaled_product``; the integers may have a form that only this
        backend's product reads."""
        return self.hadamard_quantize(x, bits, dim, block_size, per_slice, rounding, seed)

    def quantize_grad(
        self, g: Tensor, rank: int | None, token_scale: Tensor | None, per_feature: bool, rounding: str, seed: int
    ) -> Quantized:
        """g (tokens, out) to 8 bits for grad_weight: folded with the scales of tokens, or projected with ``rank``."""
        if token_scale is not None:
            return self.fold_quantize(g, token_scale, per_feature, rounding, seed)
        return self.project_quantize(g, 8, rank, per_feature, rounding, seed)

    def quantize_both(
        self,
        g: Tensor,
        bits: int,
        block_size: int,
        per_token: bool,
        rank: int | None,
        token_scale: Tensor | None,
        per_feature: bool,
        rounding: str,
        seeds: tuple[int, int],
    ) -> tuple[Quantized, Quantized]:
        """``quantize_operand`` of g's rows and ``quantize_grad`` of g, which a backend makes in fewer passes over g."""
        rows = self.quantize_operand(g, bits, 1, block_size, per_token, rounding, seeds[0])
        return rows, self.quantize_grad(g, rank, token_scale, per_feature, rounding, seeds[1])

    def packed_product(
        self,
        a: Tensor,
        packed: Tensor,
        a_scale: Tensor,
        b_scale: Tensor | None,
        columns: int,
        block_size: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """``hadamard((a_scale * (a @ b)) * b_scale, block_size)[:, :columns]`` in ``dtype``.

        Args:
            a: int8 (m, k); packed: uint8 (k, ceil(padded columns / 2)), b as ``pack_int4`` gives it, of whole blocks;
                block_size: of the inverse transform, 1 for none.
        """
        b = self.unpack_int4(packed, reference.padded(columns, block_size))
        if block_size == 1:
            return self.scaled_product(a, b, a_scale, b_scale, dtype)
        product = self.scaled_product(a, b, a_scale, b_scale, a_scale.dtype)
        return self.hadamard(product, block_size)[:, :columns].to(dtype).contiguous()

    def empty_kept(self, x: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Uninitialized memory in the layout of what the quantizers keep of ``x``, for fakes."""
        return x.new_empty(shape, dtype=dtype)

    def warm_up(self) -> bool:
        """Make ready what would otherwise be made inside the first step; whether this backend's own code runs."""
        return True


REFERENCE = Backend()

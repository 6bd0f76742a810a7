"""The Triton backend: kernels for GPUs, equal to the reference in every integer.

Importing it needs Triton; ``dispatch.py`` does so only for a tensor on a device that it can serve. float64 takes the
torch path: these kernels compute in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.runtime import driver

from ..backend import Backend, Quantized
from .features import quantize_rows, quantize_tokens
from .product import contraction_innermost, product
from .tokens import AlongFeatures, AlongTokens, quantize_tiles
from .tuning import Family, family_of_device


def check_device(device_type: str, index: int | None) -> None:
    """Raise what stands in the kernels' way: no driver for Triton, or an architecture without them."""
    family_of_device(device_type, index)
    driver.active.get_current_target()


def _family(x: Tensor) -> Family:
    return family_of_device(x.device.type, x.device.index)


def _torch_path(x: Tensor) -> bool:
    return x.dtype == torch.float64 or x.numel() == 0


def _hadamard_quantize(x, bits, dim, block_size, per_slice, rounding, seed, pack: bool) -> Quantized:
    family = _family(x)
    if dim == 0:
        tokens = AlongTokens(bits, per_slice, seed, block_size=block_size, pack="rows" if pack else "")
        return quantize_tiles(x, family, None, tokens, rounding)[1]
    if per_slice and (result := quantize_rows(x, family, bits, block_size, pack, rounding, seed)) is not None:
        return result
    return quantize_tiles(x, family, AlongFeatures(bits, block_size, per_slice, pack, seed), None, rounding)[0]


class TritonBackend(Backend):
    """Kernels for everything but float64 and empty tensors."""

    name = "triton"

    def hadamard_quantize(
        self, x: Tensor, bits: int, dim: int, block_size: int, per_slice: bool, rounding: str = "nearest", seed: int = 0
    ) -> Quantized:
        """The rows innermost in memory: the contraction of W in grad_input (``dim`` 0), and of x in grad_weight
        (``dim`` 1; per tensor, which is never kept, as the torch path)."""
        if _torch_path(x):
            return super().hadamard_quantize(x, bits, dim, block_size, per_slice, rounding, seed)
        if dim == 1 and per_slice:
            return quantize_tokens(x, _family(x), bits, block_size, False, rounding, seed)
        return _hadamard_quantize(x, bits, dim, block_size, per_slice, rounding, seed, pack=False)

    def project_quantize(
        self, x: Tensor, bits: int, rank: int, per_slice: bool, rounding: str = "nearest", seed: int = 0
    ) -> Quantized:
        """The rows innermost in memory."""
        if _torch_path(x):
            return super().project_quantize(x, bits, rank, per_slice, rounding, seed)
        return quantize_tiles(x, _family(x), None, AlongTokens(bits, per_slice, seed, rank=rank), rounding)[1]

    def fold_quantize(
        self, g: Tensor, token_scale: Tensor, per_slice: bool, rounding: str = "nearest", seed: int = 0
    ) -> Quantized:
        """The rows innermost in memory."""
        if _torch_path(g) or token_scale.dtype == torch.float64:
            return super().fold_quantize(g, token_scale, per_slice, rounding, seed)
        return quantize_tiles(g, _family(g), None, AlongTokens(8, per_slice, seed, token_scale=token_scale), rounding)[
            1
        ]

    def hadamard_quantize_packed(
        self, x: Tensor, block_size: int, per_slice: bool, rounding: str = "nearest", seed: int = 0
    ) -> Quantized:
        """In the same launch, the rows innermost in memory."""
        if _torch_path(x):
            return super().hadamard_quantize_packed(x, block_size, per_slice, rounding, seed)
        if per_slice:
            return quantize_tokens(x, _family(x), 4, block_size, True, rounding, seed)
        return _hadamard_quantize(x, 4, 1, block_size, per_slice, rounding, seed, pack=True)

    def project_quantize_packed(
        self, x: Tensor, rank: int, per_slice: bool, rounding: str = "nearest", seed: int = 0
    ) -> Quantized:
        """In the same launches, the rows innermost in memory."""
        if _torch_path(x):
            return super().project_quantize_packed(x, rank, per_slice, rounding, seed)
        return quantize_tiles(
            x, _family(x), None, AlongTokens(4, per_slice, seed, rank=rank, pack="columns"), rounding
        )[1]

    def empty_kept(self, x: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """What the quantizers of every format allocate for ``x``: the layout for the fake of ``compress``."""
        if _torch_path(x):
            return super().empty_kept(x, shape, dtype)
        return contraction_innermost(shape[1], shape[0], dtype, x.device).t()

    def quantize_operand(
        self, x: Tensor, bits: int, dim: int, block_size: int, per_slice: bool, rounding: str = "nearest", seed: int = 0
    ) -> Quantized:
        """``dim`` (the contraction) innermost in memory, at 4 bits two neighbours along it in a byte."""
        if _torch_path(x):
            return super().quantize_operand(x, bits, dim, block_size, per_slice, rounding, seed)
        return _hadamard_quantize(x, bits, dim, block_size, per_slice, rounding, seed, pack=bits == 4)

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
        """Both in two reads of g, where they would be three one after the other."""
        if _torch_path(g) or (token_scale is not None and token_scale.dtype == torch.float64):
            along = (rank, token_scale, per_feature)
            return super().quantize_both(g, bits, block_size, per_token, *along, rounding, seeds)
        features = AlongFeatures(bits, block_size, per_token, bits == 4, seeds[0])
        tokens = AlongTokens(8, per_feature, seeds[1], rank=rank, token_scale=token_scale)
        return quantize_tiles(g, _family(g), features, tokens, rounding)

    def scaled_product(
        self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Operands of ``quantize_operand`` may be packed (uint8) along the contraction."""
        packed = a.dtype == b.dtype == torch.uint8
        plain = 0 in (*a.shape, b.shape[1]) or a_scale.dtype == torch.float64
        if plain or not packed:  # one operand may have come from the torch path
            if a.dtype == torch.uint8:
                a = self.unpack_int4(a, a.shape[1] * 2 if packed else b.shape[0])
            if b.dtype == torch.uint8:
                b = self.unpack_int4(b.t(), a.shape[1]).t()
        if plain:
            return super().scaled_product(a, b, a_scale, b_scale, dtype)
        out = torch.empty(a.shape[0], b.shape[1], dtype=dtype, device=a.device)
        return product(a, b, a_scale, b_scale, out, _family(a), pack="k" if packed else "")

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
        """b is widened, and the result transformed back, inside the product."""
        if 0 in (*a.shape, columns) or a_scale.dtype == torch.float64:
            return super().packed_product(a, packed, a_scale, b_scale, columns, block_size, dtype)
        out = torch.empty(a.shape[0], columns, dtype=dtype, device=a.device)
        # Transposed, so that the packed operand is the left one: matrix instructions can read that one from registers,
        # where it was widened, and the inverse transform runs down a column of the tile.
        product(packed.t(), a.t(), b_scale, a_scale, out.t(), _family(a), "m", b_first=True, block_size=block_size)
        return out


BACKEND = TritonBackend()

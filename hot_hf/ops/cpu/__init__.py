"""The CPU backend: int8 products (``products.py``) between fused quantizers.

Integers equal the reference bit for bit. The fused parts, ``kernels.cpp`` and its headers, are compiled with the
machine's own C++ compiler at the first use (about 3 s, kept in the user's cache directory); without a compiler, for
float64 and for empty tensors the reference computes.

Compiled C++ rather than torch.compile: no recompilation by shape or rounding, and nothing nested when an operator runs
inside someone else's torch.compile. In one run (``benchmarks/bench_ops.py quantizers``, docs/results/bench.md)
it took a third to a sixteenth of the time of inductor's code, whose first calls took 0.4 to 10 s.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from .. import reference
from ..backend import Backend, Quantized
from ..reference import QMAX, ROUNDINGS, TOKEN_BLOCK, padded
from . import products
from .build import DTYPES, ByRow, check, library
from .workspace import temporary


@cache
def _keep(kept: tuple[int, ...]) -> ctypes.Array:
    return (ctypes.c_int32 * len(kept))(*kept)


@cache
def _sequencies(rank: int) -> tuple[int, ...]:
    return tuple(reference.sequency_order()[:rank])


def _fresh(rows: int, columns: int) -> Tensor:
    return torch.empty(rows, columns, dtype=torch.int8)


def _quantize(
    x: Tensor,
    bits: int,
    dim: int,
    block: int,
    per_slice: bool,
    rounding: str,
    seed: int,
    packed: bool = False,
    kept: tuple[int, ...] | None = None,
    row_scale: Tensor | None = None,
    by_row: ByRow | None = None,
    empty: Callable[[int, int], Tensor] = _fresh,
) -> Quantized | None:
    """Every quantizer in one call; ``kept`` rows of each transformed block; ``by_row``: a second result, same pass;
    ``empty`` gives the memory of the integers. None where the reference must compute.
    """
    kernels = library()
    if kernels is None or x.dtype not in DTYPES or x.numel() == 0:
        return None
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding must be one of {ROUNDINGS}, not {rounding!r}")
    x = x.detach()
    turned = x.stride(1) != 1 and x.stride(0) == 1 and kept is None and not packed and by_row is None
    turned = turned and row_scale is None
    if turned:  # a transposed view, such as the weight of a Conv1D: work on the memory as it lies
        x, dim = x.t(), 1 - dim
    elif x.stride(1) != 1 or x.stride(0) < 0:
        x = x.contiguous()
    rows, columns = x.shape
    out_columns = padded(columns, block) if dim == 1 else columns
    if dim == 1:
        out_rows, kept = rows, (0,)
    else:
        kept = kept or tuple(range(block))
        out_rows = padded(rows, block) // block * len(kept)
    # Elements are numbered row-major in the result as the caller sees it.
    numbers = (1, out_rows) if turned else (out_columns, 1)
    q = empty(out_rows, (out_columns + 1) // 2 if packed else out_columns)
    scale = torch.empty(1 if not per_slice else out_rows if dim == 1 else columns, dtype=torch.float32)
    failed = kernels.hot_hf_quantize(
        x.data_ptr(),
        DTYPES[x.dtype],
        rows,
        columns,
        x.stride(0),
        dim,
        block,
        block**-0.5,
        None if row_scale is None else row_scale.data_ptr(),
        _keep(kept),
        len(kept),
        QMAX[bits],
        not per_slice,
        packed,
        ROUNDINGS.index(rounding),
        seed & 0xFFFFFFFFFFFFFFFF,
        *numbers,
        q.data_ptr(),
        scale.data_ptr(),
        torch.get_num_threads(),
        None if by_row is None else ctypes.addressof(by_row),
    )
    check(failed, x.dtype, block)
    q = q.t() if turned else q
    return (q.view(torch.uint8) if packed else q), scale


class CPUBackend(Backend):
    """Fused quantizers and products; the default where they cannot serve."""

    name = "cpu"
    scaled_product = staticmethod(products.scaled_product)
    packed_product = staticmethod(products.packed_product)
    unpack_int4 = staticmethod(products.unpack_int4)

    def warm_up(self) -> bool:
        """Build or load the kernels; whether they are there."""
        return library() is not None

    def hadamard_quantize(
        self, x: Tensor, bits: int, dim: int, block_size: int, per_slice: bool, rounding: str = "nearest", seed: int = 0
    ) -> Quantized:
        """``reference.hadamard_quantize``, fused."""
        fused = _quantize(x, bits, dim, block_size, per_slice, rounding, seed)
        return fused or super().hadamard_quantize(x, bits, dim, block_size, per_slice, rounding, seed)

    def quantize_operand(
        self, x: Tensor, bits: int, dim: int, block_size: int, per_slice: bool, rounding: str = "nearest", seed: int = 0
    ) -> Quantized:
        """``hadamard_quantize`` for one use in ``scaled_product``, in memory that is used again."""
        fused = _quantize(x, bits, dim, block_size, per_slice, rounding, seed, empty=temporary)
        return fused or super().quantize_operand(x, bits, dim, block_size, per_slice, rounding, seed)

    def hadamard_quantize_packed(
        self, x: Tensor, block_size: int, per_slice: bool, rounding: str = "nearest", seed: int = 0
    ) -> Quantized:
        """``hadamard_quantize`` of rows to 4 bits, followed by ``pack_int4``, in one pass."""
        fused = _quantize(x, 4, 1, block_size, per_slice, rounding, seed, packed=True)
        return fused or super().hadamard_quantize_packed(x, block_size, per_slice, rounding, seed)

    def project_quantize(
        self, x: Tensor, bits: int, rank: int, per_slice: bool, rounding: str = "nearest", seed: int = 0
    ) -> Quantized:
        """``reference.project_quantize``, fused."""
        fused = _quantize(x, bits, 0, TOKEN_BLOCK, per_slice, rounding, seed, kept=_sequencies(rank))
        return fused or super().project_quantize(x, bits, rank, per_slice, rounding, seed)

    def project_quantize_packed(
        self, x: Tensor, rank: int, per_slice: bool, rounding: str = "nearest", seed: int = 0
    ) -> Quantized:
        """``project_quantize`` to 4 bits, followed by ``pack_int4``, in one pass."""
        kept = _sequencies(rank)
        fused = _quantize(x, 4, 0, TOKEN_BLOCK, per_slice, rounding, seed, packed=True, kept=kept)
        return fused or super().project_quantize_packed(x, rank, per_slice, rounding, seed)

    def fold_quantize(
        self, g: Tensor, token_scale: Tensor, per_slice: bool, rounding: str = "nearest", seed: int = 0
    ) -> Quantized:
        """``reference.fold_quantize``, fused."""
        fused = None
        if token_scale.dtype == torch.float32:
            fused = _quantize(
                g, 8, 0, 1, per_slice, rounding, seed, row_scale=token_scale.contiguous(), empty=temporary
            )
        return fused or super().fold_quantize(g, token_scale, per_slice, rounding, seed)

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
        """Both in two reads of g instead of three, where rows have scales of their own."""
        folded_type = torch.float32 if token_scale is None else token_scale.dtype
        if not per_token or folded_type != torch.float32 or g.dtype not in DTYPES or not g.numel() or library() is None:
            along = (rank, token_scale, per_feature)
            return super().quantize_both(g, bits, block_size, per_token, *along, rounding, seeds)
        width = padded(g.shape[1], block_size)
        q = temporary(g.shape[0], width)
        scale = torch.empty(g.shape[0], dtype=torch.float32)
        seed = seeds[0] & 0xFFFFFFFFFFFFFFFF
        by_row = ByRow(block_size, block_size**-0.5, QMAX[bits], seed, width, q.data_ptr(), scale.data_ptr())
        if rank is None:
            options = {"row_scale": token_scale.contiguous(), "block": 1}
        else:
            options = {"kept": _sequencies(rank), "block": TOKEN_BLOCK}
        columns = _quantize(
            g, 8, 0, per_slice=per_feature, rounding=rounding, seed=seeds[1], by_row=by_row, empty=temporary, **options
        )
        return (q, scale), columns


BACKEND = CPUBackend()

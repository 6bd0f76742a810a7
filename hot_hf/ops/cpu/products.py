"""int8 products whose int32 sums are scaled, and transformed if asked, before they leave the cache.

On AMX tiles by the kernels' own product (``product.h``); elsewhere, and under ``HOT_HF_CPU_AMX=0``, by torch's (oneDNN:
AVX-512 VNNI), or, where that is slow, by float32 products, which are exact, followed by a pass over the sums.
"""

from __future__ import annotations

import os
import time
from functools import cache

import torch
from torch import Tensor

from .. import reference
from ..reference import hadamard
from .build import DTYPES, check, library
from .workspace import temporary

# int32 products are made and scaled in slices of at most this many bytes: shorter ones pack the right operand again too
# often (4 MB: +20% time for 2048 x 4096 x 4096), longer ones leave the cache and the workspace (64 MB: +2%).
SCRATCH_BYTES = 16 << 20

Scales = tuple[int, int, int | None, int]  # of a and of b: address and step


@cache
def int_mm_is_exact() -> bool:
    """Kernels without VNNI may saturate sums of two products at 16 bits; torch does not say which it picked."""
    extreme = torch.full((64, 64), 127, dtype=torch.int8)
    return bool((torch._int_mm(extreme, -extreme) == -127 * 127 * 64).all())


@cache
def int_mm_serves() -> bool:
    """Whether torch's int8 product is exact and no slower than float32 products of the same integers, measured once.

    On a CPU with AVX2 alone (torch 2.13) it runs at 1 Gop/s, where float32 reaches 55. The sums are the same.
    """
    if not int_mm_is_exact():
        return False
    a = torch.ones((256, 256), dtype=torch.int8)
    seconds = []
    for product in (torch._int_mm, reference.exact_int_product):
        product(a, a)
        start = time.perf_counter()
        product(a, a)
        seconds.append(time.perf_counter() - start)
    return seconds[0] <= seconds[1]


def _plain(t: Tensor) -> Tensor:
    """``t``, or a copy where ``_int_mm`` (2.13) multiplies garbage: a matrix with an axis of one element, whose stride
    may be anything (the transpose of a column is (1, K) with strides (1, 1)), and one whose rows overlap (expanded).
    ``contiguous`` sees nothing to do in the first."""
    (rows, columns), (row, column) = t.shape, t.stride()
    usable = 1 not in t.shape and ((column == 1 and row >= columns) or (row == 1 and column >= rows))
    return t if usable else torch.empty(t.shape, dtype=t.dtype).copy_(t)


def int_product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """int8 (M, K) times int8 (K, N) as int32; any strides, empty axes give zeros."""
    if 0 in (a.shape[0], a.shape[1], b.shape[1]):
        return torch.zeros(a.shape[0], b.shape[1], dtype=torch.int32)
    if not int_mm_serves():
        return reference.exact_int_product(a, b)
    a, b = _plain(a), _plain(b)
    return torch._int_mm(a, b) if out is None else torch._int_mm(a, b, out=out)


def _product(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor | None, dtype: torch.dtype, block: int, columns: int
) -> Tensor | None:
    """``(a_scale * (a @ b)) * b_scale`` transformed along its rows, cut to ``columns``; b int8, or uint8 with two 4-bit
    integers a byte. None: not here."""
    packed = b.dtype == torch.uint8
    width = reference.padded(columns, block) if packed else b.shape[1]
    scales_fit = a_scale.dtype == torch.float32 and (b_scale is None or b_scale.dtype == torch.float32)
    if library() is None or dtype not in DTYPES or not scales_fit:
        return None
    if not 0 < a.shape[1] <= reference.MAX_CONTRACTION or 0 in (a.shape[0], width):
        return None
    if not has_amx() and packed:
        return None
    out = torch.empty(a.shape[0], columns, dtype=dtype)
    a_scale = a_scale.contiguous()
    b_scale = None if b_scale is None else b_scale.contiguous()
    scales = (a_scale.data_ptr(), int(a_scale.numel() > 1))
    scales += (None, 0) if b_scale is None else (b_scale.data_ptr(), int(b_scale.numel() > 1))
    (_tiled if has_amx() else _sliced)(a, b, width, scales, block, out)
    return out


@cache
def has_amx() -> bool:
    """Whether the kernels' own product runs here, on AMX tiles; ``HOT_HF_CPU_AMX=0`` leaves products to torch."""
    kernels = library()
    return kernels is not None and os.environ.get("HOT_HF_CPU_AMX") != "0" and bool(kernels.hot_hf_amx())


def _tiled(a: Tensor, b: Tensor, width: int, scales: Scales, block: int, out: Tensor) -> None:
    """The product on AMX tiles: its sums are scaled before they leave the cache."""
    kernels, threads = library(), torch.get_num_threads()
    packed = b.dtype == torch.uint8
    sizes = (a.shape[0], width, a.shape[1])
    a = a if 1 in a.stride() else a.contiguous()
    b = b if b.stride(1) == 1 or (b.stride(0) == 1 and not packed) else b.contiguous()
    scratch = temporary(1, kernels.hot_hf_product_bytes(*sizes, threads))
    failed = kernels.hot_hf_product(
        a.data_ptr(),
        *a.stride(),
        b.data_ptr(),
        *b.stride(),
        packed,
        *sizes,
        *scales,
        block,
        block**-0.5,
        out.data_ptr(),
        DTYPES[out.dtype],
        out.shape[1],
        scratch.data_ptr(),
        threads,
    )
    check(failed, out.dtype, block)


def _sliced(a: Tensor, b: Tensor, width: int, scales: Scales, block: int, out: Tensor) -> None:
    """torch's product or float32's, in slices whose int32 sums are still in the cache when they are scaled."""
    height, columns = a.shape[0], out.shape[1]
    a_scale, a_step, b_scale, b_step = scales
    serves = int_mm_serves()
    b = _plain(b) if serves else b.float()
    rows = max(1, min(height, SCRATCH_BYTES // (4 * width)))
    scratch = temporary(rows, width, torch.int32)
    for start in range(0, height, rows):
        count = min(rows, height - start)
        part = a[start : start + count]
        into = scratch[:count]
        part = torch._int_mm(_plain(part), b, out=into) if serves else reference.exact_int_product(part, b)
        failed = library().hot_hf_epilogue(
            part.data_ptr(),
            count,
            width,
            a_scale + 4 * start * a_step,
            a_step,
            b_scale,
            b_step,
            block,
            block**-0.5,
            out.data_ptr() + start * columns * out.element_size(),
            DTYPES[out.dtype],
            columns,
            torch.get_num_threads(),
        )
        check(failed, out.dtype, block)


def scaled_product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``reference.scaled_product``; the int32 result never leaves the cache."""
    fused = _product(a, b, a_scale, b_scale, dtype, 1, b.shape[1])
    return reference.scaled_product(a, b, a_scale, b_scale, dtype, int_product) if fused is None else fused


def scaled_product_hadamard(
    a: Tensor, b: Tensor, a_scale: Tensor, block_size: int, columns: int, dtype: torch.dtype
) -> Tensor:
    """``hadamard(a_scale * (a @ b), block_size)[:, :columns]`` in ``dtype``; ``b`` has whole blocks of columns."""
    if (fused := _product(a, b, a_scale, None, dtype, block_size, columns)) is not None:
        return fused
    product = reference.scaled_product(a, b, a_scale, None, a_scale.dtype, int_product)
    return hadamard(product, block_size)[:, :columns].to(dtype).contiguous()


def unpack_int4(packed: Tensor, columns: int) -> Tensor:
    """``reference.unpack_int4``, threaded."""
    kernels = library()
    if kernels is None or packed.numel() == 0 or not packed.is_contiguous():
        return reference.unpack_int4(packed, columns)
    q = temporary(packed.shape[0], columns)
    kernels.hot_hf_unpack(packed.data_ptr(), *packed.shape, columns, q.data_ptr(), torch.get_num_threads())
    return q


def packed_product(
    a: Tensor,
    packed: Tensor,
    a_scale: Tensor,
    b_scale: Tensor | None,
    columns: int,
    block_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """``hadamard((a_scale * (a @ b)) * b_scale, block_size)[:, :columns]``; ``packed`` holds b as ``pack_int4`` gives
    it, of whole blocks of columns, and is widened as it is read."""
    if (fused := _product(a, packed, a_scale, b_scale, dtype, block_size, columns)) is not None:
        return fused
    b = unpack_int4(packed, reference.padded(columns, block_size))
    if block_size == 1:
        return scaled_product(a, b, a_scale, b_scale, dtype)
    return scaled_product_hadamard(a, b, a_scale, block_size, columns, dtype)

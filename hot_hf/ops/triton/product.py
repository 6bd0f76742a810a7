"""The int8 x int8 -> int32 product with its scales, and the inverse transform, in the epilogue.

Both operands want the contraction innermost in memory: 8-bit matrix instructions have no transposed load. The
quantizers write it so; an operand that comes otherwise (rows selected for image order, or hooks that gave it back in
another layout) is copied first. That is one read and one write of its bytes; transposing each tile byte by byte inside
the product would repeat it per tile of the other one.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from .arithmetic import butterfly_rows
from .launch import launch, log2, on_device
from .tuning import LONG, Family, ProductTile, product_tile

# Longer contractions are split and their parts summed in float32 (docs/spec.md, section 6); whole steps of any bk.
MAX_CONTRACTION = tl.constexpr(reference.MAX_CONTRACTION)


@triton.jit
def high_nibbles(packed):
    """16 times the odd (high) 4-bit value of each byte: the sign needs no extension, the factor is exact."""
    return (packed & 0xF0).to(tl.int8, bitcast=True)


@triton.jit
def low_nibbles(packed):
    """16 times the even (low) 4-bit value of each byte."""
    return (packed << 4).to(tl.int8, bitcast=True)


@triton.jit
def widened(acc, PACK: tl.constexpr):
    """The int32 sums as float32, without the factors of the nibbles."""
    if PACK == "m":
        acc = acc >> 4
    if PACK == "k":
        acc = acc >> 8
    return acc.to(tl.float32)


@triton.jit
def step_pair(a, b, even, odd, PACK: tl.constexpr):
    """One step of the contraction; ``odd`` is the sum of the odd output rows for PACK "m"."""
    if PACK == "m":
        even = tl.dot(low_nibbles(a), b, even, out_dtype=tl.int32)
        odd = tl.dot(high_nibbles(a), b, odd, out_dtype=tl.int32)
    elif PACK == "k":
        even = tl.dot(low_nibbles(a), low_nibbles(b), even, out_dtype=tl.int32)
        even = tl.dot(high_nibbles(a), high_nibbles(b), even, out_dtype=tl.int32)
    else:
        even = tl.dot(a, b, even, out_dtype=tl.int32)
    return even, odd


@triton.jit
def contract(
    a, b, start, stop, stride_ak, stride_bk, even, odd, BK: tl.constexpr, TAIL: tl.constexpr, PACK: tl.constexpr
):
    """Integer sums over bytes start..stop of the contraction. ``a``, ``b``: pointers (rows, 1) and (1, columns).

    Whole steps load without a mask, which keeps 16-byte accesses for every length; the tail goes in masked steps of 32.
    """
    whole = stop - (stop - start) % BK
    step = tl.arange(0, BK).to(tl.int64)
    a_pointers = a + (start + step)[None, :] * stride_ak
    b_pointers = b + (start + step)[:, None] * stride_bk
    for _ in range(start, whole, BK):
        even, odd = step_pair(tl.load(a_pointers), tl.load(b_pointers), even, odd, PACK)
        a_pointers += BK * stride_ak
        b_pointers += BK * stride_bk
    if TAIL:
        for begin in tl.range(whole, stop, 32, num_stages=1):
            rest = (begin + tl.arange(0, 32)).to(tl.int64)
            inside = rest < stop
            a_tile = tl.load(a + rest[None, :] * stride_ak, inside[None, :], other=0)
            b_tile = tl.load(b + rest[:, None] * stride_bk, inside[:, None], other=0)
            even, odd = step_pair(a_tile, b_tile, even, odd, PACK)
    return even, odd


@triton.jit(do_not_specialize=["rows"])
def product_kernel(
    a,
    b,
    a_scale,
    b_scale,
    out,
    m,
    n,
    k,
    rows,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_om,
    stride_on,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PACK: tl.constexpr,
    A_SCALE: tl.constexpr,
    B_SCALE: tl.constexpr,
    B_FIRST: tl.constexpr,
    TAIL: tl.constexpr,
    LONG: tl.constexpr,
    LOG: tl.constexpr,
):
    """One BM x BN tile of ``out = (a @ b) * a_scale * b_scale``, its first ``rows`` rows stored.

    m, n, k count bytes of a (m, k) and b (k, n) as they lie in memory. PACK "k": both packed along k. PACK "m": a
    packed along m, so that output rows 2i and 2i + 1 share byte row i. A_SCALE, B_SCALE: "" none, "one" or "each";
    B_FIRST: the order of the two factors. LOG: transform of blocks of 2^LOG output rows after the scales.
    """
    ROWS: tl.constexpr = BM // 2 if PACK == "m" else BM
    tiles_m = tl.cdiv(m, ROWS)
    tiles_n = tl.cdiv(n, BN)
    # Programs that run at the same time form squares of GROUP tiles, so that they share operands in L2.
    program = tl.program_id(0)
    group = program // (GROUP * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP, GROUP)
    tile_m = group * GROUP + (program % (GROUP * tiles_n)) % height
    tile_n = (program % (GROUP * tiles_n)) // height

    # Rows and columns past the end wrap around: their loads need no mask, and they are never stored.
    a_row = ((tile_m * ROWS + tl.arange(0, ROWS)) % m).to(tl.int64)
    b_column = ((tile_n * BN + tl.arange(0, BN)) % n).to(tl.int64)
    a_base = a + a_row[:, None] * stride_am
    b_base = b + b_column[None, :] * stride_bn
    zero = tl.zeros([ROWS, BN], tl.int32)
    if LONG:
        total = tl.zeros([ROWS, BN], tl.float32)
        total_odd = total
        SPAN: tl.constexpr = MAX_CONTRACTION // 2 if PACK == "k" else MAX_CONTRACTION
        for start in range(0, k, SPAN):
            stop = tl.minimum(k, start + SPAN)
            even, odd = contract(a_base, b_base, start, stop, stride_ak, stride_bk, zero, zero, BK, TAIL, PACK)
            total += widened(even, PACK)
            if PACK == "m":
                total_odd += widened(odd, PACK)
    else:
        even, odd = contract(a_base, b_base, 0, k, stride_ak, stride_bk, zero, zero, BK, TAIL, PACK)
        total = widened(even, PACK)
        total_odd = widened(odd, PACK)
    if PACK == "m":
        total = tl.reshape(tl.permute(tl.join(total, total_odd), (0, 2, 1)), [BM, BN])

    row = tile_m.to(tl.int64) * BM + tl.arange(0, BM)
    column = tile_n.to(tl.int64) * BN + tl.arange(0, BN)
    total = scaled(total, a_scale, b_scale, row, column, rows, n, A_SCALE, B_SCALE, B_FIRST)
    total = butterfly_rows(total, BM, BN, LOG)
    pointers = out + row[:, None] * stride_om + column[None, :] * stride_on
    tl.store(pointers, total.to(out.dtype.element_ty), (row < rows)[:, None] & (column < n)[None, :])


@triton.jit
def scaled(
    total,
    a_scale,
    b_scale,
    row,
    column,
    rows,
    n,
    A_SCALE: tl.constexpr,
    B_SCALE: tl.constexpr,
    B_FIRST: tl.constexpr,
):
    if A_SCALE == "each":
        of_row = tl.load(a_scale + row, row < rows, other=0.0)[:, None]
    if A_SCALE == "one":
        of_row = tl.load(a_scale)
    if B_SCALE == "each":
        of_column = tl.load(b_scale + column, column < n, other=0.0)[None, :]
    if B_SCALE == "one":
        of_column = tl.load(b_scale)
    if B_FIRST:
        if B_SCALE != "":
            total = total * of_column
        if A_SCALE != "":
            total = total * of_row
    else:
        if A_SCALE != "":
            total = total * of_row
        if B_SCALE != "":
            total = total * of_column
    return total


@triton.jit(do_not_specialize=["rows"])
def transpose_kernel(x, y, rows, columns, stride_row, stride_column, y_stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    """y (columns, rows), rows innermost, from x (rows, columns): bytes."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLS + tl.arange(0, COLS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tile = tl.load(x + row[:, None] * stride_row + column[None, :] * stride_column, inside, other=0)
    # Up to the end of y's rows, which are a multiple of 16 long: a mask by ``rows`` would store byte by byte.
    inside = (column < columns)[:, None] & (row < y_stride)[None, :]
    tl.store(y + column[:, None] * y_stride + row[None, :], tl.trans(tile), inside)


ALIGNMENT = 16  # bytes: the widest load


def contraction_innermost(rows: int, k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised (rows, k) of bytes whose rows start at multiples of 16 bytes."""
    return torch.empty(rows, reference.padded(k, ALIGNMENT), dtype=dtype, device=device)[:, :k]


def _innermost(t: Tensor) -> Tensor:
    """``t`` (rows, k), copied where k is not innermost or its rows are not aligned."""
    if t.stride(1) == 1 and t.stride(0) % ALIGNMENT == 0 and t.data_ptr() % ALIGNMENT == 0:
        return t
    copy = contraction_innermost(*t.shape, t.dtype, t.device)
    k, rows = t.t().shape
    grid = (triton.cdiv(k, 64), triton.cdiv(rows, 64))
    launch(transpose_kernel, grid, t, t, copy, k, rows, *t.t().stride(), copy.stride(0), warps=4, ROWS=64, COLS=64)
    return copy


def _scale_kind(scale: Tensor | None) -> str:
    return "" if scale is None else "one" if scale.numel() == 1 else "each"


def _processors(device: torch.device) -> int:
    if device.type == "cpu":
        return 1
    if device.type == "meta":  # compilation ahead of time: as many as an H100 or H200 has
        return 132
    return torch.get_device_module(device).get_device_properties(device).multi_processor_count


def product(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    out: Tensor,
    family: Family,
    pack: str = "",
    b_first: bool = False,
    block_size: int = 1,
) -> Tensor:
    """Fill ``out`` with ``(a @ b) * a_scale * b_scale``, transformed along its rows in blocks of ``block_size``.

    Args:
        a: (m, k) and b: (k, n): int8, or uint8 as ``pack`` says ("k": both packed along k; "m": a along m).
        a_scale: float32 (rows,), (1,) or None; b_scale: (n,), (1,) or None; b_first: multiply by b_scale first.
        out: (rows, n), any strides and floating type; rows may leave out the padding of m.
    """
    a, b = _innermost(a), _innermost(b.t()).t()
    (m, k), n = a.shape, b.shape[1]
    limit = reference.MAX_CONTRACTION // (2 if pack == "k" else 1)

    def run(tile: ProductTile) -> None:
        rows = tile.bm // 2 if pack == "m" else tile.bm
        launch(
            product_kernel,
            (triton.cdiv(m, rows) * triton.cdiv(n, tile.bn),),
            a,
            a,
            b,
            a if a_scale is None else a_scale,
            a if b_scale is None else b_scale,
            out,
            m,
            n,
            k,
            out.shape[0],
            *a.stride(),
            *b.stride(),
            *out.stride(),
            warps=tile.warps,
            stages=tile.stages,
            BM=tile.bm,
            BN=tile.bn,
            BK=tile.bk,
            GROUP=8,
            PACK=pack,
            A_SCALE=_scale_kind(a_scale),
            B_SCALE=_scale_kind(b_scale),
            B_FIRST=b_first,
            TAIL=k % tile.bk != 0,
            LONG=k > limit,
            LOG=log2(block_size),
        )

    def time(tile: ProductTile) -> float:
        with on_device(a.device):
            return triton.testing.do_bench(lambda: run(tile), return_mode="median")

    timer = None if a.device.type in ("cpu", "meta") else time
    if k > limit:
        run(LONG if block_size <= LONG.bm else replace(LONG, bm=block_size, warps=8))
    else:
        run(product_tile(family, out.shape[0], n, k, pack, block_size, _processors(a.device), timer))
    return out

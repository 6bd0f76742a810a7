"""Transform and quantize along the features: g of grad_input, x of ``ht_int4`` and ``int8``.

``quantize_rows``, for g: one program holds whole rows in registers: one read of the input; maximum, scale and integers
in one launch. A thread gets whole blocks of 16 neighbours (the compiler's choice: no shared memory in the transform,
16-byte loads and stores).

``quantize_tokens``, for x: the same integers with the tokens innermost in memory, as grad_weight's product wants them.
One token would leave single bytes there, so a program takes 8 to 32 of them. So many whole rows do not fit registers:
it goes over them twice in steps, back from the last one, and finds them in the caches (``tuning.tokens_per_program``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from .arithmetic import absolute_bits, butterfly_columns, pack_columns, round_int8, scale_of
from .launch import launch, log2, next_power_of_2
from .product import contraction_innermost
from .tuning import Family, tokens_per_program


@triton.jit(do_not_specialize=["rows", "seed"])
def quantize_rows_kernel(
    x,
    q,
    scale,
    rows,
    columns,
    padded_columns,
    stride_row,
    stride_column,
    q_stride,
    seed,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    LOG: tl.constexpr,
    QMAX: tl.constexpr,
    PACK: tl.constexpr,
    ROUNDING: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLS).to(tl.int64)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    v = tl.load(x + row[:, None] * stride_row + column[None, :] * stride_column, inside, other=0.0).to(tl.float32)
    v = butterfly_columns(v, ROWS, COLS, LOG)
    row_scale, inverse, live = scale_of(tl.max(absolute_bits(v), 1), QMAX)
    tl.store(scale + row, row_scale, row < rows)
    index = row[:, None] * padded_columns + column[None, :]
    integers = round_int8(v, inverse[:, None], live[:, None], index, seed, QMAX, ROUNDING)
    if PACK:
        pair = tl.arange(0, COLS // 2).to(tl.int64)
        inside = (row < rows)[:, None] & (pair < q_stride)[None, :]
        tl.store(q + row[:, None] * q_stride + pair[None, :], pack_columns(integers, ROWS, COLS), inside)
    else:
        inside = (row < rows)[:, None] & (column < q_stride)[None, :]
        tl.store(q + row[:, None] * q_stride + column[None, :], integers, inside)


def row_config(family: Family, columns: int, block_size: int) -> tuple[int, int, int] | None:
    """(rows, columns, warps) of a program, or None where a row is too long for registers."""
    cols = max(next_power_of_2(columns), block_size, 32)
    if cols > family.row_limit:
        return None
    rows = max(1, family.row_elements // cols)
    # 32 elements a thread: float32 values and their integers together stay below half of the 255 registers.
    warps = min(16, max(4, rows * cols // 1024))
    return rows, cols, warps


def quantize_rows(
    x: Tensor, family: Family, bits: int, block_size: int, pack: bool, rounding: str, seed: int
) -> tuple[Tensor, Tensor] | None:
    """``reference.hadamard_quantize(x, bits, 1, block_size, True)``, packed along the columns on request.

    Returns:
        int8 (rows, padded columns), or uint8 (rows, half of them), and float32 scales (rows,). None where rows are
        longer than ``family.row_limit``: the tile kernels read them twice instead.
    """
    rows, columns = x.shape
    padded = reference.padded(columns, block_size)
    config = row_config(family, columns, block_size)
    if config is None:
        return None
    width = (padded + 1) // 2 if pack else padded
    q = torch.empty(rows, width, dtype=torch.uint8 if pack else torch.int8, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    block_rows, block_columns, warps = config
    launch(
        quantize_rows_kernel,
        (triton.cdiv(rows, block_rows),),
        x,
        x,
        q,
        scale,
        rows,
        columns,
        padded,
        *x.stride(),
        width,
        seed,
        warps=warps,
        ROWS=block_rows,
        COLS=block_columns,
        LOG=log2(block_size),
        QMAX=reference.QMAX[bits],
        PACK=pack,
        ROUNDING=rounding,
    )
    return q, scale


@triton.jit
def transformed(x, row, column, rows, columns, stride_row, stride_column, ROWS: tl.constexpr, COLS: tl.constexpr,
                LOG: tl.constexpr, KEEP: tl.constexpr):  # fmt: skip
    """A step of whole blocks; ``KEEP``: it is read again, and should stay in the caches."""
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    pointers = x + row[:, None] * stride_row + column[None, :] * stride_column
    v = tl.load(pointers, inside, other=0.0, eviction_policy="evict_last" if KEEP else "evict_first")
    return butterfly_columns(v.to(tl.float32), ROWS, COLS, LOG)


@triton.jit(do_not_specialize=["rows", "seed"])
def quantize_tokens_kernel(
    x,
    q,
    scale,
    rows,
    columns,
    padded_columns,
    width,
    stride_row,
    stride_column,
    q_stride,
    seed,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    LOG: tl.constexpr,
    QMAX: tl.constexpr,
    PACK: tl.constexpr,
    ROUNDING: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    steps = tl.cdiv(padded_columns, COLS)
    bits = tl.zeros([ROWS], tl.int32)
    for step in range(steps):
        column = (step * COLS + tl.arange(0, COLS)).to(tl.int64)
        v = transformed(x, row, column, rows, columns, stride_row, stride_column, ROWS, COLS, LOG, True)
        bits = tl.maximum(bits, tl.max(absolute_bits(v), 1))
    row_scale, inverse, live = scale_of(bits, QMAX)
    tl.store(scale + row, row_scale, row < rows)
    # Up to the end of q's rows, which are a multiple of 16 long: a mask by ``rows`` would store byte by byte.
    exists = row < q_stride
    for back in range(steps):
        last = steps - 1 - back
        column = (last * COLS + tl.arange(0, COLS)).to(tl.int64)
        v = transformed(x, row, column, rows, columns, stride_row, stride_column, ROWS, COLS, LOG, False)
        index = row[:, None] * padded_columns + column[None, :]
        integers = round_int8(v, inverse[:, None], live[:, None], index, seed, QMAX, ROUNDING)
        if PACK:
            pair = (last * (COLS // 2) + tl.arange(0, COLS // 2)).to(tl.int64)
            pointers = q + row[:, None] + pair[None, :] * q_stride
            tl.store(pointers, pack_columns(integers, ROWS, COLS), exists[:, None] & (pair < width)[None, :])
        else:
            pointers = q + row[:, None] + column[None, :] * q_stride
            tl.store(pointers, integers, exists[:, None] & (column < width)[None, :])


def quantize_tokens(
    x: Tensor, family: Family, bits: int, block_size: int, pack: bool, rounding: str, seed: int
) -> tuple[Tensor, Tensor]:
    """``reference.hadamard_quantize(x, bits, 1, block_size, True)``, packed along the columns on request, any length.

    Returns:
        int8 (rows, padded columns), or uint8 (rows, half of them), the rows innermost in memory, and float32 scales.
    """
    rows, columns = x.shape
    padded = reference.padded(columns, block_size)
    width = (padded + 1) // 2 if pack else padded
    q = contraction_innermost(width, rows, torch.uint8 if pack else torch.int8, x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    block_rows = tokens_per_program(family, x.device, columns * x.element_size())
    block_columns = min(family.row_elements // block_rows, max(next_power_of_2(columns), block_size, 32))
    launch(
        quantize_tokens_kernel,
        (triton.cdiv(rows, block_rows),),
        x,
        x,
        q,
        scale,
        rows,
        columns,
        padded,
        width,
        *x.stride(),
        q.stride(0),
        seed,
        warps=max(4, block_rows * block_columns // 1024),  # 32 elements a thread, as above
        ROWS=block_rows,
        COLS=block_columns,
        LOG=log2(block_size),
        QMAX=reference.QMAX[bits],
        PACK=pack,
        ROUNDING=rounding,
    )
    return q.t(), scale

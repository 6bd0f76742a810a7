"""Quantizers whose scales span rows: along the tokens (x and g of grad_weight), along W's rows, and per tensor.

No program sees a whole column, so there are two launches: ``tile_maxima_kernel`` leaves one maximum per tile and column
(or row) in a buffer of its own, without atomics; ``tile_quantize_kernel`` reads the tile again and writes integers.
Both work on one tile along the features (``ROW``), along the tokens (``COLUMN``), or both: then the two quantizations
of g share each read. The second launch takes the tiles in the opposite order, most recently read first, so that it
finds in the L2 cache what still lies there; between them only the maxima are reduced (docs/results/roofline.md counts
this, and why no way with one read moves less).

Integers along the tokens are stored with the contraction innermost (stride 1), the layout that int8 matrix instructions
need of both operands; the transposition happens within the tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from .arithmetic import (
    absolute_bits,
    butterfly_columns,
    butterfly_rows,
    pack_columns,
    pack_rows,
    project_rows,
    round_int8,
    scale_of,
)
from .launch import launch, log2, next_power_of_2
from .product import contraction_innermost
from .tuning import Family


@triton.jit
def load_tile(x, row, column, rows, columns, stride_row, stride_column, KEEP: tl.constexpr):
    """``KEEP``: it is read again, and should stay in the caches."""
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    pointers = x + row[:, None] * stride_row + column[None, :] * stride_column
    return tl.load(pointers, inside, other=0.0, eviction_policy="evict_last" if KEEP else "evict_first").to(tl.float32)


@triton.jit
def along_tokens(
    v,
    token_scale,
    row,
    rows,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    RANK: tl.constexpr,
    FOLD: tl.constexpr,
    LOG: tl.constexpr,
):
    """The tile as it is quantized along the tokens: projected, or scaled per token and transformed."""
    if RANK:
        w = project_rows(v, ROWS, COLS, LOG)
    else:
        w = v
        if FOLD:
            w = v * tl.load(token_scale + row, row < rows, other=0.0)[:, None]
        w = butterfly_rows(w, ROWS, COLS, LOG)
    return w


@triton.jit
def token_rows(tile, ROWS: tl.constexpr, RANK: tl.constexpr, LOG: tl.constexpr):
    """Rows of the output along the tokens of the tile-th ROWS tokens: their numbers, and which exist (a rank need not
    be 2^LOG; RANK 0: not projected)."""
    KEPT: tl.constexpr = ROWS >> (4 - LOG) if RANK else ROWS
    local = tl.arange(0, KEPT).to(tl.int64)
    if RANK == 0 or RANK == 1 << LOG:  # in order, which is what wide stores need
        return tile * KEPT + local, local >= 0
    else:
        position = local & ((1 << LOG) - 1)
        return (tile * (ROWS // 16) + (local >> LOG)) * RANK + position, position < RANK


@triton.jit(do_not_specialize=["rows"])
def tile_maxima_kernel(
    x,
    token_scale,
    row_maxima,
    column_maxima,
    rows,
    columns,
    stride_row,
    stride_column,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    ROW: tl.constexpr,
    ROW_LOG: tl.constexpr,
    COLUMN: tl.constexpr,
    RANK: tl.constexpr,
    FOLD: tl.constexpr,
    LOG: tl.constexpr,
):
    tile_row = tl.program_id(0).to(tl.int64)
    row = tile_row * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLS + tl.arange(0, COLS)
    v = load_tile(x, row, column, rows, columns, stride_row, stride_column, True)
    if ROW:
        bits = absolute_bits(butterfly_columns(v, ROWS, COLS, ROW_LOG))
        place = row * tl.num_programs(1) + tl.program_id(1)
        tl.store(row_maxima + place, tl.max(bits, 1), row < rows)
    if COLUMN:
        bits = absolute_bits(along_tokens(v, token_scale, row, rows, ROWS, COLS, RANK, FOLD, LOG))
        _, exists = token_rows(tile_row, ROWS, RANK, LOG)
        bits = tl.where(exists[:, None], bits, 0)
        tl.store(column_maxima + tile_row * columns + column, tl.max(bits, 0), column < columns)


@triton.jit(do_not_specialize=["rows", "row_scales", "row_seed", "column_seed"])
def tile_quantize_kernel(
    x,
    token_scale,
    row_bits,
    row_scale,
    row_q,
    column_bits,
    column_scale,
    column_q,
    rows,
    columns,
    stride_row,
    stride_column,
    row_scales,
    padded_columns,
    row_width,
    row_seed,
    column_scales,
    q_row_stride,
    q_column_stride,
    column_seed,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    ROUNDING: tl.constexpr,
    ROW: tl.constexpr,
    ROW_LOG: tl.constexpr,
    ROW_QMAX: tl.constexpr,
    ROW_PACK: tl.constexpr,
    COLUMN: tl.constexpr,
    RANK: tl.constexpr,
    FOLD: tl.constexpr,
    LOG: tl.constexpr,
    COLUMN_QMAX: tl.constexpr,
    COLUMN_PACK: tl.constexpr,
):
    tile_row = tl.num_programs(0) - 1 - tl.program_id(0).to(tl.int64)
    tile_column = tl.num_programs(1) - 1 - tl.program_id(1).to(tl.int64)
    row = tile_row * ROWS + tl.arange(0, ROWS)
    column = tile_column * COLS + tl.arange(0, COLS)
    v = load_tile(x, row, column, rows, columns, stride_row, stride_column, False)
    if ROW:
        which = tl.where(row_scales == 1, 0, row)  # one scale per tensor, or per row
        bits = tl.load(row_bits + which, row < rows, other=0)
        scale, inverse, live = scale_of(bits, ROW_QMAX)
        if tile_column == 0:
            tl.store(row_scale + row, scale, row < row_scales)
        index = row[:, None] * padded_columns + column[None, :]
        w = butterfly_columns(v, ROWS, COLS, ROW_LOG)
        q = round_int8(w, inverse[:, None], live[:, None], index, row_seed, ROW_QMAX, ROUNDING)
        if ROW_PACK:
            pair = tile_column * (COLS // 2) + tl.arange(0, COLS // 2)
            inside = (row < rows)[:, None] & (pair < row_width)[None, :]
            tl.store(row_q + row[:, None] * row_width + pair[None, :], pack_columns(q, ROWS, COLS), inside)
        else:
            inside = (row < rows)[:, None] & (column < row_width)[None, :]
            tl.store(row_q + row[:, None] * row_width + column[None, :], q, inside)
    if COLUMN:
        which = tl.where(column_scales == 1, 0, column)
        bits = tl.load(column_bits + which, column < columns, other=0)
        scale, inverse, live = scale_of(bits, COLUMN_QMAX)
        if tile_row == 0:
            tl.store(column_scale + column, scale, column < column_scales)
        out, exists = token_rows(tile_row, ROWS, RANK, LOG)
        index = out[:, None] * columns + column[None, :]
        w = along_tokens(v, token_scale, row, rows, ROWS, COLS, RANK, FOLD, LOG)
        q = round_int8(w, inverse[None, :], live[None, :], index, column_seed, COLUMN_QMAX, ROUNDING)
        KEPT: tl.constexpr = w.shape[0]
        # Up to the end of q's rows, which are a multiple of 16 long: a mask by their number would store byte by byte.
        inside = (exists & (out < q_column_stride))[:, None]
        if COLUMN_PACK == "columns":
            pair = tile_column * (COLS // 2) + tl.arange(0, COLS // 2)
            pointers = column_q + out[:, None] * q_row_stride + pair[None, :] * q_column_stride
            tl.store(pointers, pack_columns(q, KEPT, COLS), inside & (2 * pair < columns)[None, :])
        elif COLUMN_PACK == "rows":  # never projected: an output row per input row
            pair = tile_row * (ROWS // 2) + tl.arange(0, ROWS // 2)
            pointers = column_q + pair[:, None] * q_row_stride + column[None, :] * q_column_stride
            inside = (pair < q_column_stride)[:, None] & (column < columns)[None, :]
            tl.store(pointers, pack_rows(q, ROWS, COLS), inside)
        else:
            pointers = column_q + out[:, None] * q_row_stride + column[None, :] * q_column_stride
            tl.store(pointers, q, inside & (column < columns)[None, :])


@dataclass(frozen=True)
class AlongFeatures:
    """``reference.hadamard_quantize(x, bits, 1, ...)``, packed along the columns on request."""

    bits: int
    block_size: int
    per_slice: bool
    pack: bool
    seed: int


@dataclass(frozen=True)
class AlongTokens:
    """``project_quantize`` (rank), ``fold_quantize`` (token_scale) or ``hadamard_quantize(x, bits, 0, ...)``.

    pack: "" for int8, or two 4-bit values a byte, neighbours along the "columns" or along the "rows".
    """

    bits: int
    per_slice: bool
    seed: int
    rank: int | None = None
    block_size: int = 1
    token_scale: Tensor | None = None
    pack: str = ""

    def log(self) -> int:
        return log2(self.block_size) if self.rank is None else log2(next_power_of_2(self.rank))

    def kept_rows(self, rows: int) -> int:
        if self.rank is None:
            return reference.padded(rows, self.block_size)
        return reference.padded(rows, reference.TOKEN_BLOCK) // reference.TOKEN_BLOCK * self.rank

    def empty(self, x: Tensor) -> Tensor:
        """The output for ``x``, its rows (the contraction) innermost."""
        rows, columns = self.kept_rows(x.shape[0]), x.shape[1]
        if self.pack == "columns":
            columns = (columns + 1) // 2
        if self.pack == "rows":
            rows = (rows + 1) // 2
        return contraction_innermost(columns, rows, torch.uint8 if self.pack else torch.int8, x.device).t()


def quantize_tiles(
    x: Tensor, family: Family, features: AlongFeatures | None, tokens: AlongTokens | None, rounding: str
) -> tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor] | None]:
    """Quantize ``x`` (rows, columns) along its features, its tokens, or both in the same two launches.

    Returns:
        (integers, scale) of each of the two that was asked for; None for the other.
    """
    rows, columns = x.shape
    tile_rows, tile_columns = family.tile
    if features is not None:
        tile_columns = max(tile_columns, features.block_size)
    if tokens is not None and tokens.rank is None:
        tile_rows = max(tile_rows, tokens.block_size)
    padded_columns = columns if features is None else reference.padded(columns, features.block_size)
    kept = 0 if tokens is None else tokens.kept_rows(rows)
    needed_rows = max(rows, 0 if tokens is None or tokens.rank is not None else kept)
    grid = (triton.cdiv(needed_rows, tile_rows), triton.cdiv(padded_columns, tile_columns))
    new = {"device": x.device, "dtype": torch.int32}
    row_maxima = torch.empty(rows, grid[1], **new) if features else x
    column_maxima = torch.empty(grid[0], columns, **new) if tokens else x
    token_scale = x if tokens is None or tokens.token_scale is None else tokens.token_scale.contiguous()
    shared = {
        "warps": family.tile_warps,
        "ROWS": tile_rows,
        "COLS": tile_columns,
        "ROW": features is not None,
        "ROW_LOG": 0 if features is None else log2(features.block_size),
        "COLUMN": tokens is not None,
        "RANK": 0 if tokens is None or tokens.rank is None else tokens.rank,
        "FOLD": tokens is not None and tokens.token_scale is not None,
        "LOG": 0 if tokens is None else tokens.log(),
    }
    launch(
        tile_maxima_kernel,
        grid,
        x,
        x,
        token_scale,
        row_maxima,
        column_maxima,
        rows,
        columns,
        *x.stride(),
        **shared,
    )
    unused = (x, x, x)
    row_result = column_result = None
    row_arguments, row_numbers = unused, (0, 0, 0, 0)
    if features is not None:
        bits = row_maxima.amax(1) if features.per_slice else row_maxima.amax().reshape(1)
        width = (padded_columns + 1) // 2 if features.pack else padded_columns
        q = torch.empty(rows, width, dtype=torch.uint8 if features.pack else torch.int8, device=x.device)
        scale = torch.empty(bits.shape, dtype=torch.float32, device=x.device)
        row_result, row_arguments = (q, scale), (bits, scale, q)
        row_numbers = (bits.numel(), padded_columns, width, features.seed)
    column_arguments, column_numbers = unused, (0, 0, 0, 0)
    if tokens is not None:
        bits = column_maxima.amax(0) if tokens.per_slice else column_maxima.amax().reshape(1)
        q = tokens.empty(x)
        scale = torch.empty(bits.shape, dtype=torch.float32, device=x.device)
        column_result, column_arguments = (q, scale), (bits, scale, q)
        column_numbers = (bits.numel(), *q.stride(), tokens.seed)
    launch(
        tile_quantize_kernel,
        grid,
        x,
        x,
        token_scale,
        *row_arguments,
        *column_arguments,
        rows,
        columns,
        *x.stride(),
        *row_numbers,
        *column_numbers,
        **shared,
        ROUNDING=rounding,
        ROW_QMAX=0 if features is None else reference.QMAX[features.bits],
        ROW_PACK=features is not None and features.pack,
        COLUMN_QMAX=0 if tokens is None else reference.QMAX[tokens.bits],
        COLUMN_PACK="" if tokens is None else tokens.pack,
    )
    return row_result, column_result

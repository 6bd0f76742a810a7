"""The low-rank step on image tokens: blocks are square tiles of patches, low-pass in two dimensions (LBP-WHT's order).

Tokens come as whole images of ``prefix + height * width`` tokens, prefix tokens such as CLS first. Patches are gathered
tile by tile (4x4 where both sides allow), so that a block of 16 is one tile, or several smaller ones beside each other:
a Sylvester matrix is the Kronecker product of smaller ones, so the transform over tokens is the two-dimensional
one there. Of each tile the rows with the smallest sum of both sequencies are kept. Prefix tokens of all images fill
blocks of their own, of which every row is kept: they lose nothing but their rounding. Backends need nothing new.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.library import custom_op

from . import reference
from .backends import backend_for
from .reference import TOKEN_BLOCK, padded

BITS = {"hla_int8": 8, "hla_int4": 4}  # the formats that have a token order
LARGEST_TILE = 4


def fits(tokens: int, grid: tuple[int, int, int] | None) -> bool:
    """Whether so many tokens are whole images of ``grid`` = (prefix, height, width)."""
    return grid is not None and tokens > 0 and tokens % (grid[0] + grid[1] * grid[2]) == 0


@dataclass(frozen=True)
class Arrangement:
    """Where tokens go, and which rows of the full transform are kept.

    Token ``source[i]`` becomes row ``place[i]`` of ``length`` rows, a multiple of 16, the others zero. ``rows``: of the
    ``length`` transformed ones, those that are kept.
    """

    source: Tensor
    place: Tensor
    length: int
    rows: Tensor

    def gather(self, x: Tensor) -> Tensor:
        """(tokens, features) to (length, features)."""
        out = x.new_zeros(self.length, x.shape[1])
        return out.index_copy_(0, self.place, x.index_select(0, self.source))


def _tile(side: int) -> int:
    tile = LARGEST_TILE
    while side % tile:
        tile //= 2
    return tile


@lru_cache
def _by_sequency(size: int) -> list[int]:
    """``reference.sequency_order`` without tensors, for the fakes."""

    def changes(row: int) -> int:
        signs = [(row & column).bit_count() % 2 for column in range(size)]
        return sum(a != b for a, b in pairwise(signs))

    return sorted(range(size), key=changes)


def low_pass(height: int, width: int, rank: int) -> set[int]:
    """Rows of the Sylvester matrix of a tile, that ``rank`` of 16 keep: smallest sum of vertical and horizontal
    sequency first, then the smaller of their larger one."""
    pairs = [(i, j) for i in range(height) for j in range(width)]
    pairs.sort(key=lambda pair: (sum(pair), max(pair), pair))
    vertical, horizontal = _by_sequency(height), _by_sequency(width)
    kept = max(1, round(rank * height * width / TOKEN_BLOCK))
    return {vertical[i] * width + horizontal[j] for i, j in pairs[:kept]}


def _kept_of_block(grid: tuple[int, int, int], rank: int) -> list[int]:
    height, width = _tile(grid[1]), _tile(grid[2])
    kept = low_pass(height, width, rank)
    return [q for q, row in enumerate(_by_sequency(TOKEN_BLOCK)) if row % (height * width) in kept]


def kept_rows(tokens: int, grid: tuple[int, int, int], rank: int) -> int:
    """Rows that are kept of ``tokens`` tokens."""
    images = tokens // (grid[0] + grid[1] * grid[2])
    blocks = padded(images * grid[1] * grid[2], TOKEN_BLOCK) // TOKEN_BLOCK
    return blocks * len(_kept_of_block(grid, rank)) + padded(images * grid[0], TOKEN_BLOCK)


@lru_cache(maxsize=64)
def arrangement(tokens: int, grid: tuple[int, int, int], rank: int, device: torch.device) -> Arrangement:
    """How so many tokens are arranged; ``fits`` must hold."""
    prefix, height, width = grid
    index = torch.arange(tokens).view(-1, prefix + height * width)
    down, across = _tile(height), _tile(width)
    tiles = index[:, prefix:].reshape(-1, height // down, down, width // across, across)
    patches, front = tiles.transpose(2, 3).flatten(), index[:, :prefix].flatten()
    start = padded(len(patches), TOKEN_BLOCK)
    length = start + padded(len(front), TOKEN_BLOCK)
    in_block = torch.tensor(_kept_of_block(grid, rank))
    rows = torch.cat(((torch.arange(0, start, TOKEN_BLOCK)[:, None] + in_block).flatten(), torch.arange(start, length)))
    source = torch.cat((patches, front))
    place = torch.cat((torch.arange(len(patches)), start + torch.arange(len(front))))
    return Arrangement(source.to(device), place.to(device), length, rows.to(device))


def _project(x: Tensor, bits: int, rank: int, grid: list[int], per_feature: bool, rounding: str, seed: int):
    how = arrangement(x.shape[0], tuple(grid), rank, x.device)
    # Scales are those of the rows that are kept (SPEC section 3): what is dropped may be far larger.
    kept = reference.project_tokens(how.gather(x), TOKEN_BLOCK).index_select(0, how.rows)
    q, scale = backend_for(x).hadamard_quantize(kept, bits, 0, 1, per_feature, rounding, seed)
    return q.contiguous(), scale


def _check(op: str, tokens: int, grid: list[int]) -> None:
    if len(grid) != 3 or not fits(tokens, tuple(grid)):
        raise ValueError(f"hot_hf.ops.{op}: {tokens} tokens are no whole images of (prefix, height, width) = {grid}")


@custom_op("hot_hf::compress_grid", mutates_args=())
def compress_grid(
    x: Tensor, bits: int, rank: int, grid: list[int], per_feature: bool, rounding: str, seed: int
) -> tuple[Tensor, Tensor]:
    """``compress`` of the ``hla`` format with ``bits``, on image tokens.

    Args:
        x: (images * (prefix + height * width), in_features); grid: [prefix, height, width].

    Returns:
        (``kept_rows``, in_features) int8, or uint8 with two 4-bit values each, and the scales.

    Raises:
        ValueError: for tokens that are no whole images.
    """
    _check("compress_grid", x.shape[0], grid)
    q, scale = _project(x, bits, rank, grid, per_feature, rounding, seed)
    return backend_for(x).pack_int4(q) if bits == 4 else q, scale


@compress_grid.register_fake
def _(x, bits, rank, grid, per_feature, rounding, seed):
    columns = x.shape[1] if bits == 8 else (x.shape[1] + 1) // 2
    packed = x.new_empty(
        (kept_rows(x.shape[0], tuple(grid), rank), columns), dtype=torch.int8 if bits == 8 else torch.uint8
    )
    return packed, x.new_empty((x.shape[1] if per_feature else 1,), dtype=reference.compute_dtype(x))


@custom_op("hot_hf::grad_weight_grid", mutates_args=())
def grad_weight_grid(
    g: Tensor, packed: Tensor, scale: Tensor, bits: int, in_features: int, rank: int, grid: list[int],
    per_feature: bool, rounding: str, seed: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """``grad_weight`` from what ``compress_grid`` kept with the same ``bits``, ``rank`` and ``grid``."""
    _check("grad_weight_grid", g.shape[0], grid)
    backend = backend_for(g)
    g_int, g_scale = _project(g, 8, rank, grid, per_feature, rounding, seed)
    x_int = backend.unpack_int4(packed, in_features) if bits == 4 else packed
    return backend.scaled_product(g_int.t(), x_int, g_scale, scale, dtype)


@grad_weight_grid.register_fake
def _(g, packed, scale, bits, in_features, rank, grid, per_feature, rounding, seed, dtype):
    return g.new_empty((g.shape[1], in_features), dtype=dtype)

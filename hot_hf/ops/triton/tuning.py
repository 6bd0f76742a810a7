"""Tile sizes per architecture family, each with its reason.

No entry was timed yet: they follow from the hardware limits named beside them, and from what the compiler of Triton 3.9
reports (registers, spills, shared memory: docs/results/kernels.md). ``benchmarks/bench_gpu.py`` is what will correct
them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from .launch import next_power_of_2


@dataclass(frozen=True)
class ProductTile:
    """One configuration of the integer product: bm x bn outputs, bk bytes of each operand per step."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Family:
    """How the kernels are cut for one architecture family.

    product, packed: tiles for int8 operands, and where 4-bit operands are widened in registers; small, small_packed:
    for outputs of few tiles. row_elements: elements per program of the feature quantizer; row_limit: the longest row
    that it holds in registers. tile: (rows, columns) of the token quantizers; tile_warps: theirs. shared_limit: bytes
    per block. cache: bytes of the second-level cache per processor, where the device does not tell.
    """

    name: str
    product: ProductTile
    packed: ProductTile
    small: ProductTile
    small_packed: ProductTile
    shared_limit: int
    cache: int
    reason: str
    row_elements: int = 8192
    row_limit: int = 16384
    tile: tuple[int, int] = (128, 64)
    tile_warps: int = 8


FAMILIES = {
    "sm_80": Family(
        "sm_80",
        product=ProductTile(128, 128, 128, 8, 3),
        packed=ProductTile(128, 128, 32, 8, 4),
        small=ProductTile(64, 64, 128, 4, 4),
        small_packed=ProductTile(64, 64, 64, 4, 4),
        shared_limit=163 * 1024,
        cache=40 * 1024**2 // 108,  # A100
        reason="mma.sync: 128x128 int32 sums are 64 registers a thread with 8 warps, which leaves room for fragments; "
        "bk=128 bytes is a whole cache line per row; packed operands spill with 64 bytes a step",
    ),
    "sm_86": Family(
        "sm_86",
        product=ProductTile(128, 128, 64, 8, 4),
        packed=ProductTile(128, 128, 32, 8, 4),
        small=ProductTile(64, 64, 64, 4, 4),
        small_packed=ProductTile(64, 64, 64, 4, 4),
        shared_limit=99 * 1024,
        cache=6 * 1024**2 // 84,  # A40; sm_89 and sm_120 have ten times as much
        tile=(64, 128),
        reason="sm_86, sm_89 and sm_120 have 99 KiB a block: half of sm_80's step, one stage more; token tiles "
        "of 64x128, as sm_120's assembler spills with 128x64",
    ),
    "sm_90": Family(
        "sm_90",
        product=ProductTile(128, 256, 128, 8, 4),
        packed=ProductTile(128, 128, 128, 8, 3),
        small=ProductTile(64, 128, 128, 4, 4),
        small_packed=ProductTile(128, 64, 128, 4, 4),
        shared_limit=227 * 1024,
        cache=50 * 1024**2 // 132,  # H100, H200
        reason="wgmma reads both operands from shared memory: 128x256 needs 3/4 of the reads per product of 128x128; "
        "its sums are 128 registers a thread with 8 warps; 4 stages of 48 KiB take 192 of 227 KiB; packed "
        "rows are half of bm, and wgmma needs 64",
    ),
    "sm_100": Family(
        "sm_100",
        product=ProductTile(128, 128, 128, 8, 4),
        packed=ProductTile(128, 128, 64, 8, 3),
        small=ProductTile(64, 64, 128, 4, 4),
        small_packed=ProductTile(128, 64, 64, 4, 4),
        shared_limit=227 * 1024,
        cache=126 * 1024**2 // 148,  # B200
        reason="tcgen05 keeps its sums in tensor memory (128 lanes of 512 columns): 128x128 fills a quarter, so "
        "that blocks overlap; the float32 epilogue of 128x256 spills. 4 stages take 128 of 227 KiB",
    ),
    "gfx942": Family(
        "gfx942",
        product=ProductTile(128, 128, 64, 8, 2),
        packed=ProductTile(128, 128, 64, 8, 2),
        small=ProductTile(64, 64, 64, 4, 2),
        small_packed=ProductTile(64, 64, 64, 4, 2),
        shared_limit=64 * 1024,
        cache=256 * 1024**2 // 304,  # MI300X: the memory-side cache; 4 MB of L2 serve 38 units
        reason="64 KiB of LDS a block; wavefronts of 64, so 8 of them hold 32 sums a lane",
    ),
}
# Beyond MAX_CONTRACTION float32 sums need as many registers again as the int32 ones: larger tiles spill on sm_80 to 90.
LONG = ProductTile(64, 64, 64, 4, 2)

_BY_CAPABILITY = {(8, 0): "sm_80", (8, 6): "sm_86", (8, 7): "sm_80", (8, 9): "sm_86", (9, 0): "sm_90", (12, 0): "sm_86"}


def family_of_capability(capability: tuple[int, int]) -> Family:
    """The family of a CUDA compute capability; a newer one than the table knows takes the nearest older family.

    Raises:
        ValueError: below 8.0.
    """
    if capability < (8, 0):
        raise ValueError(
            f"compute capability {capability[0]}.{capability[1]}: Triton compiles no int8 product below 8.0 "
            "(sm_70 has no int8 matrix instruction, sm_75's is not exposed); the torch path is used there"
        )
    if capability in _BY_CAPABILITY:
        return FAMILIES[_BY_CAPABILITY[capability]]
    return FAMILIES["sm_100" if capability[0] in (10, 11) else "sm_90" if capability[0] == 9 else "sm_86"]


def family_of_arch(backend: str, arch: int | str) -> Family:
    """The family of a Triton target, ("cuda", 90) or ("hip", "gfx942").

    Raises:
        ValueError: for a target without kernels.
    """
    if backend == "hip":
        name = str(arch).split(":")[0]
        if name not in FAMILIES:
            raise ValueError(f"{name}: no tuning table; the torch path is used there. Known: gfx942")
        return FAMILIES[name]
    return family_of_capability(divmod(int(arch), 10))


@cache
def family_of_device(device_type: str, index: int | None) -> Family:
    """The family of a device that ``backends.backend_for`` gave to these kernels; the interpreter takes sm_86."""
    if device_type == "cpu":
        return FAMILIES["sm_86"]
    properties = torch.get_device_module(device_type).get_device_properties(index or 0)
    if torch.version.hip:
        return family_of_arch("hip", properties.gcnArchName)
    return family_of_capability((properties.major, properties.minor))


@cache
def _cache_per_processor(family: Family, device: torch.device) -> int:
    if device.type in ("cpu", "meta") or torch.version.hip:
        return family.cache
    properties = torch.get_device_module(device).get_device_properties(device)
    return properties.L2_cache_size // properties.multi_processor_count


def tokens_per_program(family: Family, device: torch.device, row_bytes: int) -> int:
    """Rows of x of ``row_bytes`` each that one program of ``features.quantize_tokens`` takes: 32, 16 or 8.

    32 fill the 32-byte sectors that memory is written in; 16 and 8 leave them to the neighbouring programs, and the L2
    cache to put them together. As many as two programs per processor keep in the L2 cache from their first pass to
    their second, beside the quarter of it that they write: on an H200 32 up to 2,400 bfloat16 features, 16 up to 4,900
    (128 KB at 4,096: a processor's own 256 KB may hold them, too), else 8.
    """
    tokens = 32
    while tokens > 8 and 2.5 * tokens * row_bytes > _cache_per_processor(family, device):
        tokens //= 2
    return tokens


def bucket(size: int) -> int:
    """Sizes that share a choice: the next power of two, so that varying sequence lengths do not tune again."""
    return next_power_of_2(size)


_chosen: dict[tuple, ProductTile] = {}


def product_tile(
    family: Family,
    m: int,
    n: int,
    k: int,
    pack: str,
    block_size: int,
    processors: int,
    time: Callable[[ProductTile], float] | None,
) -> ProductTile:
    """The tile of one product.

    Args:
        m, n, k: its sizes; pack, block_size: as in product.py, no tile has fewer rows than a block; processors: of the
            device.
        time: milliseconds of a tile; used where ``HOT_HF_AUTOTUNE=1``, once per bucket of sizes and process. Every tile
            gives the same result, so a choice never changes a number.
    """
    tile, small = (family.packed, family.small_packed) if pack else (family.product, family.small)
    if -(-m // tile.bm) * -(-n // tile.bn) < processors and small.bm >= block_size:
        tile = small  # else too few programs to fill the device
    if time is None or os.environ.get("HOT_HF_AUTOTUNE") != "1":
        return tile
    key = (family.name, pack, block_size, bucket(m), bucket(n), bucket(k))
    if key not in _chosen:
        tiles = {family.packed, family.small_packed} if pack else {family.product, family.small, family.packed}
        _chosen[key] = min(sorted((t for t in tiles if t.bm >= block_size), key=repr), key=time)
    return _chosen[key]

"""docs/spec.md, sections 2 to 6, in readable torch: the default of every function of a backend (``backend.py``), and
what the others are tested against. It runs on every device torch has.

Every operation that decides an integer has one fixed order, so that backends can agree bit for bit:

* the transform is a butterfly with strides 1, 2, 4, ... inside a block, in float32, times ``block_size ** -0.5`` last;
* ``scale = absmax / qmax`` and ``inverse = qmax / absmax`` are each one IEEE division per row, column or tensor;
* an element becomes ``round(value * inverse)``, clamped to ``[-qmax, qmax]``, without a fused multiply-add.

float64 inputs are computed in float64, all others in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

QMAX = {4: 7, 8: 127}
ROUNDINGS = ("nearest", "stochastic", "pseudo_stochastic")
BLOCK_SIZES = (1, 16, 32, 64, 128)  # 1 is the identity: no transform
TOKEN_BLOCK = 16  # tokens per block of the low-rank projection
MAX_CONTRACTION = 131_072  # 131072 * 127 * 127 = 2.114e9 still fits int32 (2.147e9)
FLOAT_CONTRACTION = 1_024  # 1024 * 127 * 127 < 2 ** 24: integer products are exact in float32
# Below this the inverse scale would overflow float32 (127 / 2^-120 = 1.7e38): such a row counts as zero.
SMALLEST_ABSMAX = 2.0**-120


def compute_dtype(x: Tensor) -> torch.dtype:
    """float64 for float64 inputs, float32 for all others (spec.md, section 6)."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def padded(size: int, block: int) -> int:
    """``size`` rounded up to whole blocks."""
    return -(-size // block) * block


def hadamard_matrix(size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The Sylvester-Hadamard matrix of ``size`` (a power of two), entries +-1, shape (size, size)."""
    h = torch.ones(1, 1, dtype=dtype)
    while h.shape[0] < size:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)), 0)
    return h


def sequency_order(size: int = TOKEN_BLOCK) -> list[int]:
    """Rows of the Sylvester matrix sorted by their number of sign changes, 0 to size - 1 (spec.md, section 1)."""
    h = hadamard_matrix(size)
    return torch.argsort((h[:, 1:] != h[:, :-1]).sum(1), stable=True).tolist()


def hadamard(x: Tensor, block_size: int) -> Tensor:
    """Orthonormal block Hadamard transform along the last axis.

    Args:
        x: (..., features), any floating type; features are zero-padded to whole blocks.
        block_size: one of ``BLOCK_SIZES``; 1 returns ``x`` in the compute type.

    Returns:
        (..., padded features) in float32, or float64 for float64 inputs. Its own inverse.
    """
    x = x.to(compute_dtype(x))
    if block_size == 1:
        return x
    tail = padded(x.shape[-1], block_size) - x.shape[-1]
    if tail:
        x = torch.nn.functional.pad(x, (0, tail))
    shape = x.shape
    stride = 1
    while stride < block_size:
        x = x.reshape(-1, block_size // (2 * stride), 2, stride)
        even, odd = x.unbind(-2)
        x = torch.stack((even + odd, even - odd), -2)
        stride *= 2
    return x.reshape(shape) * block_size**-0.5


def philox_uniform(seed: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """``count`` float32 numbers on [0, 1): Philox4x32-10, key ``seed``, counter = element index, 24 bits of word 0.

    Counter-based, so that every backend draws the same numbers and no generator is touched (spec.md, section 6, ours).
    """
    low = 0xFFFFFFFF
    index = torch.arange(count, dtype=torch.int64, device=device)
    c0, c1 = index & low, index >> 32
    c2 = c3 = torch.zeros_like(index)
    k0, k1 = seed & low, (seed >> 32) & low
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = ((p1 >> 32) & low) ^ c1 ^ k0, p1 & low, ((p0 >> 32) & low) ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return (c0 >> 8).to(torch.float32) * 2.0**-24


def round_values(v: Tensor, rounding: str, seed: int) -> Tensor:
    """Round scaled values to integers, still in floating point (spec.md, section 6); offsets count row-major."""
    if rounding == "nearest":
        return v.round()  # half to even
    if rounding == "stochastic":
        return (v + philox_uniform(seed, v.numel(), v.device).view(v.shape)).floor()
    if rounding == "pseudo_stochastic":  # NITI: the low 11 bits of the float32 mantissa are the random number
        noise = (v.float().contiguous().view(torch.int32) & 0x7FF).to(torch.float32) * 2.0**-11
        return (v + noise).floor()
    raise ValueError(f"rounding must be one of {ROUNDINGS}, not {rounding!r}")


def quantize(v: Tensor, bits: int, dim: int | None, rounding: str = "nearest", seed: int = 0) -> tuple[Tensor, Tensor]:
    """Symmetric quantization with one scale per slice along ``dim``, or one for all.

    Args:
        v: 2-D, float32 or float64.
        bits: 4 (integers in [-7, 7]) or 8 ([-127, 127]).
        dim: the axis the absolute maximum is taken over; ``None`` for one scale per tensor.

    Returns:
        int8 integers of ``v``'s shape and the scale: 1-D along the other axis, or shape (1,). A zero slice has scale 0;
        a slice with a non-finite entry has scale NaN and integers 0, so that its products are NaN.
    """
    qmax = QMAX[bits]
    if v.numel() == 0:
        absmax = v.new_zeros((1, 1) if dim is None else (v.shape[0], 1) if dim == 1 else (1, v.shape[1]))
    else:
        absmax = v.abs().amax(dim=(0, 1) if dim is None else dim, keepdim=True)
    finite = torch.isfinite(absmax)
    live = finite & (absmax >= SMALLEST_ABSMAX)
    safe = torch.where(live, absmax, 1.0)
    limit = torch.full_like(safe, qmax)  # a Python number would become a reciprocal and a product: two roundings
    scale = torch.where(live, safe / limit, torch.where(finite, 0.0, torch.nan))
    scaled = torch.where(live, v * (limit / safe), 0.0)
    q = round_values(scaled, rounding, seed).clamp(-qmax, qmax).to(torch.int8)
    return q, scale.reshape(-1).to(v.dtype)


def hadamard_quantize(
    x: Tensor, bits: int, dim: int, block_size: int, per_slice: bool, rounding: str = "nearest", seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Transform along ``dim`` and quantize: HQ of spec.md, section 2.

    Args:
        x: (rows, columns), any floating type and stride.
        dim: 1 transforms each row and gives one scale per row (g, and x for ``ht_int4``); 0 transforms each column
            and gives one scale per column (W, whose contraction runs over its rows).
        per_slice: ``False`` for one scale per tensor.

    Returns:
        int8 integers, the transformed axis padded to whole blocks, and the scale (rows,), (columns,) or (1,).
    """
    v = hadamard(x, block_size) if dim == 1 else hadamard(x.t(), block_size).t()
    return quantize(v, bits, dim if per_slice else None, rounding, seed)


def project_tokens(x: Tensor, rank: int) -> Tensor:
    """Project each block of 16 tokens on its ``rank`` lowest sequencies: (N, F) to (ceil(N / 16) * rank, F)."""
    x = x.to(compute_dtype(x))
    tokens, features = x.shape
    x = torch.nn.functional.pad(x, (0, 0, 0, padded(tokens, TOKEN_BLOCK) - tokens))
    blocks = x.view(x.shape[0] // TOKEN_BLOCK, TOKEN_BLOCK, features).transpose(1, 2)
    kept = hadamard(blocks, TOKEN_BLOCK)[..., sequency_order()[:rank]]
    return kept.transpose(1, 2).reshape(blocks.shape[0] * rank, features)


def project_quantize(
    x: Tensor, bits: int, rank: int, per_slice: bool, rounding: str = "nearest", seed: int = 0
) -> tuple[Tensor, Tensor]:
    """HLA of spec.md, section 3: ``project_tokens``, then one scale per feature (or per tensor)."""
    return quantize(project_tokens(x, rank), bits, 0 if per_slice else None, rounding, seed)


def fold_quantize(
    g: Tensor, token_scale: Tensor, per_slice: bool, rounding: str = "nearest", seed: int = 0
) -> tuple[Tensor, Tensor]:
    """``quantize_int8(token_scale * g)`` with one scale per output feature (spec.md, section 5).

    Args:
        g: (tokens, out_features); token_scale: (tokens,).
    """
    v = g.to(token_scale.dtype) * token_scale[:, None]
    return quantize(v, 8, 0 if per_slice else None, rounding, seed)


def exact_int_product(a: Tensor, b: Tensor) -> Tensor:
    """int8 (M, K) times int8 (K, N) as int32, K at most MAX_CONTRACTION, on any device and any layout.

    Float32 products of ``FLOAT_CONTRACTION`` long slices are exact, also with TF32 (int8 fits its 11 bits); autocast
    would round them and is switched off.
    """
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.int32, device=a.device)
    with torch.autocast(a.device.type, enabled=False):
        for start in range(0, a.shape[1], FLOAT_CONTRACTION):
            stop = start + FLOAT_CONTRACTION
            total += (a[:, start:stop].float() @ b[start:stop].float()).to(torch.int32)
    return total


def scaled_product(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor | None, dtype: torch.dtype, int_product=exact_int_product
) -> Tensor:
    """``(a_scale * (a @ b)) * b_scale`` in ``dtype``: an int8 product, scaled once.

    Args:
        a: int8 (M, K), b: int8 (K, N), any strides. Contractions longer than ``MAX_CONTRACTION`` are split and their
            parts summed in the type of the scales (float32).
        a_scale: (M,) or (1,); b_scale: (N,), (1,) or None.
        int_product: the int8 product of the backend.
    """
    total = None
    for start in range(0, max(a.shape[1], 1), MAX_CONTRACTION):
        stop = start + MAX_CONTRACTION
        part = int_product(a[:, start:stop], b[start:stop]).to(a_scale.dtype)
        total = part if total is None else total + part
    total = total * a_scale[:, None]
    if b_scale is not None:
        total = total * b_scale
    return total.to(dtype)


def pack_int4(q: Tensor) -> Tensor:
    """int8 (rows, columns) in [-8, 7] to uint8 (rows, ceil(columns / 2)); the even column is the low nibble."""
    if q.shape[1] % 2:
        q = torch.nn.functional.pad(q, (0, 1))
    pairs = q.view(torch.uint8).view(q.shape[0], q.shape[1] // 2, 2)
    return (pairs[..., 0] & 0xF) | (pairs[..., 1] << 4)


def unpack_int4(packed: Tensor, columns: int) -> Tensor:
    """The inverse of ``pack_int4``: uint8 (rows, ceil(columns / 2)) to int8 (rows, columns)."""
    both = packed.view(torch.int8)
    # Arithmetic shifts carry the sign of each nibble.
    q = torch.stack(((both << 4) >> 4, both >> 4), -1).reshape(packed.shape[0], 2 * packed.shape[1])
    return q[:, :columns]

"""Device functions shared by the kernels: the transform, the scales and the rounding of the reference, bit for bit.

Every float operation keeps the reference's order; kernels are launched without fused multiply-adds (see launch.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

# Absolute maxima travel as the bits of non-negative floats: these compare like the floats, and NaN beats infinity, so
# that no maximum loses a NaN (tl.max on floats does). From these bits on a value is not finite:
INFINITY_BITS = tl.constexpr(0x7F800000)
SMALLEST_ABSMAX = tl.constexpr(2.0**-120)
# 1.5 * 2^23: adding it rounds |v| < 2^22 half to even, and leaves the integer in the low bits of the sum.
ROUNDER = tl.constexpr(12582912.0)


@triton.jit
def butterfly_columns(v, ROWS: tl.constexpr, COLS: tl.constexpr, LOG: tl.constexpr):
    """Hadamard transform of blocks of 2^LOG columns of a float32 tile (ROWS, COLS), strides 1, 2, 4, ... in order."""
    for stage in tl.static_range(LOG):
        pairs = tl.reshape(v, [ROWS, COLS >> (stage + 1), 2, 1 << stage])
        even, odd = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        pairs = tl.permute(tl.join(even + odd, even - odd), (0, 1, 3, 2))
        v = tl.reshape(pairs, [ROWS, COLS])
    if LOG > 0:
        v = v * ((2**LOG) ** -0.5)
    return v


@triton.jit
def butterfly_rows(v, ROWS: tl.constexpr, COLS: tl.constexpr, LOG: tl.constexpr):
    """The same along the rows of the tile."""
    for stage in tl.static_range(LOG):
        pairs = tl.reshape(v, [ROWS >> (stage + 1), 2, 1 << stage, COLS])
        even, odd = tl.split(tl.permute(pairs, (0, 2, 3, 1)))
        pairs = tl.permute(tl.join(even + odd, even - odd), (0, 3, 1, 2))
        v = tl.reshape(pairs, [ROWS, COLS])
    if LOG > 0:
        v = v * ((2**LOG) ** -0.5)
    return v


@triton.jit
def project_rows(v, ROWS: tl.constexpr, COLS: tl.constexpr, LOG: tl.constexpr):
    """Each block of 16 rows on its 2^LOG (1 to 16) lowest sequencies, in order: (ROWS / 16 * 2^LOG, COLS).

    A Sylvester row with its lowest index bits 0 has a low sequency: the first stages keep only their sums.
    """
    for stage in tl.static_range(4 - LOG):
        pairs = tl.reshape(v, [ROWS >> (stage + 1), 2, COLS])
        even, odd = tl.split(tl.permute(pairs, (0, 2, 1)))
        v = even + odd
    LEFT: tl.constexpr = ROWS >> (4 - LOG)
    for stage in tl.static_range(LOG):
        pairs = tl.reshape(v, [LEFT >> (stage + 1), 2, 1 << stage, COLS])
        even, odd = tl.split(tl.permute(pairs, (0, 2, 3, 1)))
        pairs = tl.permute(tl.join(even + odd, even - odd), (0, 3, 1, 2))
        v = tl.reshape(pairs, [LEFT, COLS])
    # Sequency order is the Gray code of the reversed index bits: reverse them, then flip each bit under its upper one.
    BLOCKS: tl.constexpr = ROWS // 16
    if LOG == 2:
        v = tl.reshape(tl.permute(tl.reshape(v, [BLOCKS, 2, 2, COLS]), (0, 2, 1, 3)), [LEFT, COLS])
    if LOG == 3:
        v = tl.reshape(tl.permute(tl.reshape(v, [BLOCKS, 2, 2, 2, COLS]), (0, 3, 2, 1, 4)), [LEFT, COLS])
    if LOG == 4:
        v = tl.reshape(tl.permute(tl.reshape(v, [BLOCKS, 2, 2, 2, 2, COLS]), (0, 4, 3, 2, 1, 5)), [LEFT, COLS])
    for stage in tl.static_range(LOG - 1):  # bit LOG - 2 - stage flips where the next higher bit of the row is 1
        pairs = tl.reshape(v, [LEFT >> (LOG - 1 - stage), 2, 1 << (LOG - 2 - stage), COLS])
        low, high = tl.split(tl.permute(pairs, (0, 2, 3, 1)))
        upper = (tl.arange(0, LEFT >> (LOG - 1 - stage)) & 1)[:, None, None] == 1
        pairs = tl.permute(tl.join(tl.where(upper, high, low), tl.where(upper, low, high)), (0, 3, 1, 2))
        v = tl.reshape(pairs, [LEFT, COLS])
    return v * 0.25


@triton.jit
def absolute_bits(v):
    """The bits of abs(v) as int32."""
    return v.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(bits, QMAX: tl.constexpr):
    """Scale, its inverse and whether the slice has integers other than 0, from the bits of an absolute maximum."""
    absmax = bits.to(tl.float32, bitcast=True)
    finite = bits < INFINITY_BITS
    live = finite & (absmax >= SMALLEST_ABSMAX)
    safe = tl.where(live, absmax, 1.0)
    limit = tl.full(safe.shape, QMAX, tl.float32)
    scale = tl.where(live, tl.div_rn(safe, limit), tl.where(finite, 0.0, float("nan")))
    return scale, tl.div_rn(limit, safe), live


@triton.jit
def round_int8(v, inverse, live, index, seed, QMAX: tl.constexpr, ROUNDING: tl.constexpr):
    """int8 of ``v * inverse``, 0 where not ``live``; ``index`` is the element's number for ``stochastic``."""
    v = tl.where(live, v * inverse, 0.0)
    if ROUNDING == "nearest":
        # No clamp: |v * inverse| <= qmax * (1 + 2^-22), which rounds to qmax.
        return (v + ROUNDER).to(tl.int32, bitcast=True).to(tl.int8)
    if ROUNDING == "stochastic":
        word, _, _, _ = tl.randint4x(seed, index)
        # The upper 24 bits are below 2^24: exact as a signed integer and as float32.
        noise = (word.to(tl.uint32, bitcast=True) >> 8).to(tl.int32).to(tl.float32) * (2.0**-24)
    else:
        noise = (v.to(tl.int32, bitcast=True) & 0x7FF).to(tl.float32) * (2.0**-11)
    v = tl.math.floor(v + noise)
    return tl.minimum(tl.maximum(v, -QMAX), QMAX).to(tl.int8)


@triton.jit
def pack_columns(q, ROWS: tl.constexpr, COLS: tl.constexpr):
    """int8 (ROWS, COLS) to uint8 (ROWS, COLS / 2); the even column is the low nibble."""
    low, high = tl.split(tl.reshape(q, [ROWS, COLS // 2, 2]))
    return ((low & 0xF) | (high << 4)).to(tl.uint8, bitcast=True)


@triton.jit
def pack_rows(q, ROWS: tl.constexpr, COLS: tl.constexpr):
    """int8 (ROWS, COLS) to uint8 (ROWS / 2, COLS); the even row is the low nibble."""
    low, high = tl.split(tl.permute(tl.reshape(q, [ROWS // 2, 2, COLS]), (0, 2, 1)))
    return ((low & 0xF) | (high << 4)).to(tl.uint8, bitcast=True)

"""The reference arithmetic against float64 and against formulas that share no code with it."""

import math

import pytest
import torch

from hot_hf.ops import reference as ref
from tests.ops import oracle

BLOCKS = [b for b in ref.BLOCK_SIZES if b > 1]
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("size", [1, 2, 16, 32, 64, 128])
def test_hadamard_matrix_is_sylvesters(size):
    """C15: entries by their closed form, and H Ht = size * I."""
    h = ref.hadamard_matrix(size)
    assert torch.equal(h, oracle.sylvester(size))
    assert torch.equal(h @ h.T, size * torch.eye(size).double())


def test_sequency_order_counts_sign_changes():
    """spec.md, section 1: row k of S changes its sign k times, 0 to 15."""
    s = ref.hadamard_matrix(16)[ref.sequency_order()]
    assert [(row[1:] != row[:-1]).sum().item() for row in s] == list(range(16))
    assert torch.equal(s, oracle.by_sign_changes(oracle.sylvester(16)))


@pytest.mark.parametrize("features", [1, 12, 33, 48, 3584])
@pytest.mark.parametrize("block", BLOCKS)
def test_hadamard_against_matrix(features, block):
    """C15: the transform of any width is the explicit matrix, keeps norms, and undoes itself."""
    x = torch.randn(5, features, dtype=torch.float64)
    y = ref.hadamard(x, block)
    assert y.shape == (5, math.ceil(features / block) * block)
    if features <= 48:
        torch.testing.assert_close(y, x @ oracle.block_matrix(features, block).T, rtol=0, atol=1e-13)
    torch.testing.assert_close(y.norm(dim=1), x.norm(dim=1))
    torch.testing.assert_close(ref.hadamard(y, block)[:, :features], x, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", FLOATS)
def test_hadamard_computes_in_float32(dtype):
    """spec.md, section 6: float32 inside for every type but float64; log2(block) additions of rounding error."""
    x = torch.randn(2, 3, 64).to(dtype)
    y = ref.hadamard(x, 64)
    assert y.dtype == ref.compute_dtype(x) == (torch.float64 if dtype == torch.float64 else torch.float32)
    # Six float32 additions and a product, each within 2^-24 of values at most 8 * absmax.
    assert (y.double() - ref.hadamard(x.double(), 64)).abs().max() < 7 * 2**-24 * 8 * x.double().abs().max()
    assert ref.hadamard(x, 1).equal(x.to(y.dtype))


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("rank", [1, 8, 16])
def test_project_tokens_against_matrix(tokens, rank):
    """spec.md, section 3: S_r by explicit matrix, the last block zero-padded; rank 16 loses nothing."""
    x, g = torch.randn(tokens, 7, dtype=torch.float64), torch.randn(tokens, 5, dtype=torch.float64)
    projected = ref.project_tokens(x, rank)
    assert projected.shape == (math.ceil(tokens / 16) * rank, 7)
    torch.testing.assert_close(projected, oracle.projection_matrix(tokens, rank) @ x, rtol=0, atol=1e-13)
    if rank == 16:
        torch.testing.assert_close(ref.project_tokens(g, rank).T @ projected, g.T @ x)


def _philox4x32_10(counter: list[int], key: list[int]) -> list[int]:
    """Salmon et al., SC 2011, written from the paper on Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def test_philox_known_answers():
    """The published vectors (Random123's kat_vectors) hold for the formula that the library is compared with."""
    assert _philox4x32_10([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    assert _philox4x32_10([ones] * 4, [ones] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert ref.philox_uniform(0, 1).item() == (0x6627E8D5 >> 8) * 2.0**-24


def test_philox_uniform(seed):
    """Element i is word 0 of counter i under the 64-bit key: 24 bits, on [0, 1), no generator touched."""
    key = (seed << 31) | 12345
    state = torch.random.get_rng_state()
    u = ref.philox_uniform(key, 100_000)
    assert torch.equal(torch.random.get_rng_state(), state)
    for i in (0, 1, 4095, 99_999):
        word = _philox4x32_10([i, 0, 0, 0], [key & 0xFFFFFFFF, key >> 32])[0]
        assert u[i].item() == (word >> 8) * 2.0**-24
    assert u.min() >= 0 and u.max() < 1
    # Mean and variance of a uniform number, to five standard errors.
    assert abs(u.mean() - 0.5) < 5 * (1 / 12 / u.numel()) ** 0.5
    assert abs(u.var() - 1 / 12) < 5 * (1 / 180 / u.numel()) ** 0.5
    other = ref.philox_uniform(key + 1, 100_000)
    assert abs(((u - 0.5) * (other - 0.5)).mean()) < 5 / 12 / u.numel() ** 0.5


def test_rounding_nearest_is_half_to_even():
    v = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 0.49, -3.51])
    assert ref.round_values(v, "nearest", 0).tolist() == [0.0, 2.0, 2.0, 0.0, -2.0, 0.0, -4.0]


@pytest.mark.parametrize("rounding", ["stochastic", "pseudo_stochastic"])
def test_random_roundings_are_unbiased(rounding, seed):
    """Each value goes to one of its neighbours, on average to itself (pseudo: 11 bits of noise, on [0, 1 - 2^-11])."""
    v = torch.empty(200_000).uniform_(-7, 7)
    r = ref.round_values(v, rounding, seed)
    assert ((r == v.floor()) | (r == v.ceil())).all()
    fraction = v - v.floor()
    # The variance of floor(v + u) is f(1 - f), 1/6 on average; five standard errors, and half the noise's own grid.
    tolerance = 5 * (1 / 6 / v.numel()) ** 0.5 + 2.0**-12
    assert abs((r - v).mean()) < tolerance
    assert abs((r - v).square().mean() - (fraction * (1 - fraction)).mean()) < 0.01
    assert torch.equal(ref.round_values(v, rounding, seed), r)
    # Whole values stay, but where v + u rounds up to the next one in float32: u is above 1 - 2^-22 for these values,
    # once in 4 million, so that 200,000 have more than two with a probability of 2e-5.
    whole = v.round()
    assert (ref.round_values(whole, "stochastic", seed) != whole).sum() <= 2


def test_pseudo_stochastic_uses_the_low_mantissa_bits():
    """spec.md, section 6: the low 11 bits of the float32 mantissa decide, read here by struct."""
    import struct

    v = torch.empty(500).uniform_(-100, 100)
    noise = [(struct.unpack("<I", struct.pack("<f", x))[0] & 0x7FF) / 2048 for x in v.tolist()]
    expected = [math.floor(torch.tensor(x) + torch.tensor(u)) for x, u in zip(v.tolist(), noise, strict=True)]
    assert ref.round_values(v, "pseudo_stochastic", 0).tolist() == expected


def test_unknown_rounding_is_named():
    with pytest.raises(ValueError, match=r"one of.*'nearest'.*not 'up'"):
        ref.round_values(torch.ones(1), "up", 0)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dim", [None, 0, 1])
@pytest.mark.parametrize("rounding", ref.ROUNDINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_quantize(bits, dim, rounding, dtype, seed):
    """Integers in range, scale absmax / qmax, and no entry further than its rounding allows."""
    v = torch.randn(40, 33, dtype=dtype) * torch.logspace(-3, 3, 33, dtype=dtype)
    q, scale = ref.quantize(v, bits, dim, rounding, seed)
    largest = v.abs().amax() if dim is None else v.abs().amax(dim, keepdim=True)
    steps = largest / oracle.QMAX[bits]
    assert q.dtype == torch.int8 and q.shape == v.shape and scale.dtype == dtype
    assert torch.equal(scale, steps.reshape(-1))
    # absmax * (qmax / absmax) may end an ulp below qmax, and floor then takes it one step down.
    assert oracle.QMAX[bits] - (rounding != "nearest") <= q.abs().max() <= oracle.QMAX[bits]
    # Half a step, or a whole one, plus two roundings of value * inverse: 2^-22 of at most 127 steps.
    width = (0.5 if rounding == "nearest" else 1.0) + 127 * 2**-22
    assert ((q * steps - v).abs() <= width * steps).all()


def test_quantize_zero_and_tiny_slices():
    """C04: zero rows get scale 0 and integers 0, also where the inverse scale would overflow."""
    v = torch.randn(4, 20)
    v[1], v[2] = 0, 1e-40
    for rounding in ref.ROUNDINGS:
        q, scale = ref.quantize(v, 8, 1, rounding, 3)
        assert scale[1] == scale[2] == 0 and not q[1:3].any()
        assert scale[0] > 0 and q[0].abs().max() == 127
    q, scale = ref.quantize(torch.zeros(3, 4), 4, None)
    assert scale.tolist() == [0.0] and not q.any()
    for dim, size in ((None, 1), (0, 5), (1, 0)):
        q, scale = ref.quantize(torch.zeros(0, 5), 8, dim)
        assert q.shape == (0, 5) and scale.shape == (size,) and not scale.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_quantize_non_finite(bad):
    """spec.md, section 6: the slice's scale turns NaN, the others stay as they are."""
    v = torch.randn(4, 20)
    good, good_scale = ref.quantize(v, 8, 1)
    v[2, 3] = bad
    q, scale = ref.quantize(v, 8, 1)
    assert scale.isnan().tolist() == [False, False, True, False] and not q[2].any()
    rest = [0, 1, 3]
    assert torch.equal(q[rest], good[rest]) and torch.equal(scale[rest], good_scale[rest])
    assert ref.quantize(v, 8, None)[1].isnan().all()


@pytest.mark.parametrize("columns", [0, 1, 2, 7, 16])
def test_pack_int4(columns):
    """Two's-complement nibbles, the even column low; odd widths are padded; all 16 values survive."""
    q = torch.randint(-8, 8, (33, columns), dtype=torch.int8)
    packed = ref.pack_int4(q)
    assert packed.dtype == torch.uint8 and packed.shape == (33, math.ceil(columns / 2))
    for r, c in ((0, 0), (32, columns - 1)):
        if columns:
            assert (packed[r, c // 2].item() >> (4 * (c % 2))) & 0xF == q[r, c].item() % 16
    assert torch.equal(ref.unpack_int4(packed, columns), q)


@pytest.mark.parametrize("k", [0, 1, 1023, 1025, 5000])
def test_exact_int_product(k):
    """Float slices give the very integers of an int64 product, extremes included, transposed operands too."""
    a = torch.randint(-127, 128, (9, k), dtype=torch.int8)
    b = torch.randint(-127, 128, (11, k), dtype=torch.int8).t()
    a[0] = 127
    b[:, 0] = -127
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            product = ref.exact_int_product(a, b)
        assert product.dtype == torch.int32
        assert torch.equal(product.long(), a.long() @ b.long())
    if k:
        assert product[0, 0] == -127 * 127 * k


def test_scaled_product_does_not_wrap():
    """C10: 140,000 products of 127 * 127 pass int32; parts are summed in float32."""
    k = 140_000
    a, b = torch.full((2, k), 127, dtype=torch.int8), torch.full((k, 3), 127, dtype=torch.int8)
    a[1] = -127
    result = ref.scaled_product(a, b, torch.ones(2), None, torch.float32)
    expected = torch.tensor([[1.0], [-1.0]]).expand(2, 3) * 127 * 127 * k
    assert (127 * 127 * k) > 2**31
    torch.testing.assert_close(result, expected, rtol=2**-22, atol=0)


def test_scaled_product_scales():
    a, b = torch.randint(-127, 128, (6, 20), dtype=torch.int8), torch.randint(-127, 128, (20, 4), dtype=torch.int8)
    row, column = torch.rand(6), torch.rand(4)
    exact = (a.double() @ b.double()) * row.double()[:, None] * column.double()
    torch.testing.assert_close(ref.scaled_product(a, b, row, column, torch.float64), exact, rtol=2**-21, atol=0)
    assert ref.scaled_product(a, b, row[:1], column[:1], torch.bfloat16).dtype == torch.bfloat16
    assert ref.scaled_product(a[:, :0], b[:0], row, column, torch.float32).eq(0).all()

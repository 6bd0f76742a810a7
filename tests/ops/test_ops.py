"""The operators: both gradients against float64 within what the quantization step allows, on any layout and size."""

import itertools

import pytest
import torch

from hot_hf import ops
from hot_hf.ops import FORMATS, REFERENCE, operators, reference
from tests.models import cosine, relative_error
from tests.ops import oracle

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
ROUNDINGS = list(reference.ROUNDINGS)
FORMAT_NAMES = list(FORMATS)


@pytest.fixture(params=["cpu", "reference"])
def backend(request, monkeypatch):
    """Both the fused kernels of this machine and the plain path of devices without kernels."""
    if request.param == "reference":
        monkeypatch.setattr(operators, "backend_for", lambda x: REFERENCE)
    return request.param


def packed_weight_grad(g, x, fmt, rank=8, block=16, per_feature=True, rounding="nearest", seed=5, dtype=None):
    packed, scale = ops.compress(x, fmt, rank, block, per_feature, rounding, seed)
    return ops.grad_weight(
        g, packed, scale, fmt, x.shape[1], rank, block, per_feature, rounding, seed + 3, dtype or g.dtype
    )


def check(result, product: oracle.Product, statistics: bool = True):
    """No entry outside the hard bound; the total error as large as uniform rounding errors make it.

    Slack: float32 transforms and scales add a few 2^-24 of |A| |B| (2^-20 allows for 16), the output type half an ulp.
    """
    value, bound = product.value, product.bound()
    magnitude = product.a.abs() @ product.b.abs()
    magnitude = magnitude if product.after is None else magnitude @ product.after.abs()
    slack = 2.0**-20 * magnitude + torch.finfo(result.dtype).eps * (value.abs() + bound)
    error = (result.double() - value).abs()
    assert (error <= bound + slack).all(), (error - bound - slack).max()
    if statistics:
        # Thousands of entries: the norm of their error varies by a few per cent around its expectation. The largest
        # entry of each slice is on the grid and fractions near it are not uniform, hence the lower limit.
        ratio = error.norm().item() / product.expected_error()
        assert 0.75 < ratio < 1.25, ratio


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_grad_input_within_bound(bits, per_token, rounding, backend):
    g, w = torch.randn(70, 96) * torch.rand(70, 1), torch.randn(96, 65)
    for block in (1, 16, 32):
        result = ops.grad_input(g, w, bits, block, per_token, rounding, 9, torch.float32)
        check(result, oracle.grad_input(g, w, bits, block, per_token, rounding))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("per_feature", [True, False])
@pytest.mark.parametrize("fmt", FORMAT_NAMES)
def test_grad_weight_within_bound(fmt, per_feature, rounding, backend):
    # 128 features: a padded tail would take its share of the noise with it when it is cut off.
    g, x = torch.randn(150, 70), torch.randn(150, 128)
    for rank, block in ((8, 16), (16, 64)):
        result = packed_weight_grad(g, x, fmt, rank, block, per_feature, rounding)
        check(result, oracle.grad_weight(g, x, fmt, rank, block, per_feature, rounding))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("fmt", FORMAT_NAMES)
def test_dtypes(fmt, dtype, backend):
    """Every input type, every output type; the bound is that of the values as the input type holds them."""
    g, x, w = torch.randn(50, 70).to(dtype), torch.randn(50, 66).to(dtype), torch.randn(70, 66).to(dtype)
    for out in FLOATS:
        weight_grad = packed_weight_grad(g, x, fmt, dtype=out)
        input_grad = ops.grad_input(g, w, 8, 16, True, "nearest", 1, out)
        assert weight_grad.dtype == input_grad.dtype == out
        check(weight_grad, oracle.grad_weight(g, x, fmt, 8, 16, True, "nearest"), statistics=False)
        check(input_grad, oracle.grad_input(g, w, 8, 16, True, "nearest"))


SIZES = [1, 3, 7, 15, 17, 33, 100]


@pytest.mark.parametrize("tokens", SIZES)
@pytest.mark.parametrize("features", SIZES)
def test_sizes_off_the_block(tokens, features, backend):
    """C06: every pair of sizes with a random third one, twice: within the bound, and the same bits again."""
    out = SIZES[torch.randint(len(SIZES), ()).item()]
    g, x, w = torch.randn(tokens, out), torch.randn(tokens, features), torch.randn(out, features)
    for fmt in FORMAT_NAMES:
        result = packed_weight_grad(g, x, fmt)
        assert result.shape == (out, features) and result.is_contiguous()
        check(result, oracle.grad_weight(g, x, fmt, 8, 16, True, "nearest"), statistics=False)
        assert torch.equal(result, packed_weight_grad(g, x, fmt))
    for bits in (4, 8):
        result = ops.grad_input(g, w, bits, 16, True, "nearest", 1, torch.float32)
        check(result, oracle.grad_input(g, w, bits, 16, True, "nearest"), statistics=False)
        assert torch.equal(result, ops.grad_input(g, w, bits, 16, True, "nearest", 1, torch.float32))


def _layouts(t):
    """The values of ``t`` under other strides, where they allow it."""
    rows, columns = t.shape
    yield t.t().contiguous().t()
    yield torch.stack((t, torch.zeros_like(t)), -1)[..., 0]
    yield torch.cat((torch.zeros_like(t), t), 1)[:, columns:]
    yield torch.cat((torch.zeros_like(t), t), 0)[rows:]


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("fmt", FORMAT_NAMES)
def test_layouts_change_nothing(fmt, rounding, backend):
    """C01: strides of g, x and W never show in a bit of the result; nor does stride 0."""
    g, x, w = torch.randn(37, 48), torch.randn(37, 40), torch.randn(48, 40)
    expected = packed_weight_grad(g, x, fmt, rounding=rounding)
    expected_input = ops.grad_input(g, w, 8, 16, True, rounding, 1, torch.float32)
    for g2, x2, w2 in zip(_layouts(g), _layouts(x), _layouts(w), strict=True):
        assert torch.equal(packed_weight_grad(g2, x2, fmt, rounding=rounding), expected)
        assert torch.equal(ops.grad_input(g2, w2, 8, 16, True, rounding, 1, torch.float32), expected_input)
    ones = torch.ones(37, 48)
    stretched = torch.ones(()).expand(37, 48)
    assert torch.equal(packed_weight_grad(stretched, x, fmt), packed_weight_grad(ones, x, fmt))
    assert torch.equal(
        ops.grad_input(stretched, w, 4, 16, False, "nearest", 1, torch.float32),
        ops.grad_input(ones, w, 4, 16, False, "nearest", 1, torch.float32),
    )


@pytest.mark.parametrize("fmt", FORMAT_NAMES)
@pytest.mark.parametrize("sizes", [(37, 40, 48), (37, 40, 1), (37, 1, 48), (1, 40, 48), (1, 40, 1), (16, 1, 1)])
def test_layouts_of_what_was_kept(fmt, sizes):
    """Saved-tensor hooks may give back other strides (and axes of one element any): the same bits."""
    tokens, features, out = sizes
    g, x = torch.randn(tokens, out), torch.randn(tokens, features)
    packed, scale = ops.compress(x, fmt, 8, 16, True, "nearest", 0)
    rest = (fmt, features, 8, 16, True, "nearest", 3, torch.float32)
    expected = ops.grad_weight(g, packed, scale, *rest)
    for other_g, other in zip(_layouts(g), [*_layouts(packed)], strict=True):
        strided_scale = torch.stack((scale, scale), 1)[:, 0]
        assert torch.equal(ops.grad_weight(other_g, other, strided_scale, *rest), expected)
    w = torch.randn(out, features)
    expected = ops.grad_input(g, w, 8, 16, True, "nearest", 0, torch.float32)
    for other_g, other in zip(_layouts(g), _layouts(w), strict=True):
        assert torch.equal(ops.grad_input(other_g, other, 8, 16, True, "nearest", 0, torch.float32), expected)


@pytest.mark.parametrize("fmt", FORMAT_NAMES)
def test_kept_bytes(fmt):
    """spec.md, section 4: bits per element of x as the table says, and scales of one number per token or feature."""
    x = torch.randn(320, 256)
    packed, scale = ops.compress(x, fmt, 8, 16, True, "nearest", 0)
    per_element = {"hla_int8": 0.5, "hla_int4": 0.25, "ht_int4": 0.5, "int8": 1.0}[fmt]
    assert packed.nbytes == x.numel() * per_element
    assert scale.nbytes == 4 * (256 if fmt.startswith("hla") else 320)
    assert packed.untyped_storage().nbytes() == packed.nbytes and scale.untyped_storage().nbytes() == scale.nbytes


@pytest.mark.parametrize("fmt", FORMAT_NAMES)
def test_long_contraction(fmt, backend):
    """C10: constant x and g over 140,000 tokens, 16 to 4: all integers are at their maximum and must not wrap."""
    tokens = 140_000
    x, g = torch.full((tokens, 16), 0.5), torch.full((tokens, 4), 2.0)
    result = packed_weight_grad(g, x, fmt, rank=16)
    # Constants lie on every grid up to the roundings of float32 sums and scales.
    torch.testing.assert_close(result, torch.full((4, 16), float(tokens)), rtol=1e-5, atol=0)
    w = torch.full((tokens, 4), 0.5)
    result = ops.grad_input(g.t().contiguous(), w, 8, 1, True, "nearest", 0, torch.float32)
    torch.testing.assert_close(result, torch.full((4, 4), float(tokens)), rtol=1e-5, atol=0)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("fmt", FORMAT_NAMES)
def test_zeros_stay_zero(fmt, rounding, backend):
    """C04: zero gradients and inputs, zero tokens and features: exact zeros where the exact gradient has them."""
    g, x, w = torch.randn(40, 32), torch.randn(40, 48), torch.randn(32, 48)
    for zero_g, zero_x in ((True, False), (False, True), (True, True)):
        result = packed_weight_grad(g * (not zero_g), x * (not zero_x), fmt, rounding=rounding)
        assert torch.equal(result, torch.zeros(32, 48))
    for per_token, bits in itertools.product((True, False), (4, 8)):
        for pair in ((g * 0, w), (g, w * 0)):
            assert torch.equal(
                ops.grad_input(*pair, bits, 16, per_token, rounding, 1, torch.float32), torch.zeros(40, 48)
            )
    g[7], g[:, 3], x[16:32] = 0, 0, 0  # a token, an output feature, a whole block of tokens
    weight_grad = packed_weight_grad(g, x, fmt, rounding=rounding)
    assert weight_grad.isfinite().all() and not weight_grad[3].any() and weight_grad[4].any()
    input_grad = ops.grad_input(g, w, 8, 16, True, rounding, 1, torch.float32)
    assert input_grad.isfinite().all() and not input_grad[7].any() and input_grad[8].any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("fmt", FORMAT_NAMES)
def test_non_finite_shows(fmt, bad, backend):
    """spec.md, section 6: one bad entry of g or x leaves non-finite entries where the exact gradient has them."""
    g, x, w = torch.randn(40, 32), torch.randn(40, 48), torch.randn(32, 48)
    broken = g.clone()
    broken[5, 9] = bad
    for per_slice in (True, False):
        result = packed_weight_grad(broken, x, fmt, per_feature=per_slice)
        assert not result[9].isfinite().any()
        result = ops.grad_input(broken, w, 8, 16, per_slice, "nearest", 1, torch.float32)
        assert not result[5].isfinite().any()
        broken_w = w.clone()
        broken_w[9, 4] = bad
        result = ops.grad_input(g, broken_w, 8, 16, per_slice, "nearest", 1, torch.float32)
        assert not result[:, 4].isfinite().any()
    broken = x.clone()
    broken[5, 9] = bad
    assert not packed_weight_grad(g, broken, fmt)[:, 9].isfinite().any()
    assert not packed_weight_grad(g, broken, fmt, per_feature=False)[:, 9].isfinite().any()
    # The scale alone must do it: g is zero where x is bad, as 0 * inf is NaN in the exact product.
    g[5] = 0
    assert not packed_weight_grad(g, broken, fmt)[:, 9].isfinite().any()


def test_a_single_bad_token_spares_the_others():
    """Per-token scales keep a bad token's input gradient to itself."""
    g, w = torch.randn(40, 32), torch.randn(32, 48)
    good = ops.grad_input(g, w, 8, 16, True, "nearest", 1, torch.float32)
    g[5, 9] = torch.inf
    bad = ops.grad_input(g, w, 8, 16, True, "nearest", 1, torch.float32)
    rest = [i for i in range(40) if i != 5]
    assert torch.equal(bad[rest], good[rest])


def test_outlier_token():
    """C11: one token times 1e4 leaves the other tokens' input gradients alone and everything finite."""
    g, x, w = torch.randn(64, 96), torch.randn(64, 80), torch.randn(96, 80)
    g[11] *= 1e4
    exact = g.double() @ w.double()
    rest = [i for i in range(64) if i != 11]
    result = ops.grad_input(g, w, 8, 16, True, "nearest", 1, torch.float32)
    assert cosine(result[rest], exact[rest]) > 0.999  # spec.md, section 8: INT8 per token
    result = ops.grad_input(g, w, 4, 16, True, "nearest", 1, torch.float32)
    assert cosine(result[rest], exact[rest]) > 0.95  # 2 * 1/12 * (3.2 / 7)^2 of noise power: a cosine of 0.98
    x[11] *= 1e4
    for fmt in FORMAT_NAMES:
        assert packed_weight_grad(g, x, fmt).isfinite().all()


@pytest.mark.parametrize("fmt", FORMAT_NAMES)
def test_float16_extremes(fmt):
    """C11: g around 1e-6 and x near 6e4 in float16: nothing underflows or overflows on the way."""
    g, x, w = torch.randn(64, 96), torch.randn(64, 80), torch.randn(96, 80)
    small, large = (g * 1e-6).half(), (x.sign() * 6e4).half()
    result = packed_weight_grad(small, large, fmt, rank=16, dtype=torch.float32)
    assert result.isfinite().all()
    limit = {"hla_int4": 0.97, "ht_int4": 0.98}.get(fmt, 0.995)
    assert cosine(result, small.double().T @ large.double()) > limit
    result = ops.grad_input(small, w.half(), 8, 16, True, "nearest", 1, torch.float32)
    assert cosine(result, small.double() @ w.half().double()) > 0.999


def test_each_token_keeps_its_own_gradient():
    """C14: weights of 1e-3 to 1e3 on single tokens; without them the answer is another one."""
    x = torch.randn(128, 64)
    g = torch.randn(128, 96)
    weights = torch.logspace(-3, 3, 128)[torch.randperm(128)][:, None]
    exact = (g * weights).double().T @ x.double()
    for fmt, limit in (("ht_int4", 0.2), ("int8", 0.02)):
        result = packed_weight_grad(g * weights, x, fmt)
        # 4 bits of x alone: a step of 3.2 sigma / 7 is a relative error of 0.13.
        assert relative_error(result, exact) < limit
        assert relative_error(packed_weight_grad(g, x, fmt), exact) > 0.5


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("fmt", FORMAT_NAMES)
def test_both_gradients_at_once(fmt, rounding, backend):
    """``grad_both`` is the two operators with seed + 1 and seed + 3, bit for bit."""
    for sizes, dtype in (((37, 40, 48), torch.float32), ((16, 33, 1), torch.float32), ((64, 64, 64), torch.bfloat16)):
        tokens, features, out = sizes
        g, x, w = (torch.randn(*s).to(dtype) for s in ((tokens, out), (tokens, features), (out, features)))
        for per_slice, bits in itertools.product((True, False), (4, 8)):
            packed, scale = ops.compress(x, fmt, 8, 16, per_slice, rounding, 5)
            both = ops.grad_both(
                g, w, packed, scale, bits, fmt, 8, 16, per_slice, per_slice, rounding, 5, dtype, torch.float32
            )
            assert torch.equal(both[0], ops.grad_input(g, w, bits, 16, per_slice, rounding, 6, dtype))
            rest = (fmt, features, 8, 16, per_slice, rounding, 8, torch.float32)
            assert torch.equal(both[1], ops.grad_weight(g, packed, scale, *rest))


def _op_samples():
    x, g, w = torch.randn(20, 33), torch.randn(20, 18), torch.randn(18, 33)
    for fmt, rounding in itertools.product(FORMAT_NAMES, ROUNDINGS):
        for dtype, per_feature in ((torch.float32, True), (torch.bfloat16, False), (torch.float64, True)):
            head = (fmt, 8, 16, per_feature, rounding, 4)
            yield ops.compress, (x.to(dtype), *head)
            packed, scale = ops.compress(x.to(dtype), *head)
            yield ops.grad_weight, (g.to(dtype), packed, scale, fmt, 33, *head[1:], dtype)
            rest = (8, fmt, 8, 16, per_feature, per_feature, rounding, 4, torch.float32, dtype)
            yield ops.grad_both, (g.to(dtype), w.to(dtype), packed, scale, *rest)
    for bits, per_token, rounding in itertools.product((4, 8), (True, False), ROUNDINGS):
        yield ops.grad_input, (g, w, bits, 16, per_token, rounding, 4, torch.bfloat16)
        yield ops.grad_input, (g.t().contiguous().t(), w.double(), bits, 32, per_token, rounding, 4, torch.float64)


def test_opcheck():
    """Schemas, fakes and autograd registration of every operator, format, rounding and type."""
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    for op, arguments in _op_samples():
        torch.library.opcheck(op, arguments, test_utils=checks)


@pytest.mark.parametrize("op", ["compress", "grad_input", "grad_weight", "grad_both"])
def test_opcheck_dynamic(op):
    """Dynamic shapes under AOTAutograd, one sample per operator (slower)."""
    for candidate, arguments in _op_samples():
        if candidate is getattr(ops, op):
            torch.library.opcheck(candidate, arguments, test_utils=("test_aot_dispatch_dynamic",))
            break


def test_empty(backend):
    """C36: no tokens give an empty input gradient and a zero weight gradient."""
    g, x, w = torch.randn(0, 16), torch.randn(0, 32), torch.randn(16, 32)
    for fmt in FORMAT_NAMES:
        assert torch.equal(packed_weight_grad(g, x, fmt), torch.zeros(16, 32))
    assert ops.grad_input(g, w, 8, 16, True, "nearest", 0, torch.float32).shape == (0, 32)


def test_bad_arguments_are_named():
    x, g = torch.randn(4, 16), torch.randn(4, 8)
    with pytest.raises(ValueError, match=r"compress: x must be a floating-point matrix, got torch.int64 \(4, 16\)"):
        ops.compress(x.long(), "int8", 8, 16, True, "nearest", 0)
    with pytest.raises(ValueError, match="unknown format 'int2'; choose one of"):
        ops.compress(x, "int2", 8, 16, True, "nearest", 0)
    with pytest.raises(ValueError, match="rank must be 1 to 16, got 17"):
        ops.compress(x, "hla_int8", 17, 16, True, "nearest", 0)
    with pytest.raises(ValueError, match="bits must be 4 or 8, got 3"):
        ops.grad_input(g, torch.randn(8, 16), 3, 16, True, "nearest", 0, torch.float32)
    with pytest.raises(ValueError, match="weight must be a floating-point matrix"):
        ops.grad_input(g, torch.randn(8), 8, 16, True, "nearest", 0, torch.float32)

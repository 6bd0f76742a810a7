"""The Triton kernels against the reference, on the CPU by Triton's interpreter.

Not collected by itself: ``test_triton_interpreter.py`` runs it in a process with TRITON_INTERPRET=1, which has to be
set before anything imports Triton. Sizes are small: the interpreter makes some hundred numpy calls per tile.
"""

import os
import sys
from dataclasses import replace

import pytest
import torch

assert os.environ.get("TRITON_INTERPRET") == "1", "run tests/ops/test_triton_interpreter.py instead"

from hot_hf import ops  # noqa: E402
from hot_hf.ops import REFERENCE, operators, reference  # noqa: E402
from hot_hf.ops import triton as triton_package  # noqa: E402
from hot_hf.ops.triton import BACKEND as triton  # noqa: E402
from hot_hf.ops.triton import tuning  # noqa: E402
from hot_hf.ops.triton.product import product  # noqa: E402

product_module = sys.modules[product.__module__]
features_module = sys.modules["hot_hf.ops.triton.features"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SEEDS = (7, 2**61 + 12345)  # below and above 32 bits


@pytest.fixture(autouse=True)
def seed():
    value = int(os.environ.get("HOT_TEST_SEED", int.from_bytes(os.urandom(4), "little") >> 1))
    print(f"HOT_TEST_SEED={value}")
    torch.manual_seed(value)


def same(actual, expected):
    """Integers and scales equal bit for bit, NaN scales included."""
    assert actual[0].dtype == expected[0].dtype and actual[0].shape == expected[0].shape
    assert torch.equal(actual[0], expected[0]), f"{(actual[0] != expected[0]).sum()} integers differ"
    assert actual[1].shape == expected[1].shape
    assert torch.equal(actual[1].view(torch.int32), expected[1].contiguous().view(torch.int32)) or torch.equal(
        actual[1].nan_to_num(-1.0), expected[1].nan_to_num(-1.0)
    )


def sample(rows, columns, dtype=torch.float32, special=False):
    """Values over several magnitudes; ``special``: a zero row and column, tiny, infinite and NaN entries."""
    x = torch.randn(rows, columns) * torch.exp(torch.randn(rows, 1))
    if special:
        x[rows // 2] = 0
        x[:, columns // 2] = 0
        x[0] = 1e-38 if dtype != torch.float16 else 6e-8
        x[1, 1], x[2, 2] = float("nan"), -float("inf")
    return x.to(dtype)


def stored(x, dtype):
    """``x`` in ``dtype`` as the interpreter stores it: it cuts bfloat16 off, where a GPU rounds it to nearest."""
    if dtype == torch.bfloat16:
        x = (x.contiguous().view(torch.int32) & ~0xFFFF).view(torch.float32)
    return x.to(dtype)


def strided(x, how):
    if how == "transposed":
        return x.t().contiguous().t()
    if how == "stepped":
        wide = torch.zeros(x.shape[0] * 2, x.shape[1] * 3, dtype=x.dtype)
        wide[::2, ::3] = x
        return wide[::2, ::3]
    if how == "expanded":
        return x[:1, :1].expand(x.shape)
    return x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounding", reference.ROUNDINGS)
def test_quantizers_equal_reference(dtype, rounding):
    """C06, C61: sizes on and off the block and the tile, special values, all scales."""
    for bits, rows, columns in ((4, 37, 50), (8, 130, 70)):
        x = sample(rows, columns, dtype, special=True)
        for seed, per_slice in zip(SEEDS, (True, False), strict=True):
            for dim, block in ((1, 16), (0, 16), (1, 64), (0, 1)):
                arguments = (x, bits, dim, block, per_slice, rounding, seed)
                q, scale = reference.hadamard_quantize(*arguments)
                same(triton.hadamard_quantize(*arguments), (q, scale))
                if dim == 1:
                    same(triton.quantize_operand(*arguments), (reference.pack_int4(q) if bits == 4 else q, scale))
            for rank in (5, 8):  # all of them: test_every_rank
                arguments = (x, bits, rank, per_slice, rounding, seed)
                same(triton.project_quantize(*arguments), reference.project_quantize(*arguments))
            arguments = (x, torch.rand(rows), per_slice, rounding, seed)
            same(triton.fold_quantize(*arguments), reference.fold_quantize(*arguments))


@pytest.mark.parametrize("block", reference.BLOCK_SIZES)
def test_every_block_size(block):
    """C15: both directions, one program and several."""
    x = sample(block + 9, block + 5)
    for dim in (0, 1):
        same(triton.hadamard_quantize(x, 8, dim, block, True), reference.hadamard_quantize(x, 8, dim, block, True))
        same(triton.hadamard_quantize(x, 8, dim, block, False), reference.hadamard_quantize(x, 8, dim, block, False))
    settings = (x, 8, 1, block, True, "nearest", 0)
    same(triton.quantize_operand(*settings), reference.hadamard_quantize(*settings))


@pytest.mark.parametrize("rank", range(1, 17))
def test_every_rank(rank):
    x = sample(150, 20)
    same(triton.project_quantize(x, 8, rank, True), reference.project_quantize(x, 8, rank, True))


@pytest.mark.parametrize("how", ("transposed", "stepped", "expanded"))
def test_strided_inputs(how):
    """C01: any stride, stride 0 included."""
    for rows, columns in ((40, 33), (1, 64), (64, 1)):
        x = strided(sample(rows, columns), how)
        for dim in (0, 1):
            same(triton.hadamard_quantize(x, 8, dim, 16, True), reference.hadamard_quantize(x, 8, dim, 16, True))
        same(triton.project_quantize(x, 8, 8, True), reference.project_quantize(x, 8, 8, True))
        settings = (x, 8, 1, 16, True, "nearest", 0)
        same(triton.quantize_operand(*settings), reference.hadamard_quantize(*settings))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", (8, 16, 32))
def test_tokens_innermost(monkeypatch, dtype, tokens):
    """What ``ht_int4`` and ``int8`` keep: steps of 64 features on and off the width, programs of every size, special
    rows, strides, all roundings; twice the same. Nothing is written past the end of q's rows, padding included."""
    family = replace(tuning.FAMILIES["sm_90"], row_elements=64 * tokens)
    monkeypatch.setattr(features_module, "tokens_per_program", lambda *_: tokens)
    allocated = []

    def allocate(rows, k, dtype, device):
        memory = torch.full((rows + 2, reference.padded(k, 16)), 99, dtype=dtype)
        allocated.append(memory)
        return memory[1:-1, :k]

    monkeypatch.setattr(features_module, "contraction_innermost", allocate)
    for rows, columns, how in ((16, 128, ""), (37, 150, "stepped"), (32, 65, "transposed"), (1, 31, "")):
        x = strided(sample(rows, columns, dtype, special=rows > 2), how)
        for bits, block, rounding in ((4, 16, "stochastic"), (8, 1, "nearest"), (4, 1, "pseudo_stochastic")):
            q, scale = reference.hadamard_quantize(x, bits, 1, block, True, rounding, 5)
            expected = reference.pack_int4(q) if bits == 4 else q, scale
            for _ in range(2):
                actual = features_module.quantize_tokens(x, family, bits, block, bits == 4, rounding, 5)
                same(actual, expected)
            assert actual[0].stride() == (1, reference.padded(rows, 16))
            assert (allocated[-1][[0, -1]] == 99).all()


def test_rows_too_long_for_registers(monkeypatch):
    """The tile kernels take over, with the same integers."""
    x = sample(9, 200, special=True)
    settings = (x, 8, 1, 16, True, "stochastic", 3)
    called = []
    monkeypatch.setattr(triton_package, "quantize_rows", lambda *a: called.append(a))
    same(triton.quantize_operand(*settings), reference.hadamard_quantize(*settings))
    assert called
    family = tuning.FAMILIES["sm_90"]
    from hot_hf.ops.triton.features import row_config

    assert row_config(family, 14336, 16) == (1, 16384, 16)
    assert row_config(family, 16385, 16) is None


def test_zero_and_tiny_rows():
    """C04: scale 0 and integers 0 at and below 2^-120, ordinary integers above."""
    x = torch.ones(4, 16)
    x[0], x[1], x[2] = 0, 2.0**-124, 2.0**-119  # transformed: 4 times that, in the first column
    q, scale = triton.hadamard_quantize(x, 8, 1, 16, True)
    same((q, scale), reference.hadamard_quantize(x, 8, 1, 16, True))
    assert scale[:2].tolist() == [0.0, 0.0] and q[:2].abs().max() == 0
    assert q[2:, 0].tolist() == [127, 127]


def test_nan_and_infinity_reach_the_scale():
    """spec.md, section 6: tl.max loses a NaN, so the maximum goes over bits."""
    for value in (float("nan"), float("inf"), -float("inf")):
        for at in (0, 17, 47):  # first, middle and last lanes of a row
            x = sample(6, 48)
            x[3, at] = value
            q, scale = triton.hadamard_quantize(x, 8, 1, 16, True)
            assert scale.isnan().tolist() == [False, False, False, True, False, False]
            assert q[3].abs().max() == 0
            q, scale = triton.project_quantize(x, 8, 8, True)
            assert scale.isnan().nonzero().tolist() == [[at]] and q[:, at].abs().max() == 0
            assert triton.hadamard_quantize(x, 8, 0, 16, False)[1].isnan().all()


def test_packed_equals_pack_int4():
    for rows, columns, block in ((37, 51, 16), (20, 33, 1), (150, 64, 16)):
        x = sample(rows, columns, special=True)
        q, scale = reference.hadamard_quantize(x, 4, 1, block, True, "stochastic", 9)
        same(triton.hadamard_quantize_packed(x, block, True, "stochastic", 9), (reference.pack_int4(q), scale))
        q, scale = reference.project_quantize(x, 4, 8, True, "stochastic", 9)
        same(triton.project_quantize_packed(x, 8, True, "stochastic", 9), (reference.pack_int4(q), scale))


@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize("fold", (False, True))
def test_both_quantizations_of_g_equal_the_single_ones(bits, fold):
    for rows, columns, per_token, per_feature in ((37, 50, True, True), (130, 96, True, False), (20, 70, False, True)):
        g = sample(rows, columns, torch.bfloat16, special=True)
        rank, token_scale = (None, torch.rand(rows)) if fold else (8, None)
        settings = (rank, token_scale, per_feature, "stochastic", (11, 13))
        features, tokens = triton.quantize_both(g, bits, 16, per_token, *settings)
        q, scale = reference.hadamard_quantize(g, bits, 1, 16, per_token, "stochastic", 11)
        same(features, (reference.pack_int4(q) if bits == 4 else q, scale))
        if fold:
            same(tokens, reference.fold_quantize(g, token_scale, per_feature, "stochastic", 13))
        else:
            same(tokens, reference.project_quantize(g, 8, rank, per_feature, "stochastic", 13))


def integers(*shape, bits=8):
    limit = reference.QMAX[bits]
    return torch.randint(-limit, limit + 1, shape, dtype=torch.int8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_product_equals_reference(dtype):
    """Tails in all three sizes, every layout, every kind of scale: each float operation is the reference's."""
    for m, n, k in ((5, 7, 33), (70, 130, 200), (64, 64, 128), (1, 1, 1)):
        a, b = integers(m, k), integers(k, n)
        for a_scale in (torch.rand(m), torch.rand(1)):
            for b_scale in (torch.rand(n), torch.rand(1), None):
                expected = stored(reference.scaled_product(a, b, a_scale, b_scale, torch.float32), dtype)
                for x in (a, a.t().contiguous().t()):
                    for y in (b, b.t().contiguous().t()):
                        assert torch.equal(triton.scaled_product(x, y, a_scale, b_scale, dtype), expected)


def test_product_of_nan_and_zero_scales():
    a, b = integers(3, 20), integers(20, 4)
    result = triton.scaled_product(a, b, torch.tensor([0.0, float("nan"), 1.0]), None, torch.float32)
    assert (result[0] == 0).all() and result[1].isnan().all() and result[2].isfinite().all()


def test_empty_sizes():
    """C36: zeros, as torch's products of empty matrices."""
    for m, n, k in ((0, 3, 4), (3, 0, 4), (3, 4, 0)):
        result = triton.scaled_product(integers(m, k), integers(k, n), torch.ones(m), torch.ones(n), torch.float32)
        assert result.shape == (m, n) and (result == 0).all()
    for shape in ((0, 16), (16, 0)):
        x = torch.zeros(shape)
        same(triton.hadamard_quantize(x, 8, 1, 16, True), reference.hadamard_quantize(x, 8, 1, 16, True))
        same(triton.project_quantize(x, 8, 8, True), reference.project_quantize(x, 8, 8, True))


@pytest.mark.parametrize("pack", ("", "k", "m"))
def test_long_contractions(monkeypatch, pack):
    """C10: 140,000 products of the largest integers pass 2^31; parts are summed in float32."""
    k = 140_000
    limit = 7 if pack == "k" else 127
    a, b = torch.full((16, k), limit, dtype=torch.int8), torch.full((k, 4), limit, dtype=torch.int8)
    if pack == "m":
        a = torch.full((16, k), 7, dtype=torch.int8)
    expected = reference.scaled_product(a, b, torch.ones(16), None, torch.float32)
    operands = {"": (a, b), "m": (reference.pack_int4(a.t()).t(), b)}
    operands["k"] = (reference.pack_int4(a), reference.pack_int4(b.t()).t()) if pack == "k" else None
    # A long step, which the interpreter can hold: a GPU's would take it 2,200.
    monkeypatch.setattr(product_module, "LONG", tuning.ProductTile(16, 16, 8192, 4, 1))
    family = tuning.FAMILIES["sm_90"]
    out = torch.empty(16, 4)
    assert torch.equal(product(*operands[pack], torch.ones(16), None, out, family, pack), expected)


def test_packed_products():
    """4-bit operands packed along the contraction, and along the columns with the inverse transform behind."""
    for n, o, i in ((37, 33, 51), (70, 48, 64)):
        g, x, weight = sample(n, o), sample(n, i), sample(o, i)
        for block in (1, 16, 64):
            a, a_scale = reference.hadamard_quantize(g, 4, 1, block, True)
            b, b_scale = reference.hadamard_quantize(weight, 4, 0, block, True)
            packed_a = triton.quantize_operand(g, 4, 1, block, True, "nearest", 0)
            packed_b = triton.quantize_operand(weight, 4, 0, block, True, "nearest", 0)
            assert packed_a[0].shape[1] == (a.shape[1] + 1) // 2 and packed_b[0].shape[0] == (b.shape[0] + 1) // 2
            expected = reference.scaled_product(a, b, a_scale, b_scale, torch.float32)
            actual = triton.scaled_product(packed_a[0], packed_b[0], packed_a[1], packed_b[1], torch.float32)
            assert torch.equal(actual, expected)
            assert torch.equal(
                triton.scaled_product(packed_a[0], b, a_scale, b_scale, torch.float32), expected
            )  # the other operand from the torch path
            assert torch.equal(triton.scaled_product(a, packed_b[0], a_scale, b_scale, torch.float32), expected)

            q, scale = reference.hadamard_quantize(x, 4, 1, block, True)
            folded, g_scale = reference.fold_quantize(g, scale, True)
            expected = reference.scaled_product(folded.t(), q, g_scale, None, torch.float32)
            expected = reference.hadamard(expected, block)[:, :i]
            for dtype in DTYPES:
                actual = triton.packed_product(folded.t(), reference.pack_int4(q), g_scale, None, i, block, dtype)
                assert actual.is_contiguous() and torch.equal(actual, stored(expected, dtype))
            x_scale = torch.rand(q.shape[1])
            expected = reference.scaled_product(folded.t(), q, g_scale, x_scale, torch.float32)
            actual = triton.packed_product(
                folded.t(), reference.pack_int4(q), g_scale, x_scale, q.shape[1], 1, torch.float32
            )
            assert torch.equal(actual, expected)


@pytest.mark.parametrize("fmt", ops.FORMATS)
@pytest.mark.parametrize("bits", (4, 8))
def test_operators_equal_reference(monkeypatch, fmt, bits):
    """The three operators and grad_both end to end; two runs equal (C64)."""
    tokens, outputs, inputs = 70, 48, 51
    x, g, weight = sample(tokens, inputs), sample(tokens, outputs), sample(outputs, inputs)
    x[3] = g[5] = 0
    results = {}
    for backend in (REFERENCE, triton, triton):
        monkeypatch.setattr(operators, "backend_for", lambda _, backend=backend: backend)
        packed, scale = ops.compress(x, fmt, 8, 16, True, "stochastic", 4)
        settings = (8, 16, True, "stochastic")
        grad_input = ops.grad_input(g, weight, bits, 16, True, "stochastic", 5, torch.float32)
        grad_weight = ops.grad_weight(g, packed, scale, fmt, inputs, *settings, 7, torch.float32)
        assert grad_weight.is_contiguous()
        both = ops.grad_both(
            g, weight, packed, scale, bits, fmt, 8, 16, True, True, "stochastic", 4, torch.float32, torch.float32
        )
        assert torch.equal(both[0], grad_input) and torch.equal(both[1], grad_weight)
        for name, value in {"packed": packed, "scale": scale, "gx": grad_input, "gw": grad_weight}.items():
            assert torch.equal(results.setdefault(name, value), value), f"{name} of {backend.name}"


@pytest.mark.parametrize("fmt", ops.FORMATS)
def test_kept_tensors_reach_the_product_without_a_copy(monkeypatch, fmt):
    """grad_weight multiplies the memory that compress wrote. A kept tensor that came back in another layout, as from
    hooks that move it to other memory, is copied first and gives the same gradient."""
    monkeypatch.setattr(operators, "backend_for", lambda _: triton)
    tokens, outputs, inputs = 37, 33, 51
    x, g, weight = sample(tokens, inputs), sample(tokens, outputs), sample(outputs, inputs)
    launched = []

    def recorded(kernel, grid, like, *args, **options):
        launched.append((kernel, args))
        launch(kernel, grid, like, *args, **options)

    launch = product_module.launch
    monkeypatch.setattr(product_module, "launch", recorded)
    packed, scale = ops.compress(x, fmt, 8, 16, True, "nearest", 4)
    assert packed.stride(0) == 1 and packed.stride(1) % 16 == 0 and not launched
    settings = (fmt, inputs, 8, 16, True, "nearest", 7, torch.float32)
    expected = ops.grad_weight(g, packed, scale, *settings)
    both = ops.grad_both(
        g, weight, packed, scale, 8, fmt, 8, 16, True, True, "nearest", 4, torch.float32, torch.float32
    )
    assert torch.equal(both[1], expected)
    assert [kernel for kernel, _ in launched] == [product_module.product_kernel] * 3
    for _, args in (launched[0], launched[2]):
        assert packed.data_ptr() in (args[0].data_ptr(), args[1].data_ptr())
    for other in (packed.contiguous(), torch.cat((packed[:1], packed))[1:], torch.stack((packed, packed), 2)[..., 0]):
        launched.clear()
        assert other.stride(0) != 1 and torch.equal(ops.grad_weight(g, other, scale, *settings), expected)
        assert [kernel for kernel, _ in launched] == [product_module.transpose_kernel, product_module.product_kernel]


@pytest.mark.parametrize("fmt", ops.FORMATS)
def test_kept_layout_is_what_the_fake_says(monkeypatch, fmt):
    """torch.compile plans with the fake's strides; float64 and empty inputs take the torch path's layout."""
    monkeypatch.setattr(operators, "backend_for", lambda _: triton)
    for x in (sample(70, 51), sample(70, 51).double(), torch.zeros(0, 51)):
        torch.library.opcheck(ops.compress, (x, fmt, 8, 16, True, "nearest", 0))


def test_gradients_stay_non_finite(monkeypatch):
    """A GradScaler must see an infinite g in every gradient that depends on it."""
    monkeypatch.setattr(operators, "backend_for", lambda _: triton)
    x, g, weight = sample(33, 32), sample(33, 32), sample(32, 32)
    g[4, 6] = float("inf")
    for fmt in ops.FORMATS:
        packed, scale = ops.compress(x, fmt, 8, 16, True, "nearest", 0)
        grad_x, grad_w = ops.grad_both(
            g, weight, packed, scale, 8, fmt, 8, 16, True, True, "nearest", 0, torch.float32, torch.float32
        )
        assert not grad_x[4].isfinite().any() and grad_x[:4].isfinite().all()
        assert not grad_w[6].isfinite().any() and grad_w[:6].isfinite().all()


def test_float64_takes_the_torch_path():
    x = sample(20, 33).double()
    q, scale = triton.hadamard_quantize(x, 8, 1, 16, True)
    expected = reference.hadamard_quantize(x, 8, 1, 16, True)
    assert scale.dtype == torch.float64 and torch.equal(q, expected[0]) and torch.equal(scale, expected[1])

"""The CPU backend against the reference: the same integers and scales, bit for bit, and the same products."""

import logging
import os
import random
import subprocess
import sys

import pytest
import torch

from hot_hf.ops import reference
from hot_hf.ops.cpu import BACKEND as cpu
from hot_hf.ops.cpu import _quantize, build, products, workspace

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SIZES = (1, 3, 7, 15, 16, 17, 33, 64, 100, 257)

needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal types, shapes and values; NaN equals NaN."""
    return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def assert_pairs(fused: tuple, expected: tuple) -> None:
    assert same(fused[0], expected[0]), "integers differ"
    assert same(fused[1], expected[1]), "scales differ"


def matrix(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Random values in a random layout, sometimes with zero, tiny or non-finite entries."""
    x = torch.randn(rows, columns) * random.choice([1, 1e-4, 100])
    fault = random.random()
    if fault < 0.15:
        x[random.randrange(rows)] = 0
        x[:, random.randrange(columns)] = 0
    elif fault < 0.25:
        x[random.randrange(rows), random.randrange(columns)] = random.choice([torch.nan, torch.inf, -torch.inf])
    elif fault < 0.35:
        x *= 1e-37  # around SMALLEST_ABSMAX
    x = x.to(dtype)
    layout = random.choice(["contiguous", "transposed", "strided", "offset", "stride 0", "all stride 0", "fewer rows"])
    if layout == "transposed":
        return x.t().contiguous().t()
    if layout == "strided":
        return x.repeat_interleave(2, 1)[:, ::2]
    if layout == "offset":
        return torch.nn.functional.pad(x, (3, 2))[:, 3:-2]
    if layout == "stride 0":
        return x[:1].expand(rows, columns)
    if layout == "all stride 0":
        return x[:1, :1].expand(rows, columns)
    if layout == "fewer rows":
        return x.repeat_interleave(3, 0)[::3]
    return x


def packed(pair: tuple) -> tuple:
    return reference.pack_int4(pair[0]), pair[1]


@needs_compiler
def test_kernels_are_there():
    """Otherwise every test below compares the reference with itself."""
    assert cpu.warm_up()
    x = torch.randn(5, 40)
    assert _quantize(x, 8, 1, 16, True, "nearest", 0) is not None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounding", reference.ROUNDINGS)
def test_quantizers_bit_for_bit(dtype, rounding):
    """C01, C04, C06, C11: every quantizer, any size, layout and special value."""
    for _ in range(12):
        rows, columns = random.choice(SIZES), random.choice(SIZES)
        x = matrix(rows, columns, dtype)
        bits, dim, per_slice = random.choice([4, 8]), random.choice([0, 1]), random.choice([True, False])
        block, rank = random.choice(reference.BLOCK_SIZES), random.randint(1, 16)
        tail = (per_slice, rounding, random.getrandbits(62))
        assert_pairs(
            cpu.hadamard_quantize(x, bits, dim, block, *tail), reference.hadamard_quantize(x, bits, dim, block, *tail)
        )
        assert_pairs(cpu.project_quantize(x, bits, rank, *tail), reference.project_quantize(x, bits, rank, *tail))
        token_scale = torch.rand(rows, dtype=reference.compute_dtype(x))
        assert_pairs(cpu.fold_quantize(x, token_scale, *tail), reference.fold_quantize(x, token_scale, *tail))
        assert_pairs(
            cpu.hadamard_quantize_packed(x, block, *tail),
            packed(reference.hadamard_quantize(x, 4, 1, block, *tail)),
        )
        assert_pairs(cpu.project_quantize_packed(x, rank, *tail), packed(reference.project_quantize(x, 4, rank, *tail)))


@pytest.fixture(params=["AMX tiles", "torch"])
def path(request, monkeypatch):
    """Both ways to multiply, where this machine has them."""
    tiles = request.param == "AMX tiles"
    if tiles and not products.has_amx():
        pytest.skip("no AMX")
    monkeypatch.setattr(products, "has_amx", lambda: tiles)


def operand(rows: int, columns: int) -> torch.Tensor:
    """int8 in a random layout."""
    t = torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
    layout = random.choice(["rows", "columns", "wide rows", "strided", "one row"])
    if layout == "columns":
        return t.t().contiguous().t()
    if layout == "wide rows":
        return torch.nn.functional.pad(t, (3, 70), value=99)[:, 3:-70]
    if layout == "strided":
        return t.repeat_interleave(2, 1)[:, ::2]
    if layout == "one row":
        return t[:1].expand(rows, columns)
    return t


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_bit_for_bit(dtype, path):
    """C06: scales, the transform of the result and its rounding to the output type, whatever the sizes and layouts."""
    for _ in range(16):
        m, k, n = (random.choice((*SIZES, 289, 530, 1100)) for _ in range(3))
        a, b = operand(m, k), operand(k, n)
        a_scale = random.choice([torch.rand(m), torch.rand(1)])
        b_scale = random.choice([torch.rand(n), torch.rand(1), None])
        if random.random() < 0.2:
            a_scale[0] = torch.nan
        assert same(
            cpu.scaled_product(a, b, a_scale, b_scale, dtype), reference.scaled_product(a, b, a_scale, b_scale, dtype)
        )
        block = random.choice(reference.BLOCK_SIZES[1:])
        b = operand(k, reference.padded(n, block))
        product = reference.scaled_product(a, b, a_scale, None, torch.float32)
        expected = reference.hadamard(product, block)[:, :n].to(dtype)
        assert same(products.scaled_product_hadamard(a, b, a_scale, block, n, dtype), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_products_bit_for_bit(dtype, path):
    """The right operand in 4 bits, widened on the way."""
    for _ in range(16):
        m, k, n = (random.choice((*SIZES, 289, 530)) for _ in range(3))
        block = random.choice([1, *reference.BLOCK_SIZES])
        a, b = operand(m, k), torch.randint(-7, 8, (k, reference.padded(n, block)), dtype=torch.int8)
        a_scale, b_scale = torch.rand(m), torch.rand(n) if block == 1 else None
        expected = reference.scaled_product(a, b, a_scale, b_scale, torch.float32)
        expected = (reference.hadamard(expected, block) if block > 1 else expected)[:, :n].to(dtype)
        packed = reference.pack_int4(b)
        if random.random() < 0.3:
            packed = packed.t().contiguous().t()
        assert same(cpu.packed_product(a, packed, a_scale, b_scale, n, block, dtype), expected)


def test_largest_sum(path):
    """131,072 times 127 * 127, the longest contraction that is not split, still fits; a longer one is split."""
    for depth in (reference.MAX_CONTRACTION, reference.MAX_CONTRACTION + 65):
        a = torch.full((3, depth), 127, dtype=torch.int8)
        product = cpu.scaled_product(a, -a.t(), torch.ones(1), None, torch.float32)
        assert (product == -float(depth * 127 * 127)).all()


def test_tiles_are_used():
    """On a machine that has them; torch's product is called only where they are switched off."""
    if "amx_int8" not in build._cpu_flags() or not cpu.warm_up():
        pytest.skip("no AMX")
    code = (
        "import torch; from hot_hf.ops.cpu import BACKEND as cpu\n"
        "torch._int_mm = lambda *a, **k: exit('torch._int_mm was called')\n"
        "a = torch.ones(64, 64, dtype=torch.int8)\n"
        "cpu.scaled_product(a, a, torch.ones(1), None, torch.float32)"
    )
    assert products.has_amx()
    assert "torch._int_mm was called" not in run_python(code)
    with pytest.raises(AssertionError, match="_int_mm was called"):
        run_python(code, HOT_HF_CPU_AMX="0")


def test_products_in_slices(monkeypatch):
    """The int32 scratch shorter than the result: the seams must not show."""
    monkeypatch.setattr(products, "has_amx", lambda: False)
    monkeypatch.setattr(products, "SCRATCH_BYTES", 4 * 48 * 7)
    a, b = torch.randint(-127, 128, (33, 50), dtype=torch.int8), torch.randint(-127, 128, (50, 48), dtype=torch.int8)
    a_scale, b_scale = torch.rand(33), torch.rand(48)
    expected = reference.scaled_product(a, b, a_scale, b_scale, torch.float32)
    assert same(cpu.scaled_product(a, b, a_scale, b_scale, torch.float32), expected)


def test_large_enough_for_threads():
    """Beyond the 16K elements below which one thread works alone; twice, since threads must not race."""
    x = torch.randn(700, 333)
    for per_slice in (True, False):
        for dim in (0, 1):
            expected = reference.hadamard_quantize(x, 8, dim, 32, per_slice, "stochastic", 3)
            for _ in range(2):
                assert_pairs(cpu.hadamard_quantize(x, 8, dim, 32, per_slice, "stochastic", 3), expected)


@pytest.mark.parametrize("columns", [1, 2, 7, 16, 100, 1000])
def test_unpack_int4(columns):
    p = torch.randint(0, 256, (random.choice(SIZES), (columns + 1) // 2), dtype=torch.uint8)
    assert same(cpu.unpack_int4(p, columns), reference.unpack_int4(p, columns))


@pytest.mark.parametrize("shape", [(0, 32), (32, 0), (0, 0)])
def test_empty(shape):
    """C36"""
    x = torch.empty(shape)
    assert_pairs(cpu.hadamard_quantize(x, 8, 1, 16, True), reference.hadamard_quantize(x, 8, 1, 16, True))
    assert (
        cpu.scaled_product(x.to(torch.int8), x.to(torch.int8).t(), torch.ones(1), None, x.dtype).shape
        == (shape[0],) * 2
    )


def test_ties_round_to_even():
    """A scale of exactly 1 leaves halves: 0.5 to 0, 1.5 to 2, -2.5 to -2."""
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.0]])
    q, scale = cpu.hadamard_quantize(x, 8, 1, 1, True)
    assert q.tolist() == [[127, 0, 2, 2, 0, -2, -2, 0]] and scale.tolist() == [1.0]


def test_inference_mode_then_training():
    """C39: scratch memory made in inference mode must serve training afterwards."""
    code = (
        "import torch; from hot_hf.ops.cpu import BACKEND as cpu\n"
        "a, s = torch.ones(4, 8, dtype=torch.int8), torch.ones(1)\n"
        "with torch.inference_mode(): cpu.scaled_product(a, a.t(), s, None, torch.float32)\n"
        "assert (cpu.scaled_product(a, a.t(), s, None, torch.float32) == 8).all()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def run_python(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env={**os.environ, **environment}
    )
    assert result.returncode == 0, result.stderr
    return result.stderr


@needs_compiler
def test_built_once(tmp_path):
    """The first process says that it builds; the second finds the file and says nothing. Importing builds nothing."""
    use = "from hot_hf.ops.cpu import BACKEND as cpu; assert cpu.warm_up()"
    assert run_python("import hot_hf", HOT_HF_CACHE=str(tmp_path)) == "" and not list(tmp_path.iterdir())
    assert run_python(use, HOT_HF_CACHE=str(tmp_path)).count("built the CPU kernels") == 1
    assert run_python(use, HOT_HF_CACHE=str(tmp_path)) == ""
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"CXX": "no-such-compiler"}, "no C++ compiler"),
        ({"CXX": "false"}, "failed"),
        ({"HOT_HF_CPU_KERNELS": "0"}, "HOT_HF_CPU_KERNELS=0"),
    ],
)
def test_without_a_compiler(tmp_path, environment, reason):
    """One line in the log, and the same gradients from the reference."""
    code = (
        "import torch; from hot_hf import ops; from hot_hf.ops.cpu import BACKEND as cpu\n"
        "x, g, w = torch.randn(20, 40), torch.randn(20, 24), torch.randn(24, 40)\n"
        "p, s = ops.compress(x, 'ht_int4', 8, 16, True, 'nearest', 0)\n"
        "y = ops.grad_weight(g, p, s, 'ht_int4', 40, 8, 16, True, 'nearest', 0, torch.float32)\n"
        "assert not cpu.warm_up() and torch.nn.functional.cosine_similarity(y.ravel(), (g.T @ x).ravel(), 0) > 0.95"
    )
    log = run_python(code, HOT_HF_CACHE=str(tmp_path), **environment)
    assert log.count("hot_hf:") == 1 and reason in log


def test_inexact_int_mm_is_not_used(monkeypatch, caplog):
    """A processor whose int8 product saturates gets the exact one."""
    monkeypatch.setattr(products, "has_amx", lambda: False)
    monkeypatch.setattr(products, "int_mm_serves", products.int_mm_serves.__wrapped__)  # asked anew
    monkeypatch.setattr(products, "int_mm_is_exact", lambda: False)
    monkeypatch.setattr(torch, "_int_mm", lambda *a, **k: pytest.fail("torch._int_mm was called"))
    a = torch.full((5, 300), 127, dtype=torch.int8)
    with caplog.at_level(logging.WARNING):
        assert (cpu.scaled_product(a, a.t(), torch.ones(1), None, torch.float32) == 127 * 127 * 300).all()


@pytest.mark.parametrize("serves", [True, False])
def test_products_are_the_same_by_torch_and_in_float32(monkeypatch, serves):
    """Where torch's int8 product is slow its sums come from float32, bit for bit: extreme values, long contractions,
    rows in several slices."""
    monkeypatch.setattr(products, "has_amx", lambda: False)
    monkeypatch.setattr(products, "int_mm_serves", lambda: serves)
    monkeypatch.setattr(products, "SCRATCH_BYTES", 4 * 64 * 7)
    for _ in range(6):
        m, k, n = random.choice([1, 5, 33]), random.choice([1, 64, 3000]), 64
        a = torch.randint(-127, 128, (m, k), dtype=torch.int8)
        b = torch.randint(-127, 128, (k, n), dtype=torch.int8)
        a[0], b[:, 0] = 127, random.choice([-127, 127])
        scales = torch.rand(m), torch.rand(n)
        for dtype in DTYPES:
            found = cpu.scaled_product(a, b, *scales, dtype)
            assert torch.equal(found, reference.scaled_product(a, b, *scales, dtype))
        found = products.scaled_product_hadamard(a, b, scales[0], 16, 50, torch.float32)
        wanted = reference.hadamard(reference.scaled_product(a, b, scales[0], None, torch.float32), 16)[:, :50]
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-3)  # the transform adds in another order


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounding", reference.ROUNDINGS)
def test_both_quantizers_of_g_at_once(dtype, rounding):
    """One pass for grad_input and grad_weight gives what two give."""
    for _ in range(8):
        rows, columns = random.choice(SIZES), random.choice(SIZES)
        g = matrix(rows, columns, dtype)
        bits, block, per_feature = random.choice([4, 8]), random.choice(reference.BLOCK_SIZES), random.random() < 0.5
        seeds = (random.getrandbits(62), random.getrandbits(62))
        per_token = random.random() < 0.8
        for rank, token_scale in ((random.randint(1, 16), None), (None, torch.rand(rows))):
            along = (rank, token_scale, per_feature)
            by_row, by_column = cpu.quantize_both(g, bits, block, per_token, *along, rounding, seeds)
            assert_pairs(by_row, reference.hadamard_quantize(g, bits, 1, block, per_token, rounding, seeds[0]))
            if rank is None:
                expected = reference.fold_quantize(g, token_scale, per_feature, rounding, seeds[1])
            else:
                expected = reference.project_quantize(g, 8, rank, per_feature, rounding, seeds[1])
            assert_pairs(by_column, expected)


@needs_compiler
def test_a_refused_call_is_an_error():
    """Its memory was never written: also under python -O, which drops asserts."""
    with pytest.raises(RuntimeError, match=r"refused its arguments \(torch.float32, 24\)"):
        _quantize(torch.randn(4, 48), 8, 1, 24, True, "nearest", 0)


def test_temporaries_are_not_overwritten():
    """Memory is taken again only when no view of it is left, on whatever object."""
    first = workspace.temporary(1024, 1024)
    view = first.t()[5:]
    address = first.data_ptr()
    del first
    assert workspace.temporary(1024, 1024).data_ptr() != address
    del view
    found = [workspace.temporary(1024, 1024) for _ in range(4)]
    assert len({t.data_ptr() for t in found}) == 4
    if workspace._use_count is not None:
        assert address in {t.data_ptr() for t in found}


def test_workspace_is_bounded():
    kept = [workspace.temporary(1 << 10, (4 << 10) + i) for i in range(64)]
    assert len({t.data_ptr() for t in kept}) == 64
    assert sum(b.numel() for b in workspace._pool.buffers) <= workspace.POOL_BYTES


@needs_compiler
@pytest.mark.parametrize("kernel", ["product", "epilogue"])
def test_nothing_is_written_beside_a_result(kernel):
    """Large results are asked for ahead of the writes, in chunks that begin and end inside a page; rows end inside a
    vector. 6.1 MB: beyond the 4 MB from which it is done."""
    if kernel == "product" and not products.has_amx():
        pytest.skip("no AMX")
    rows, depth, columns, beside = 1501, 16, 1009, 333
    a = torch.randint(-127, 128, (rows, depth), dtype=torch.int8)
    b = torch.randint(-127, 128, (depth, columns), dtype=torch.int8)
    a_scale, b_scale = torch.rand(rows), torch.rand(columns)
    memory = torch.full((rows * columns + 2 * beside,), 7.0)
    scales = (a_scale.data_ptr(), 1, b_scale.data_ptr(), 1, 1, 1.0, memory.data_ptr() + 4 * beside, 0, columns)
    kernels = build.library()
    if kernel == "epilogue":
        sums = reference.exact_int_product(a, b)
        assert not kernels.hot_hf_epilogue(sums.data_ptr(), rows, columns, *scales, 2)
    else:
        scratch = torch.empty(kernels.hot_hf_product_bytes(rows, columns, depth, 2), dtype=torch.uint8)
        operands = (a.data_ptr(), *a.stride(), b.data_ptr(), *b.stride(), 0, rows, columns, depth)
        assert not kernels.hot_hf_product(*operands, *scales, scratch.data_ptr(), 2)
    expected = reference.scaled_product(a, b, a_scale, b_scale, torch.float32)
    assert same(memory[beside:-beside].view(rows, columns), expected)
    assert (memory[:beside] == 7).all() and (memory[-beside:] == 7).all()

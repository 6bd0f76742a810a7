"""Kernels compiled ahead of time for GPUs that are not here; benchmarks/kernel_report.py does it for every type."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="compiles the Triton kernels")

import ahead

from hot_hf.ops.triton import tuning

# These hold everything that the other cases have, and more: three kinds of products, their copy, all quantizers.
EVERYTHING = (
    "rows int4, stochastic",
    "tokens int4, stochastic",
    "tiles both, project, stochastic",
    "product, tail",
    "product, int4 along k",
    "product, int4 rows, copied",
    "product, int4 rows, transform, tail",
)
OTHERS = [name for name in ahead.CASES if name not in EVERYTHING]
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kernel_report.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("kernel_report", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(script, name, dtype, target):
    compiled = ahead.compile_case(name, dtype, target)
    assert compiled
    for one in compiled:
        assert not list(script.problems(one, target)), f"{name} for {target}, {dtype}"
        assert one.registers > 0 and "tt.addptr" in one.asm["ttir"]
        assert "atomic" not in one.asm["ttir"]  # C64
    return compiled


@pytest.mark.parametrize("target", ahead.TARGETS, ids=str)
@pytest.mark.parametrize("name", EVERYTHING)
def test_every_kernel_type_and_target(script, target, name):
    """C63: sm_80 and later, gfx942: no spills, shared memory within the limit, 64-bit offsets, and in products the
    target's own int8 matrix instruction, for each of the three types."""
    for dtype in ahead.DTYPES:
        compiled = check(script, name, dtype, target)
        assert not name.startswith("product") or any(map(ahead.is_product, compiled))
        assert all(one.matrix_instructions for one in compiled if ahead.is_product(one))


def test_every_kernel_is_among_them():
    """Whatever the backend launches in any case is launched in those that are compiled for everything."""
    launched = {}
    for name, (_, call) in ahead.CASES.items():
        with ahead.recording() as launches:
            call(tuning.FAMILIES["sm_90"], torch.bfloat16)
        launched[name] = {one.kernel.__name__ for one in launches}
    assert set().union(*launched.values()) == set().union(*(launched[name] for name in EVERYTHING))
    assert len(set().union(*launched.values())) == 6


@pytest.mark.parametrize("name", OTHERS)
def test_other_cases(script, name, seed):
    """Every other case for one target and type, other ones each time; benchmarks/kernel_report.py takes all of them."""
    position = seed + OTHERS.index(name)
    check(script, name, ahead.DTYPES[position % 3], ahead.TARGETS[position % len(ahead.TARGETS)])


def test_the_committed_page_is_what_the_compilers_say(script, seed):
    """One case and target, other ones each time: registers and shared memory as docs/results/kernels.md has them."""
    page = script.OUTPUT.read_text()
    if f"with Triton {ahead.triton.__version__}." not in page:
        pytest.skip("the page is of another Triton")
    name = list(ahead.CASES)[seed % len(ahead.CASES)]
    target = ahead.TARGETS[seed // 64 % len(ahead.TARGETS)]
    column = 4 + ahead.TARGETS.index(target)
    by_kernel = {}
    for dtype in ahead.DTYPES:
        for one in ahead.compile_case(name, dtype, target):
            by_kernel.setdefault(one.kernel.removesuffix("_kernel"), []).append(one)
    for kernel, found in by_kernel.items():
        (row,) = (line for line in page.splitlines() if line.startswith(f"| {name} | `{kernel}` |"))
        numbers = f"{max(one.registers for one in found)}, {max(one.shared for one in found) / 1024:.1f}"
        assert row.split(" | ")[column - 1].removesuffix(" |") == numbers, f"{name}, {kernel}, {target}"


def test_the_second_read_goes_back_over_what_the_first_read_last():
    """The second launch counts tiles from the end; what is read again should stay in the caches, then leave them."""
    maxima, quantize = ahead.compile_case("tiles both, fold", torch.bfloat16, ("cuda", 90))
    assert "tt.get_num_programs x" not in maxima.asm["ttir"] and "tt.get_num_programs x" in quantize.asm["ttir"]
    for compiled, policy in ((maxima, "evict_last"), (quantize, "evict_first")):
        assert set(re.findall(r"ld\.global\.L1::(\w+)\.L2::cache_hint\.v4", compiled.asm["code"])) == {policy}


def test_the_checks_can_fail(script):
    """A kernel with what the report forbids is reported."""
    good = ahead.compile_case("product, int4 along k", torch.bfloat16, ("cuda", 80))[0]
    bad = ahead.Compiled(good.kernel, 255, 64, 1 << 20, (), ("%7 = tt.addptr",), 3, 2, {})
    assert len(list(script.problems(bad, ("cuda", 80)))) == 6
    ttir = "%7 = tt.addptr %5, %6 : tensor<128x!tt.ptr<i32>>, tensor<128xi32> loc(#loc34)"
    assert ahead._narrow_offsets(ttir) == (ttir,)
    assert not ahead._narrow_offsets(ttir.replace("tensor<128xi32>", "tensor<128xi64>"))


@pytest.mark.parametrize("arch", (70, 75))
def test_older_architectures_are_refused(arch):
    """C63: with a reason, before anything is compiled."""
    with pytest.raises(ValueError, match=r"below 8\.0"):
        ahead.compile_case("product", torch.float16, ("cuda", arch))


def test_families():
    assert tuning.family_of_capability((8, 9)).name == "sm_86"
    assert tuning.family_of_capability((12, 1)).name == "sm_86"
    assert tuning.family_of_capability((10, 3)).name == "sm_100"
    assert tuning.family_of_arch("hip", "gfx942:sramecc+:xnack-").name == "gfx942"
    with pytest.raises(ValueError, match="gfx90a"):
        tuning.family_of_arch("hip", "gfx90a")
    for family in tuning.FAMILIES.values():
        assert family.reason and family.tile[0] % 16 == 0


def test_tokens_per_program():
    """As many as two programs per processor keep in the L2 cache with what they write, a quarter of it: an H200's 50 MB
    / 132 / 2.5 = 158,875 bytes each."""
    meta, family = torch.device("meta"), tuning.FAMILIES["sm_90"]
    for features, size, expected in ((768, 2, 32), (3072, 2, 16), (4096, 2, 16), (4096, 4, 8), (14336, 2, 8)):
        tokens = tuning.tokens_per_program(family, meta, features * size)
        assert tokens == expected
        assert tokens == 8 or tokens * features * size <= 158_875
        assert tokens == 32 or 2 * tokens * features * size > 158_875


def test_autotuning_does_not_repeat_itself_for_other_lengths(monkeypatch):
    """C64: one timing per bucket of sizes; off unless asked for."""
    monkeypatch.setattr(tuning, "_chosen", {})
    family, timed = tuning.FAMILIES["sm_90"], []

    def time(tile):
        timed.append(tile)
        return tile.bm + tile.bn  # the small one wins

    def choose(tokens, timer=time):
        return tuning.product_tile(family, tokens, 4096, 4096, "", 1, 132, timer)

    monkeypatch.delenv("HOT_HF_AUTOTUNE", raising=False)
    assert choose(5000) == family.product and not timed
    monkeypatch.setenv("HOT_HF_AUTOTUNE", "1")
    first = choose(5000)
    count = len(timed)
    assert first == family.small and count > 1
    for tokens in (4097, 6001, 8192):
        assert choose(tokens) == first
    assert len(timed) == count, "lengths of one bucket were timed again"
    choose(8193)
    assert len(timed) == 2 * count


def test_sequence_lengths_share_their_compilations():
    """C64: a kernel is compiled for whole tiles, tails that divide by 16 and other tails, never for a length."""
    family, width = tuning.FAMILIES["sm_90"], 1024
    seen = {}
    for tokens in (4096, 4112, 8192, 4097, 5001, 6003, 7777):
        with ahead.recording() as launches:
            g = torch.empty(tokens, width, dtype=torch.bfloat16, device="meta")
            scale = torch.empty(tokens, device="meta")
            ahead.quantize_rows(g, family, 8, 16, False, "stochastic", 2**40 + tokens)
            ahead.quantize_tokens(g, family, 4, 16, True, "stochastic", 2**40 + tokens)
            jobs = ahead.AlongFeatures(8, 16, True, False, 1), ahead.AlongTokens(8, True, 2, token_scale=scale)
            (q, _), (q_tokens, _) = ahead.quantize_tiles(g, family, *jobs, "nearest")
            out = torch.empty(width, width, dtype=torch.bfloat16, device="meta")
            ahead.product(q_tokens.t(), q_tokens, None, None, out, family)
            ahead.product(q, torch.empty(width, width, dtype=torch.int8, device="meta").t(), None, None, g, family)
        for number, launched in enumerate(launches):
            seen.setdefault((number, launched.kernel.__name__), set()).add(repr(ahead._signature(launched)))
    assert len(seen) == 6
    assert max(map(len, seen.values())) <= 3, {key: len(value) for key, value in seen.items()}

"""benchmarks/bench_gpu.py without a GPU, and the counts of benchmarks/roofline.py against real tensors."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hot_hf import HOTConfig, ops

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


def load(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


roofline = load("roofline")


def run(*arguments):
    return subprocess.run(
        [sys.executable, str(SCRIPTS / "bench_gpu.py"), *map(str, arguments)], capture_output=True, text=True
    )


def test_dry_run_goes_through_every_measurement(tmp_path):
    """The kernels' values are checked in the interpreter; every table has its rows."""
    pytest.importorskip("triton")
    done = run("--dry-run", "--output", tmp_path / "dry.json")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "dry.json").read_text())
    assert result["dry"] and result["wrong"] == []
    assert {row["variant"] for row in result["linear"]} >= {"bfloat16", "float32", "hot default", "hot fast"}
    assert {row["step"] for row in result["kernels"]} == {"x", "g", "W", "grad_input", "grad_weight"}
    losses = [row["first_loss"] for row in result["llama"]]
    assert losses and all(loss == losses[0] for loss in losses), "the forward is exact"
    refused = run("--page", tmp_path / "dry.json", "--page-output", tmp_path / "gpu.md")
    assert refused.returncode == 2 and "dry run" in refused.stderr


def test_the_page_says_that_nothing_was_measured(tmp_path):
    done = run("--page", "--page-output", tmp_path / "gpu.md")
    assert done.returncode == 0, done.stderr
    assert "Not measured: no GPU was at hand" in (tmp_path / "gpu.md").read_text()


def test_goals_are_judged_layer_by_layer(tmp_path):
    """Speedups against the same layer's bfloat16, shares of the copy bandwidth for the quantizers alone."""
    bench = load("bench_gpu")

    def linear(layer, variant, backward, step):
        return {"layer": layer, "variant": variant, "backward_ms": backward, "step_ms": step, "peak_bytes": 0}

    def kernel(step, share):
        return {"layer": "a", "config": "fast", "step": step, "ms": 1.0, "share": share, "bound": "memory"}

    result = {
        "linear": [
            *(linear("a", *row) for row in (("bfloat16", 8.0, 12.0), ("float32", 1.0, 1.0), ("hot fast", 4.0, 10.0))),
            *(linear("b", *row) for row in (("bfloat16", 3.0, 4.0), ("hot fast", 2.0, 3.0))),
        ],
        "kernels": [kernel(*row) for row in (("x", 0.9), ("g", 0.7), ("W", 0.6), ("grad_input", 0.1))],
    }
    assert bench.goals(result)[2:] == [
        "| backward at least 1.6 | fast | 1.50 | 2.00 | 1 of 2 |",
        "| forward + backward at least 1.3 | fast | 1.20 | 1.33 | 1 of 2 |",
        "| quantizers at least 0.7 | fast | 0.60 | 0.90 | 2 of 3 |",
    ]


@pytest.mark.parametrize("fmt", ops.FORMATS)
@pytest.mark.parametrize("bits", (4, 8))
def test_roofline_counts_the_bytes_of_real_tensors(fmt, bits):
    """What must move: every input once, every output once, in bfloat16, scales left out (4 bytes per row)."""
    n, i, o = (16 * int(size) for size in torch.randint(4, 9, (3,)))
    config = HOTConfig(activation_format=fmt, grad_input_bits=bits)
    x, weight = torch.randn(n, i).bfloat16(), torch.randn(o, i).bfloat16()
    packed = ops.compress(x, fmt, config.rank, 16, True, "nearest", 0)[0]
    counted = {step.name.split(":")[0]: step for step in roofline.steps(n, i, o, config)}
    assert counted["x"].must == x.nbytes + packed.nbytes
    depth = packed.shape[0]
    g_int, w_int = n * o * bits / 8, o * i * bits / 8
    assert counted["grad_input"].must == g_int + w_int + x.nbytes
    assert counted["grad_weight"].must == depth * o + packed.nbytes + weight.nbytes
    assert counted["grad_weight"].operations == 2 * depth * o * i
    assert all(step.moves >= step.must for step in counted.values())


def test_ceilings_without_quantizers():
    """Products alone: 2 x at full depth, 2.67 x with half of it, at equal shares of the datasheet."""
    free = roofline.Device("no memory traffic", 1e30, 989.5e12, 1979e12, 989.5e12)
    backward, both = roofline.speedups(8192, 4096, 4096, HOTConfig(), free, free.int8)
    assert (backward, both) == (pytest.approx(2.0), pytest.approx(1.5))
    backward, _ = roofline.speedups(8192, 4096, 4096, HOTConfig.fast(), free, free.int8)
    assert backward == pytest.approx(8 / 3)


def test_what_a_second_pass_finds():
    """``roofline.found`` against a cache of 1,000 lines, oldest out first, gone through line by line."""
    lines, between, per_read = 1000, int(torch.randint(0, 300, ())), int(torch.randint(0, 3, ()))
    for read in (100, 900, 5000):
        cache = dict.fromkeys([*range(read), *range(-between, 0)][-lines:])
        hits, fresh = 0, iter(range(10**6, 10**7))
        for line in reversed(range(read)):
            hits += line in cache
            cache.pop(line, None)
            for used in (line, *(next(fresh) for _ in range(per_read))):
                cache[used] = None
            while len(cache) > lines:
                del cache[next(iter(cache))]
        assert hits == pytest.approx(roofline.found(read, per_read * read, between, lines), abs=2)


def test_no_way_over_g_moves_less_than_the_second_read():
    """But for the row maxima, which a barrier needs not: it fits where the second read comes from L2 altogether."""
    for _, n, _, o in roofline.SHAPES:
        for config in roofline.CONFIGS.values():
            ways = roofline.ways_over_g(n, o, config)
            assert ways.g == 2 * n * o and ways.second_read < ways.float32
            if ways.barrier is not None:
                row_maxima = 2 * 4 * n * (o // 64)
                assert ways.cached == ways.g and ways.second_read == ways.barrier + row_maxima
            else:
                assert ways.cached < ways.g or ways.g > roofline.H200.on_chip


def test_tokens_per_program_are_those_of_the_kernels():
    pytest.importorskip("triton")
    from hot_hf.ops.triton import tuning

    for features in range(16, 20_000, 368):
        expected = tuning.tokens_per_program(tuning.FAMILIES["sm_90"], torch.device("meta"), 2 * features)
        assert roofline.tokens_per_program(roofline.H200, 2 * features) == expected


def test_the_committed_page_is_what_the_script_writes():
    page = SCRIPTS.parent / "docs" / "results" / "roofline.md"
    assert page.read_text() == roofline.page(roofline.H200)

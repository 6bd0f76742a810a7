"""Compile every Triton kernel for every target, without a GPU, and write docs/results/kernels.md.

    python benchmarks/kernel_report.py                # all types and targets: about ten minutes on one core
    python benchmarks/kernel_report.py --dtypes bfloat16 --output /tmp/kernels.md

Exits with 1 if a product lacks its int8 matrix instruction, a kernel spills registers, takes more shared memory than
its architecture has, adds an offset narrower than 64 bit to a pointer, fuses a multiplication with an addition, or
stores single bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import ahead
import torch
import triton

from hot_hf.ops.triton import tuning

OUTPUT = Path(__file__).parents[1] / "docs" / "results" / "kernels.md"
REFUSED = (("cuda", 70), ("cuda", 75))


def target_name(target: tuple[str, int | str]) -> str:
    return target[1] if target[0] == "hip" else f"sm_{target[1]}"


def problems(compiled: ahead.Compiled, target: tuple[str, int | str]) -> Iterator[str]:
    """What must not be: empty for a good kernel."""
    limit = tuning.family_of_arch(*target).shared_limit
    if ahead.is_product(compiled) and not compiled.matrix_instructions:
        yield "no int8 matrix instruction"
    if compiled.spills:
        yield f"{compiled.spills} bytes spilled"
    if compiled.shared > limit:
        yield f"{compiled.shared} bytes of shared memory, {limit} available"
    if compiled.narrow_offsets:
        yield f"{len(compiled.narrow_offsets)} offsets below 64 bit"
    if compiled.fused:
        yield f"{compiled.fused} fused multiply-adds"
    if compiled.byte_stores:
        yield f"{compiled.byte_stores} stores of single bytes"


def _one(job: tuple[str, torch.dtype, tuple]) -> tuple[str, torch.dtype, tuple, list[ahead.Compiled]]:
    name, dtype, target = job
    return *job, ahead.compile_case(name, dtype, target)


def compile_all(dtypes: list[torch.dtype], workers: int) -> Iterator[tuple]:
    jobs = [(n, d, t) for t in ahead.TARGETS for d in dtypes for n in ahead.CASES]
    # Spawned, not forked: LLVM and torch have threads by now.
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        for number, result in enumerate(pool.map(_one, jobs), 1):
            print(f"\r{number} of {len(jobs)}", end="", file=sys.stderr, flush=True)
            yield result


def report(results: list[tuple]) -> tuple[str, list[str]]:
    """The page, and every problem found."""
    bad, cells, instructions = [], {}, {}
    dtypes = sorted({str(dtype).removeprefix("torch.") for _, dtype, _, _ in results})
    for name, dtype, target, compiled in results:
        for one in compiled:
            row = (name, one.kernel)
            cells.setdefault(row, {}).setdefault(target, []).append((one.registers, one.spills, one.shared))
            for instruction in one.matrix_instructions:
                instructions.setdefault(target, set()).add(instruction)
            bad += [f"{target_name(target)} {name} {one.kernel} {dtype}: {p}" for p in problems(one, target)]
    lines = [
        "# What the compilers make of the Triton kernels",
        "",
        f"Written by `python benchmarks/kernel_report.py` with Triton {triton.__version__}. Every launch of the",
        "backend is recorded on meta tensors and compiled ahead of time for "
        f"{', '.join(map(target_name, ahead.TARGETS))}, for {', '.join(dtypes)}:",
        f"{sum(len(c) for *_, c in results)} compilations. **None of these kernels has run on a GPU yet**: values are "
        "tested in Triton's interpreter,",
        "speed is not known, and `docs/results/roofline.md` says what the hardware allows.",
        "",
        "Checked in each: no register spills (`ptxas -v`; the AMD kernel metadata), shared memory within the limit,",
        "every pointer offset 64 bit in the TTIR, no fused multiply-add in the PTX, no store of a single byte, and for",
        "products the int8 matrix instruction below.",
        "",
        "## Problems",
        "",
        *([f"- {problem}" for problem in bad] or ["None."]),
        "",
        "## Targets",
        "",
        "| target | matrix instruction of the products | shared memory "
        "| tiles: product / packed / small / small packed (m, n, k, warps, stages) | why |",
        "|---|---|---|---|---|",
    ]
    for target in ahead.TARGETS:
        family = tuning.family_of_arch(*target)
        tiles = " / ".join(
            f"{t.bm}, {t.bn}, {t.bk}, {t.warps}, {t.stages}"
            for t in (family.product, family.packed, family.small, family.small_packed)
        )
        found = "<br>".join(f"`{i}`" for i in sorted(instructions.get(target, ())))
        lines.append(
            f"| {target_name(target)} | {found} | {family.shared_limit // 1024} KiB | {tiles} | {family.reason} |"
        )
    lines += ["", "Refused, and served by plain torch:", ""]
    for target in REFUSED:
        try:
            tuning.family_of_arch(*target)
            bad.append(f"{target_name(target)} was not refused")
        except ValueError as error:
            lines.append(f"- {target_name(target)}: {error}")
    lines += [
        "",
        "## Registers per thread, and shared memory per block in KiB",
        "",
        "The largest over the types. One row per launch; 4,096 tokens and features, unless the row says other.",
        "",
        "| case | kernel | used for | " + " | ".join(map(target_name, ahead.TARGETS)) + " |",
        "|---|---|---|" + "---|" * len(ahead.TARGETS),
    ]
    for (name, kernel), by_target in cells.items():
        values = []
        for target in ahead.TARGETS:
            numbers = by_target.get(target)
            values.append(
                "" if not numbers else f"{max(n[0] for n in numbers)}, {max(n[2] for n in numbers) / 1024:.1f}"
            )
        use = ahead.CASES[name][0]
        lines.append(f"| {name} | `{kernel.removesuffix('_kernel')}` | {use} | {' | '.join(values)} |")
    return "\n".join(lines) + "\n", bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=[str(d).removeprefix("torch.") for d in ahead.DTYPES])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    page, bad = report(list(compile_all([getattr(torch, name) for name in args.dtypes], args.workers)))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(page)
    print(f"{args.output}: {len(bad)} problems")
    for problem in bad:
        print(problem, file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

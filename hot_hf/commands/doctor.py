"""``hot-hf doctor``: what this machine has, which backend serves each device, and whether its results are right.
With ``--tune`` also from which width on it is fast.

Every operator runs on small random tensors on every device, and is compared with the reference on the CPU: the packed
integers must be equal, the gradients too, up to the rounding of their last products.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch

from .. import ops
from ..config import HOTConfig
from ..ops import FORMATS, REFERENCE, dispatch, operators
from ..ops.cpu import BACKEND, products
from . import widths

PACKAGES = ("hot_hf", "torch", "triton", "transformers", "accelerate", "peft")
# The scales multiply exact integers in two float32 products, in any order a backend likes: 2 * 2^-24, twice over.
TOLERANCE = 4 * 2.0**-24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="check only this device, for example cuda:1 (default: the CPU and all others)")
    parser.add_argument(
        "--tune",
        action="store_true",
        help="also measure from which layer width on HOT is faster here, for min_features",
    )
    parser.add_argument("--preset", default="default", help="with --tune: the configuration (default: default)")
    parser.add_argument("--tokens", type=int, default=2048, help="with --tune: rows of a layer's input (default: 2048)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="with --tune")


def devices() -> list[torch.device]:
    """The CPU and every device of the accelerator that torch sees, whatever its kind."""
    found = [torch.device("cpu")]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        found += [torch.device(kind, index) for index in range(torch.accelerator.device_count())]
    return found


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def describe(device: torch.device) -> str:
    """Name and capability of a device, as far as torch tells."""
    if device.type == "cpu":
        return f"{platform.processor() or platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    module = torch.get_device_module(device)
    properties = module.get_device_properties(device) if hasattr(module, "get_device_properties") else None
    return str(properties) if properties is not None else device.type


def allocator() -> str | None:
    """What glibc does with memory that is freed, where training runs on the CPU; None where there is no glibc."""
    if platform.libc_ver()[0] != "glibc":
        return None
    threshold = os.environ.get("MALLOC_MMAP_THRESHOLD_")
    if threshold is None:
        return "glibc keeps freed memory: start with MALLOC_MMAP_THRESHOLD_=65536 (docs/environment.md)"
    return f"glibc returns freed blocks from {threshold} bytes on (MALLOC_MMAP_THRESHOLD_)"


def kernels_for(device: torch.device) -> str:
    """Which kernels serve ``device``, or why none do."""
    if device.type == "cpu":
        if not BACKEND.warm_up():
            return "plain torch instead of kernels: they could not be built (the log says why)"
        if products.has_amx():
            return "compiled kernels, int8 products on AMX tiles"
        if products.int_mm_serves():
            return "compiled kernels, int8 products by torch"
        return "compiled kernels, products in float32: this CPU has no fast int8 product; HOT saves memory and no time"
    reason = dispatch.why_no_kernels(device.type, device.index)
    return "Triton kernels" if reason is None else f"plain torch instead of kernels: {reason}"


def _cases(g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Iterator[tuple]:
    """(name, operator, its arguments) of each check; the first argument's device decides the backend."""
    for bits in (8, 4):
        for per_token in (True, False):
            name = f"grad_input INT{bits} {'per_token' if per_token else 'per_tensor'}"
            yield name, ops.grad_input, g, weight, bits, 16, per_token, "nearest", 0, torch.float32
    for fmt in FORMATS:
        yield f"compress {fmt}", ops.compress, x, fmt, 8, 16, True, "stochastic", 5
        packed, scale = ops.compress.on_backend(REFERENCE, x, fmt, 8, 16, True, "nearest", 0)
        settings = (x.shape[1], 8, 16, True, "nearest", 0, torch.float32)
        yield f"grad_weight {fmt}", ops.grad_weight, g, packed, scale, fmt, *settings
        settings = (8, 16, True, True, "nearest", 0, torch.float32, torch.float32)
        yield f"grad_both {fmt}", ops.grad_both, g, weight, packed, scale, 8, fmt, *settings


def _difference(actual, expected) -> float:
    """Largest difference relative to the largest value; integers that differ count as infinity."""
    if isinstance(expected, tuple):
        return max(_difference(a, e) for a, e in zip(actual, expected, strict=True))
    actual = actual.cpu()
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return float("inf")
    if not expected.is_floating_point():
        return 0.0 if torch.equal(actual, expected) else float("inf")
    difference = ((actual - expected).abs().max() / expected.abs().max()).item()
    return difference if difference == difference else float("inf")


def self_check(device: torch.device, seed: int = 0) -> list[tuple[str, str, str]]:
    """(operator, backend, "ok" or what is wrong) for every operator on ``device``."""
    generator = torch.Generator().manual_seed(seed)
    g, x = (torch.randn(100, features, generator=generator) for features in (96, 80))
    weight = torch.randn(96, 80, generator=generator)
    rows = []
    for name, op, *arguments in _cases(g, x, weight):
        expected = op.on_backend(REFERENCE, *arguments)
        moved = [a.to(device) if isinstance(a, torch.Tensor) else a for a in arguments]
        backend = operators.backend_for(moved[0]).name
        try:
            difference = _difference(op(*moved), expected)
            verdict = "ok" if difference <= TOLERANCE else f"WRONG: off by {difference:.2g}"
        except Exception as error:
            verdict = f"FAILED: {type(error).__name__}: {error}"
        rows.append((name, backend, verdict))
    return rows


def run(args: argparse.Namespace) -> int:
    """Print the report; 1 if an operator gives a wrong result."""
    print(f"python {platform.python_version()} on {platform.platform()}")
    print("  ".join(f"{package} {installed(package)}" for package in PACKAGES))
    try:
        chosen = [torch.device(args.device)] if args.device else devices()
    except RuntimeError as error:
        raise ValueError(f"--device {args.device}: {error}") from None
    bad = 0
    for device in chosen:
        print(f"\n{device}: {describe(device)}\n  {kernels_for(device)}")
        if device.type == "cpu" and (line := allocator()) is not None:
            print(f"  {line}")
        for name, backend, verdict in self_check(device):
            bad += verdict != "ok"
            print(f"  {name:32}{backend:12}{verdict}")
    if len(chosen) == 1 and not args.device:
        print("\nno accelerator: the Triton kernels are not used on this machine")
    print(f"\n{bad} operators give wrong results" if bad else "\nall operators agree with the reference")
    if args.tune:
        if args.tokens < 1:
            raise ValueError(f"--tokens must be at least 1, got {args.tokens}")
        config = HOTConfig.from_preset(args.preset)
        for device in chosen:
            timings = widths.measure_widths(config, args.tokens, getattr(torch, args.dtype), device)
            title = f"{device}: forward and backward of one layer, {args.tokens:,} tokens, {args.dtype}, {args.preset}"
            print("\n" + widths.report(timings, title))
    return 1 if bad else 0

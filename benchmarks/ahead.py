"""Compilation ahead of time, without a GPU: what the compilers make of every kernel for every target.

The launchers run on meta tensors with their launches recorded, so that what is compiled here is what they would launch:
same constants, same tile sizes, same knowledge of strides and alignments.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from hot_hf.ops.triton.features import quantize_rows, quantize_tokens
from hot_hf.ops.triton.launch import Launch, recording
from hot_hf.ops.triton.product import contraction_innermost, product, product_kernel
from hot_hf.ops.triton.tokens import AlongFeatures, AlongTokens, quantize_tiles
from hot_hf.ops.triton.tuning import Family, family_of_arch

TARGETS = (*(("cuda", arch) for arch in (80, 86, 89, 90, 100, 120)), ("hip", "gfx942"))
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# The int8 matrix instruction that each target's product must contain.
MATRIX_INSTRUCTION = {
    80: r"mma\.sync\.aligned\.m16n8k32\.row\.col\.(?:satfinite\.)?s32\.s8\.s8\.s32",
    90: r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.s32\.s8\.s8",
    100: r"tcgen05\.mma\.cta_group::1\.kind::i8",
    "gfx942": r"v_mfma_i32_\d+x\d+x\d+_i8",
}
_TRITON_TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
}


def matrix_instruction(arch: int | str) -> str:
    """The pattern for a target: 86, 89 and 120 have sm_80's instruction."""
    return MATRIX_INSTRUCTION.get(arch, MATRIX_INSTRUCTION[80])


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _rows(columns: int, bits: int, pack: bool, rounding: str) -> Callable:
    return lambda family, dtype: quantize_rows(
        _meta(4096, columns, dtype=dtype), family, bits, 16, pack, rounding, 2**40
    )


def _tokens(columns: int, bits: int, rounding: str = "nearest") -> Callable:
    block_size, pack = (16, True) if bits == 4 else (1, False)
    return lambda family, dtype: quantize_tokens(
        _meta(4096, columns, dtype=dtype), family, bits, block_size, pack, rounding, 2**40
    )


def _tiles(features: AlongFeatures | None, tokens: AlongTokens | None, rounding: str = "nearest") -> Callable:
    return lambda family, dtype: quantize_tiles(_meta(4096, 4096, dtype=dtype), family, features, tokens, rounding)


def _product(pack: str, k: int = 4096, size: int = 4096, block_size: int = 1, copied: bool = False) -> Callable:
    def call(family: Family, dtype: torch.dtype) -> None:
        packed = torch.uint8 if pack else torch.int8
        rows = size // 2 if pack == "m" else size
        a = contraction_innermost(rows, k, packed, torch.device("meta"))
        if copied:  # kept token by token
            a = _meta(k, rows, dtype=packed).t()
        b = contraction_innermost(size, k, torch.uint8 if pack == "k" else torch.int8, torch.device("meta")).t()
        scales = _meta(size, dtype=torch.float32), _meta(size, dtype=torch.float32)
        out = _meta(size, size, dtype=dtype)
        if pack == "m":  # as packed_product calls it
            product(a, b, None, scales[1], out.t(), family, pack, b_first=True, block_size=block_size)
        else:
            product(a, b, *scales, out, family, pack)

    return call


_scales = _meta(4096, dtype=torch.float32)
# Name: (what it is for, a call that launches it).
CASES: dict[str, tuple[str, Callable]] = {
    "rows int8": ("g of grad_input", _rows(4096, 8, False, "nearest")),
    "rows int8, short": ("the same, ViT-B", _rows(768, 8, False, "nearest")),
    "rows int8, long": ("the same, 14,336 features", _rows(14336, 8, False, "nearest")),
    "rows int4": ("g of INT4 grad_input", _rows(4096, 4, True, "nearest")),
    "rows int4, stochastic": ("the same", _rows(4096, 4, True, "stochastic")),
    "rows int4, pseudo-stochastic": ("the same", _rows(4096, 4, True, "pseudo_stochastic")),
    "tokens int8": ("x of `int8`", _tokens(4096, 8)),
    "tokens int4": ("x of `ht_int4`", _tokens(4096, 4)),
    "tokens int4, narrow": ("the same, 384 features", _tokens(384, 4)),
    "tokens int4, stochastic": ("the same, 14,336 features", _tokens(14336, 4, "stochastic")),
    "tokens int4, pseudo-stochastic": ("the same, 14,336 features", _tokens(14336, 4, "pseudo_stochastic")),
    "tiles W int8": ("W of grad_input", _tiles(None, AlongTokens(8, True, 0, block_size=16))),
    "tiles W int4": ("W of INT4 grad_input", _tiles(None, AlongTokens(4, True, 0, block_size=16, pack="rows"))),
    "tiles project int8": ("x of `hla_int8`; g of `hla_*`", _tiles(None, AlongTokens(8, True, 0, rank=8))),
    "tiles project int4": ("x of `hla_int4`", _tiles(None, AlongTokens(4, True, 0, rank=8, pack="columns"))),
    "tiles fold": ("g of `ht_int4` and `int8`", _tiles(None, AlongTokens(8, True, 0, token_scale=_scales))),
    "tiles both, fold": (
        "both quantizations of g",
        _tiles(AlongFeatures(8, 16, True, False, 0), AlongTokens(8, True, 0, token_scale=_scales)),
    ),
    "tiles both, project, stochastic": (
        "both quantizations of g",
        _tiles(AlongFeatures(4, 16, True, True, 2**40), AlongTokens(8, True, 2**40, rank=8), "stochastic"),
    ),
    "product": ("grad_input INT8, grad_weight of `hla_int8`, `int8`", _product("")),
    "product, tail": ("the same, a contraction off the step", _product("", k=4000)),
    "product, long": ("the same, beyond 131,072", _product("", k=140_000)),
    "product, int4 along k": ("grad_input INT4", _product("k")),
    "product, int4 rows": ("grad_weight of `hla_int4`", _product("m")),
    "product, int4 rows, transform": ("grad_weight of `ht_int4`", _product("m", block_size=16)),
    "product, int4 rows, copied": ("the same from a tensor that lies token by token", _product("m", copied=True)),
    "product, small": ("the first, where it has few tiles (768 x 768)", _product("", size=768)),
    "product, int4 rows, transform, small": (
        "grad_weight of `ht_int4`, 768 x 768",
        _product("m", size=768, block_size=16),
    ),
    "product, int4 rows, transform, tail": ("the same, off the step", _product("m", k=4000, block_size=16)),
}


@dataclass(frozen=True)
class Compiled:
    """One kernel for one target. registers: per thread; spills: bytes, stores and loads; shared: bytes per block;
    byte_stores: instructions that write single bytes to memory."""

    kernel: str
    registers: int
    spills: int
    shared: int
    matrix_instructions: tuple[str, ...]
    narrow_offsets: tuple[str, ...]
    fused: int
    byte_stores: int
    asm: dict[str, str] = field(repr=False)


def _signature(launched: Launch) -> tuple[dict, dict, dict]:
    """Types, constants and alignments as Triton's own specialization would find them."""
    kernel = launched.kernel
    types, constants, attributes = {}, {}, {}
    for position, (parameter, value) in enumerate(zip(kernel.params, launched.args, strict=False)):
        name = parameter.name
        if isinstance(value, Tensor):
            types[name] = "*" + _TRITON_TYPES[value.dtype]
        elif value == 1 and not parameter.do_not_specialize:
            types[name] = "constexpr"
            constants[name] = 1
            continue
        else:
            types[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
        if isinstance(value, Tensor) or (value % 16 == 0 and not parameter.do_not_specialize):
            attributes[(position,)] = [["tt.divisibility", 16]]
    for name, value in launched.constants.items():
        types[name] = "constexpr"
        constants[name] = value
    return {name: types[name] for name in kernel.arg_names}, constants, attributes


def compile_launch(launched: Launch, target: tuple[str, int | str]) -> Compiled:
    """Compile one recorded launch and read the result.

    Raises:
        ValueError: for a target without kernels (``tuning.family_of_arch``).
    """
    backend, arch = target
    family_of_arch(backend, arch)
    types, constants, attributes = _signature(launched)
    compiled = triton.compile(
        triton.compiler.ASTSource(launched.kernel, types, constants, attributes),
        target=GPUTarget(backend, arch, 64 if backend == "hip" else 32),
        options={"num_warps": launched.warps, "num_stages": launched.stages, "enable_fp_fusion": False},
    )
    code = compiled.asm["amdgcn" if backend == "hip" else "ptx"]
    registers, spills = _amd_usage(code) if backend == "hip" else _ptxas_usage(code, int(arch))
    return Compiled(
        launched.kernel.__name__,
        registers,
        spills,
        compiled.metadata.shared,
        tuple(sorted(set(re.findall(matrix_instruction(arch), code)))),
        _narrow_offsets(compiled.asm["ttir"]),
        len(re.findall(r"\bfma\.rn\.f32", code)) if backend == "cuda" else 0,
        len(re.findall(r"\bst\.global\.b8\b|\b(?:global|buffer|flat)_store_byte\b", code)),
        {"ttir": compiled.asm["ttir"], "code": code},
    )


def compile_case(name: str, dtype: torch.dtype, target: tuple[str, int | str]) -> list[Compiled]:
    """Every launch of a case, with ``dtype`` as the type of its floating tensors."""
    family = family_of_arch(*target)
    with recording() as launches:
        CASES[name][1](family, dtype)
    return [compile_launch(launched, target) for launched in launches]


def is_product(compiled: Compiled) -> bool:
    return compiled.kernel == product_kernel.__name__


def _ptxas_usage(ptx: str, arch: int) -> tuple[int, int]:
    """(registers, spilled bytes) from the assembler's own account, with the options that Triton gives it."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(arch).path, "-v", "--fmad=false", f"--gpu-name={sm_arch_from_capability(arch)}"]
        report = subprocess.run(
            [*command, file.name, "-o", "/dev/null"], capture_output=True, text=True, check=True
        ).stderr
    spills = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", report)))
    return int(re.search(r"Used (\d+) registers", report)[1]), spills


def _amd_usage(code: str) -> tuple[int, int]:
    """(vector registers with accumulators, spilled registers in bytes) from the kernel's metadata."""
    number = {key: int(value) for key, value in re.findall(r"\.(\w+):\s+(\d+)", code)}
    return number["vgpr_count"], 4 * (number["vgpr_spill_count"] + number["sgpr_spill_count"])


def _narrow_offsets(ttir: str) -> tuple[str, ...]:
    """Pointer additions whose offset is neither 64 bit nor a constant: these could overflow."""
    narrow = []
    for line in ttir.splitlines():
        match = re.search(r"tt\.addptr %\S+, (%\S+) : .*?, (\S+) loc", line)
        if match and "i64" not in match[2] and not re.match(r"%c", match[1]):
            narrow.append(line.strip())
    return tuple(narrow)

"""Errors of one gradient: each row of spec.md's first table, on the real integer arithmetic of the backend."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hot_hf import ops
from hot_hf.ops import reference

SEED = 0  # of stochastic rounding


@dataclass(frozen=True)
class Row:
    """``compute(x, g, W)`` gives the approximate gradient; ``bits`` are those kept per element of x (g_w only)."""

    gradient: str
    label: str
    bits: float | None
    compute: Callable[[Tensor, Tensor, Tensor], Tensor]


def _grad_input(bits: int, per_token: bool, block: int, rounding: str = "nearest"):
    return lambda x, g, w: ops.grad_input(g, w, bits, block, per_token, rounding, SEED, torch.float32)


def _grad_weight(fmt: str, rank: int = 8, per_feature: bool = True, rounding: str = "nearest"):
    def compute(x, g, w):
        packed, scale = ops.compress(x, fmt, rank, 16, per_feature, rounding, SEED)
        return ops.grad_weight(
            g, packed, scale, fmt, x.shape[1], rank, 16, per_feature, rounding, SEED + 3, torch.float32
        )

    return compute


def _full_int8(per_feature: bool):
    """Both operands in INT8 at full length, neither transformed."""

    def compute(x, g, w):
        dim = 0 if per_feature else None
        (g_int, g_scale), (x_int, x_scale) = (reference.quantize(t, 8, dim) for t in (g, x))
        return reference.scaled_product(g_int.t(), x_int, g_scale, x_scale, torch.float32)

    return compute


def _first_sylvester_rows(x, g, w):
    """HLA of rank 8 on rows 0 to 7 of H as Sylvester orders them, instead of the eight lowest sequencies."""

    def project(t):
        features = t.shape[1]
        t = torch.nn.functional.pad(t, (0, 0, 0, reference.padded(t.shape[0], 16) - t.shape[0]))
        blocks = t.view(-1, 16, features).transpose(1, 2)
        return reference.hadamard(blocks, 16)[..., :8].transpose(1, 2).reshape(-1, features)

    (g_int, g_scale), (x_int, x_scale) = (reference.quantize(project(t), 8, 0) for t in (g, x))
    return reference.scaled_product(g_int.t(), x_int, g_scale, x_scale, torch.float32)


def _three_bits(x, g, w):
    """``ht_int4`` with integers in [-3, 3]."""
    transformed = reference.hadamard(x, 16)
    scale = transformed.abs().amax(1) / 3
    x_int = (transformed / scale.clamp_min(1e-30)[:, None]).round().clamp(-3, 3).to(torch.int8)
    g_int, g_scale = reference.fold_quantize(g, scale, True)
    product = reference.scaled_product(g_int.t(), x_int, g_scale, None, torch.float32)
    return reference.hadamard(product, 16)[:, : x.shape[1]]


ROWS = (
    Row("g_x", "INT4 per tensor, no H, nearest", None, _grad_input(4, False, 1)),
    Row("g_x", "INT4 per tensor, H, nearest", None, _grad_input(4, False, 16)),
    Row("g_x", "INT4 per tensor, H, stochastic", None, _grad_input(4, False, 16, "stochastic")),
    Row("g_x", "INT4 per token, no H, nearest", None, _grad_input(4, True, 1)),
    Row("g_x", "INT4 per token, H, nearest", None, _grad_input(4, True, 16)),
    Row("g_x", "INT4 per token, H, stochastic", None, _grad_input(4, True, 16, "stochastic")),
    Row("g_x", "INT4 per token, H, pseudo-stochastic", None, _grad_input(4, True, 16, "pseudo_stochastic")),
    Row("g_x", "INT4 per token, H of 64, nearest", None, _grad_input(4, True, 64)),
    Row("g_x", "INT8 per token, no H, nearest", None, _grad_input(8, True, 1)),
    Row("g_x", "INT8 per token, H, nearest (default)", None, _grad_input(8, True, 16)),
    Row("g_w", "INT8 full, per tensor", 8, _full_int8(False)),
    Row("g_w", "INT8 full, per feature", 8, _full_int8(True)),
    Row("g_w", "`int8`, per token", 8, _grad_weight("int8")),
    Row("g_w", "HLA r=8 INT8, per tensor (the paper)", 4, _grad_weight("hla_int8", per_feature=False)),
    Row("g_w", "HLA r=8 INT8, per feature", 4, _grad_weight("hla_int8")),
    Row("g_w", "HLA r=8, first 8 Sylvester rows", 4, _first_sylvester_rows),
    Row("g_w", "HLA r=8 INT4", 2, _grad_weight("hla_int4")),
    Row("g_w", "HLA r=12 INT8", 6, _grad_weight("hla_int8", rank=12)),
    Row("g_w", "`ht_int4` (default)", 4, _grad_weight("ht_int4")),
    Row("g_w", "3-bit `ht`", 3, _three_bits),
)


def exact(gradient: str, x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    """The gradient in float64."""
    return g.double() @ w.double() if gradient == "g_x" else g.double().t() @ x.double()


def relative_error(value: Tensor, exact: Tensor) -> float:
    """Frobenius norm of the difference over that of ``exact``, in float64."""
    value, exact = value.double(), exact.double()
    return float((value - exact).norm() / exact.norm())


def errors(row: Row, layers: dict[str, tuple[Tensor, Tensor, Tensor]], truth: dict[str, Tensor]) -> dict[str, float]:
    """Relative Frobenius error (mean and largest over layers) and cosine (mean and worst) of ``row``."""
    relative, cosine = [], []
    for name, tensors in layers.items():
        approximate, true = row.compute(*tensors).double(), truth[name]
        relative.append(relative_error(approximate, true))
        cosine.append(float((approximate * true).sum() / (approximate.norm() * true.norm())))
    return {
        "error": statistics.mean(relative),
        "largest_error": max(relative),
        "cosine": statistics.mean(cosine),
        "worst_cosine": min(cosine),
    }

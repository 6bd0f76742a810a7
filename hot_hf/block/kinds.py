"""Which consumer inside a block is given what for its backward: one row per kind.

A consumer is packed only where its derivative has no pole, logarithm, jump or sign that a rounded value could cross.

``benchmarks/block_errors.py`` measures the error that each choice puts into the gradient of a whole model, kind by
kind; its table, docs/results/block_errors.md, decides the rows below. What is in no row stays exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Codec:
    """Groups of ``group`` neighbouring values in memory, packed by ``format`` of ``hot_hf.ops``, one scale each."""

    format: str  # int8, or ht_int4: 4 bits behind a Hadamard transform over 16 values
    group: int

    @property
    def bytes_per_element(self) -> float:
        return (1.0 if self.format == "int8" else 0.5) + 2 / self.group  # scales are kept in bfloat16


INT8 = Codec("int8", 32)
EXACT = None
# The input of a checkpointed block: docs/results/block_errors.md.
BOUNDARY = INT8

# kind: how what its functions save is held
CODECS: dict[str, Codec | None] = {
    "norm": INT8,  # LayerNorm, and RMSNorm written out: pow, products
    "activation": INT8,  # the inputs (or outputs) of activation functions
    "product": INT8,  # both factors of x * y
    "softmax": INT8,  # the probabilities of attention that is written out
    "matmul": INT8,  # q, k, v and probabilities of attention that is written out
    "attention": INT8,  # q, k and v of fused attention, whose backward runs it again on what was kept
}

# function: kind. By name: ``x * y``, ``torch.mul`` and ``x.mul(y)`` are one function to autograd.
KINDS: dict[str, str] = {
    **dict.fromkeys(("layer_norm", "rms_norm", "group_norm", "pow", "square"), "norm"),
    # tanh and sigmoid save their results: 127 times 1 / 127 in bfloat16 is 0.99994, so that none lies beyond 1.
    # Not hardswish and elu with an alpha: their derivatives jump, and a rounded value may lie on the other side.
    **dict.fromkeys(("silu", "gelu", "tanh", "sigmoid", "softplus", "mish"), "activation"),
    **dict.fromkeys(("mul", "multiply", "div", "true_divide"), "product"),
    "softmax": "softmax",
    **dict.fromkeys(("matmul", "bmm", "baddbmm", "__matmul__"), "matmul"),
}

# These divide by the spread of each row around its mean: what is packed of them is the distance from each group's mean,
# 2 bytes a group more. At 1,000 + normal noise int8 of x itself steps by 8 where the spread is 1.
CENTERED = frozenset(("layer_norm", "group_norm"))
# sigmoid(10) is 1 - 4.5e-5, a hundredth of int8's half step: as far as softplus' derivative may jump at its threshold.
SOFTPLUS_THRESHOLD = 10

# Pointwise functions whose result is computed again from what their input is held as, instead of held a second time.
RECOMPUTED = frozenset(
    ("silu", "gelu", "mul", "multiply", "div", "neg", "to", "float", "half", "bfloat16", "type", "type_as")
)


def is_smooth(name: str, args: tuple, kwargs: dict) -> bool:
    """Whether the derivative of this call, of a function in ``KINDS``, moves little where its arguments are rounded."""
    if name == "pow":
        exponent = _argument(args, kwargs, 1, "exponent")
        return isinstance(exponent, (int, float)) and exponent >= 1 and float(exponent).is_integer()
    if name in ("div", "true_divide"):  # where each element has a divisor of its own, both are kept exactly
        return is_constant_in_groups(_argument(args, kwargs, 1, "other"), _argument(args, kwargs, 0, "input"))
    if name == "softplus":
        return _argument(args, kwargs, 2, "threshold", 20) >= SOFTPLUS_THRESHOLD
    if name in ("layer_norm", "rms_norm"):
        return has_own_groups(prod(_argument(args, kwargs, 1, "normalized_shape")))
    if name == "group_norm":
        x, groups = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 1, "num_groups")
        return x.is_contiguous() and has_own_groups(x.numel() // max(1, x.shape[:1].numel() * groups))
    return True


def is_constant_in_groups(factor: Any, x: Any) -> bool:
    """Whether ``factor`` is one number for each group of ``x``: no small value beside a large one is scaled up."""
    if not isinstance(factor, Tensor) or factor.numel() == 1:
        return True
    return isinstance(x, Tensor) and x.dim() > 0 and factor.shape[-1:] == (1,) and has_own_groups(x.shape[-1])


def has_own_groups(row: int) -> bool:
    """Whether a row of ``row`` neighbours shares at most a quarter of itself with a group of the row before it, whose
    scale may be another one."""
    return row % INT8.group == 0 or row >= 4 * INT8.group


def _argument(args: tuple, kwargs: dict, place: int, name: str, default: Any = None) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)

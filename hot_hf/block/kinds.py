"""Which consumer inside a block is given what for its backward: one row per kind.

A consumer is packed only where its derivative has no pole, logarithm, jump or sign that a rounded value could cross.

``benchmarks/block_errors.py`` measures the error that each choice puts into the gradient of a whole model, kind by
kind; its table, docs/results/block_errors.md, decides the rows below. What is in no row stays exact.
"""

from __future__ import annotations

from dataclasses import dataclass


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

# The second argument of these is kept exactly: a small one beside a large one would be rounded to 0.
QUOTIENTS = frozenset(("div", "true_divide"))

# Pointwise functions whose result is computed again from what their input is held as, instead of held a second time.
RECOMPUTED = frozenset(
    ("silu", "gelu", "mul", "multiply", "div", "neg", "to", "float", "half", "bfloat16", "type", "type_as")
)

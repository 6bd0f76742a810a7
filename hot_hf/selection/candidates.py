"""What a budget chooses from, and what each candidate costs in bit operations and bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log2

from ..ops import FORMATS
from ..ops.reference import TOKEN_BLOCK, padded
from ..plan import Plan

BLOCKS = (16, 32, 64, 128)
ADD, MULTIPLY = 32, 32 * 32  # bit operations of one float32 addition and one multiplication


@dataclass(frozen=True)
class Shape:
    """One layer in one micro-batch; ``element_size`` in bytes of x as it is kept, ``grad_size`` of g, ``stored`` the
    elements of the storage that x lies in: keeping a view (BERT's first token) keeps all of what it is a view of."""

    tokens: int
    out_features: int
    in_features: int
    element_size: int = 4
    grad_size: int = 4
    stored: int = 0

    @property
    def own_bytes(self) -> int:
        """Of x alone, as it is."""
        return self.tokens * self.in_features * self.element_size

    @property
    def exact_operations(self) -> int:
        """Bit operations of one of the two products without HOT."""
        return self.tokens * self.out_features * self.in_features * (8 * self.grad_size) ** 2


@dataclass(frozen=True)
class GradInput:
    """How g_x is computed; ``bits=None`` is exact."""

    bits: int | None
    granularity: str = "per_token"
    block_size: int = 16

    @property
    def settings(self) -> dict:
        changes = {"grad_input_bits": self.bits, "grad_input_granularity": self.granularity}
        return changes if self.bits is None else {**changes, "block_size": self.block_size}

    def operations(self, shape: Shape) -> float:
        """Products of b-bit operands count b * b; additions of the transform and multiplications by scales as above."""
        if self.bits is None:
            return shape.exact_operations
        n, o, i = shape.tokens, padded(shape.out_features, self.block_size), shape.in_features
        transform = log2(self.block_size) * (n * o + o * i) * ADD
        scales = n * i * MULTIPLY * (2 if self.granularity == "per_token" else 1)
        return n * o * i * self.bits**2 + transform + scales


@dataclass(frozen=True)
class KeptInput:
    """What is kept of x, and with it how g_w is computed; ``block_size`` only where the format transforms features."""

    activation_format: str
    rank: int = 8
    block_size: int | None = None

    @property
    def settings(self) -> dict:
        changes = {"activation_format": self.activation_format, "rank": self.rank}
        return changes if self.block_size is None else {**changes, "block_size": self.block_size}

    def operations(self, shape: Shape) -> float:
        """Of g_w, counted as for g_x; g is 8 bits wide beside every format."""
        if self.activation_format == "none":
            return shape.exact_operations
        n, o, i = shape.tokens, shape.out_features, shape.in_features
        bits, outputs = FORMATS[self.activation_format].bits, o * i * MULTIPLY
        if self.activation_format.startswith("hla"):
            padded_tokens = padded(n, TOKEN_BLOCK)
            rows = padded_tokens // TOKEN_BLOCK * self.rank
            return rows * o * i * bits * 8 + log2(TOKEN_BLOCK) * padded_tokens * (i + o) * ADD + 2 * outputs
        columns = padded(i, self.block_size or 1)
        transform = log2(self.block_size or 1) * (n + o) * columns * ADD
        return n * o * columns * bits * 8 + transform + n * o * MULTIPLY + outputs

    def bytes(self, shape: Shape, per_feature: bool) -> int:
        """Of the packed form and its scales, as kept for one micro-batch."""
        if self.activation_format == "none":
            return max(shape.own_bytes, shape.stored * shape.element_size)
        row = FORMATS[self.activation_format]
        rows, columns = row.packed_shape(shape.tokens, shape.in_features, self.rank, self.block_size or 1)
        scale_size = 8 if shape.element_size == 8 else 4
        return rows * columns + row.scale_size(shape.tokens, shape.in_features, per_feature) * scale_size


EXACT_INPUT = GradInput(None)
EXACT_KEPT = KeptInput("none")
GRAD_INPUTS = tuple(
    GradInput(bits, granularity, block)
    for bits in (4, 8)
    for granularity in ("per_tensor", "per_token")
    for block in BLOCKS
)
KEPT_INPUTS = (
    *(KeptInput("hla_int8", rank) for rank in (4, 8, 12)),
    KeptInput("hla_int4", 8),
    *(KeptInput("ht_int4", block_size=block) for block in BLOCKS),
    KeptInput("int8"),
)


def combine(base: Plan, grad_input: GradInput | None, kept: KeptInput | None) -> Plan | None:
    """``base`` with both choices; None where they need different blocks, of which a layer has one.

    ``None`` stands for a gradient that the layer did not compute: exact, should it be asked for later.
    """
    grad_input, kept = grad_input or EXACT_INPUT, kept or EXACT_KEPT
    blocks = {c.settings.get("block_size") for c in (grad_input, kept)} - {None}
    if len(blocks) > 1:
        return None
    return replace(base, **{k: v for c in (grad_input, kept) for k, v in c.settings.items()})

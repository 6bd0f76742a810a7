"""Plan: what HOT does to one layer."""

from __future__ import annotations

from dataclasses import dataclass, fields

from .ops import grid


@dataclass(frozen=True)
class Plan:
    """What one layer does: the part of a HOTConfig that can differ between layers.

    ``grad_input_bits=None`` and ``activation_format="none"`` mean exact.
    """

    grad_input_bits: int | None = 8
    grad_input_granularity: str = "per_token"
    activation_format: str = "ht_int4"
    rank: int = 8
    grad_weight_granularity: str = "per_feature"
    block_size: int = 16
    rounding: str = "nearest"
    token_grid: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        if self.token_grid is not None:  # a list, from JSON
            object.__setattr__(self, "token_grid", tuple(self.token_grid))

    def grid(self, tokens: int) -> tuple[int, int, int] | None:
        """The token grid where the format has an order of tokens and ``tokens`` are whole images; None elsewhere."""
        return self.token_grid if self.activation_format in grid.BITS and grid.fits(tokens, self.token_grid) else None

    @property
    def exact(self) -> bool:
        return self.grad_input_bits is None and self.activation_format == "none"

    def label(self) -> str:
        """A short name for reports: ``INT8 per_token / ht_int4``."""
        bits = "exact" if self.grad_input_bits is None else f"INT{self.grad_input_bits} {self.grad_input_granularity}"
        kept = self.activation_format
        if kept in grid.BITS:
            kept += f" r={self.rank}" + (" 2-D" if self.token_grid else "")
        return f"{bits} / {kept}"


PLAN_FIELDS = tuple(f.name for f in fields(Plan))

"""Plan: what HOT does to one layer, validated when it is made."""

from __future__ import annotations

import warnings
from dataclasses import FrozenInstanceError, dataclass, field, fields
from typing import Any

from .ops import FORMATS
from .ops.reference import BLOCK_SIZES, ROUNDINGS, TOKEN_BLOCK

ACTIVATION_FORMATS = (*FORMATS, "none")
GRAD_INPUT_GRANULARITIES = ("per_token", "per_tensor", "lqs")
GRAD_WEIGHT_GRANULARITIES = ("per_feature", "per_tensor")


@dataclass(unsafe_hash=True)
class Plan:
    """What one layer does: the part of a HOTConfig that can differ between layers.

    ``grad_input_bits=None`` and ``activation_format="none"`` mean exact. Layers share plans, so that one is never
    changed: ``dataclasses.replace`` makes another.

    Raises:
        ValueError: for a value that is not known, naming the field, what was found and what to write instead.
    """

    grad_input_bits: int | None = field(
        default=8, metadata={"help": "Bits of both operands of grad_input: 4, 8, or None for the exact product."}
    )
    grad_input_granularity: str = field(
        default="per_token",
        metadata={
            "help": "Scales of grad_input: per_token (and per input feature of W), per_tensor, or lqs: measured in the "
            "first micro-batches and chosen per layer (the paper's LQS; docs/spec.md, section 7)."
        },
    )
    activation_format: str = field(
        default="ht_int4",
        metadata={"help": f"What the forward keeps of a layer's input: one of {list(ACTIVATION_FORMATS)}."},
    )
    rank: int = field(
        default=8, metadata={"help": "Sequencies kept of each block of 16 tokens by the hla formats, 1 to 16."}
    )
    grad_weight_granularity: str = field(
        default="per_feature", metadata={"help": "Scales of grad_weight: per_feature or per_tensor."}
    )
    block_size: int = field(
        default=16,
        metadata={"help": f"Hadamard block along features, one of {list(BLOCK_SIZES)}; 1 is no transform."},
    )
    rounding: str = field(default="nearest", metadata={"help": f"One of {list(ROUNDINGS)} (docs/spec.md, section 6)."})

    def __post_init__(self) -> None:
        if self.grad_input_bits is not None:
            self._check_one_of("grad_input_bits", (4, 8, None))
        self._check_one_of("grad_input_granularity", GRAD_INPUT_GRANULARITIES)
        self._check_one_of("activation_format", ACTIVATION_FORMATS)
        self._check_whole("rank", 1, TOKEN_BLOCK)
        self._check_one_of("grad_weight_granularity", GRAD_WEIGHT_GRANULARITIES)
        self._check_one_of("block_size", BLOCK_SIZES)
        self._check_one_of("rounding", ROUNDINGS)

    def __setattr__(self, name: str, value: Any) -> None:
        # By hand: HOTConfig, which may be assigned to, could not be built on a frozen dataclass.
        if name in self.__dict__:
            raise FrozenInstanceError(f"{type(self).__name__}.{name} is fixed; dataclasses.replace makes another.")
        object.__setattr__(self, name, value)

    def _check_one_of(self, name: str, allowed: tuple) -> None:
        value = getattr(self, name)
        # Neither 8.0 nor True passes for a whole number.
        if not any(type(value) is type(a) and value == a for a in allowed):
            raise ValueError(f"{type(self).__name__}.{name}={value!r} is not known; choose one of {list(allowed)}.")

    def _check_whole(self, name: str, low: int, high: int | None = None) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
            span = f"from {low} to {high}" if high is not None else f"of at least {low}"
            raise ValueError(f"{type(self).__name__}.{name}={value!r} is out of range; write a whole number {span}.")

    @property
    def exact(self) -> bool:
        return self.grad_input_bits is None and self.activation_format == "none"

    @property
    def input_label(self) -> str:
        """How grad_input is computed, for tables: ``INT8 per_token``."""
        return "exact" if self.grad_input_bits is None else f"INT{self.grad_input_bits} {self.grad_input_granularity}"

    @property
    def kept_label(self) -> str:
        """What is kept of the input, for tables: ``hla_int8 r=8``."""
        return self.activation_format + (f" r={self.rank}" if self.activation_format.startswith("hla") else "")

    def label(self) -> str:
        """A short name for reports: ``INT8 per_token / ht_int4``."""
        return f"{self.input_label} / {self.kept_label}"


PLAN_FIELDS = tuple(f.name for f in fields(Plan))


def without_retired(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of a plan as an earlier version may have written them, less what is no longer a setting.

    ``token_grid`` was an order of image tokens for the hla formats; at the same bytes ``ht_int4`` is more exact
    (docs/results/image_order.md).
    """
    if settings.get("token_grid") is not None:
        warnings.warn(
            f"hot_hf: token_grid={settings['token_grid']!r} is no longer a setting and is ignored: hla formats take "
            "their blocks of 16 tokens as they come. activation_format='ht_int4' is more exact at the same bytes.",
            stacklevel=2,
        )
    return {name: value for name, value in settings.items() if name != "token_grid"}

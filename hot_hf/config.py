"""HOTConfig: what HOT does to a model, validated when it is made, saved as ``hot_config.json``."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .layer_plan import PLAN_FIELDS, Plan
from .ops import FORMATS
from .ops.reference import BLOCK_SIZES, ROUNDINGS, TOKEN_BLOCK

CONFIG_NAME = "hot_config.json"
ACTIVATION_FORMATS = (*FORMATS, "none")
GRAD_INPUT_GRANULARITIES = ("per_token", "per_tensor", "lqs")
GRAD_WEIGHT_GRANULARITIES = ("per_feature", "per_tensor")
COMPRESSIONS = ("inputs", "block")
SELECTIONS = ("budget",)
BYTE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def _one_of(name: str, value: Any, allowed: tuple) -> None:
    if not any(
        type(value) is type(a) and value == a for a in allowed
    ):  # neither 8.0 nor True passes for a whole number
        raise ValueError(f"HOTConfig.{name}={value!r} is not known; choose one of {list(allowed)}.")


def _whole(name: str, value: Any, low: int, high: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        span = f"from {low} to {high}" if high is not None else f"of at least {low}"
        raise ValueError(f"HOTConfig.{name}={value!r} is out of range; write a whole number {span}.")


def byte_budget(value: int | str, exact: int) -> int:
    """``HOTConfig.max_bytes`` in bytes: a whole number, ``"24MB"`` or ``"1.5GiB"``, or ``"12.5%"`` of ``exact``.

    Raises:
        ValueError: for anything else, and for what is not above 0.
    """
    bytes_ = None
    if isinstance(value, int) and not isinstance(value, bool):
        bytes_ = value
    elif isinstance(value, str) and (found := re.fullmatch(r"(\d+\.?\d*)\s*(%|[A-Za-z]*)", value.strip())):
        number, unit = float(found[1]), found[2].upper()
        if unit == "%":
            bytes_ = math.ceil(number * exact / 100)
        elif unit in BYTE_UNITS:
            bytes_ = int(number * BYTE_UNITS[unit])
    if bytes_ is None or bytes_ <= 0:
        raise ValueError(
            f"HOTConfig.max_bytes={value!r} is no size: write a whole number of bytes above 0, a string such as '24MB' "
            "or '1.5GiB', or a share of what exact training keeps, such as '12.5%'."
        )
    return bytes_


@dataclass
class HOTConfig:
    """Configuration of Hadamard-based optimized training.

    The default is for text and anything unknown; see ``paper()``, ``fast()`` and ``smallest()`` for the other presets.

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
            "first micro-batches and chosen per layer (the paper's LQS, SPEC section 7)."
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
    rounding: str = field(default="nearest", metadata={"help": f"One of {list(ROUNDINGS)} (SPEC section 6)."})
    token_grid: list[int] | None = field(
        default=None,
        metadata={
            "help": "Image tokens: [prefix, height, width], for example [1, 14, 14] of ViT-B/16 with CLS. The hla "
            "formats then keep low frequencies of two-dimensional tiles, and prefix tokens whole, wherever a layer's "
            "tokens are whole images; None: blocks of 16 tokens as they come."
        },
    )
    seed: int = field(default=0, metadata={"help": "Key of stochastic rounding, with layer, step and rank."})
    include: list[str] = field(
        default_factory=lambda: ["*"],
        metadata={"help": "Shell-style patterns on full module names; only layers that match one are patched."},
    )
    exclude: list[str] = field(
        default_factory=list,
        metadata={"help": "Patterns on full module names to leave exact, for example 'model.layers.0.*'."},
    )
    overrides: dict[str, dict[str, Any]] = field(
        default_factory=dict,
        metadata={"help": f"Pattern to settings of single layers; keys of {list(PLAN_FIELDS)}. The last match wins."},
    )
    skip_heads: bool = field(
        default=True, metadata={"help": "Leave the output embedding (lm_head) and mixture-of-experts routers exact."}
    )
    min_features: int = field(
        default=64,
        metadata={
            "help": "Layers with fewer input or output features stay exact: they keep little, and at this width a CPU "
            "takes 2.5 times as long with HOT. It gains from 512 on (docs/results/narrow.md): raise it for speed "
            "alone; hot-hf doctor --tune measures your machine."
        },
    )
    linear_classes: list[str] = field(
        default_factory=list,
        metadata={"help": "Names of nn.Linear subclasses to patch too; their forward must be that of nn.Linear."},
    )
    lora: bool = field(
        default=False,
        metadata={"help": "Patch lora_A of PEFT adapters as well; lora_B stays exact, its input is only r wide."},
    )
    share: bool = field(
        default=True, metadata={"help": "Layers that read the same tensor (q/k/v, gate/up) keep one packed copy."}
    )
    compress: str = field(
        default="inputs",
        metadata={
            "help": "inputs: the kept inputs of patched layers; block: also what norms, activation functions, "
            "attention, products and dropout keep in the blocks around them (docs/memory.md)."
        },
    )
    lqs_batches: int = field(default=4, metadata={"help": "Micro-batches that lqs measures, exact meanwhile."})
    lqs_threshold: float = field(
        default=0.5, metadata={"help": "lqs takes per_token scales where e_token < lqs_threshold * e_tensor."}
    )
    selection: str | None = field(
        default=None,
        metadata={
            "help": "budget: measure every layer's candidates in the first lqs_batches micro-batches, exact meanwhile, "
            "and choose by max_grad_error or max_bytes (docs/selection.md); None: as configured. Layers with an "
            "override keep it."
        },
    )
    max_grad_error: float | None = field(
        default=None,
        metadata={
            "help": "selection='budget': each layer takes the cheapest candidate whose relative gradient error, of "
            "single micro-batches and of their sum, is at most this; a layer without one stays exact."
        },
    )
    max_bytes: int | str | None = field(
        default=None,
        metadata={
            "help": "selection='budget': the most exact plan whose kept inputs of one micro-batch fit: bytes, '24MB', "
            "'1.5GiB', or '12.5%' of what exact training keeps of them."
        },
    )

    def __post_init__(self) -> None:
        if self.grad_input_bits is not None:
            _one_of("grad_input_bits", self.grad_input_bits, (4, 8, None))
        _one_of("grad_input_granularity", self.grad_input_granularity, GRAD_INPUT_GRANULARITIES)
        _one_of("activation_format", self.activation_format, ACTIVATION_FORMATS)
        _whole("rank", self.rank, 1, TOKEN_BLOCK)
        _one_of("grad_weight_granularity", self.grad_weight_granularity, GRAD_WEIGHT_GRANULARITIES)
        _one_of("block_size", self.block_size, BLOCK_SIZES)
        _one_of("rounding", self.rounding, ROUNDINGS)
        _one_of("compress", self.compress, COMPRESSIONS)
        self._check_grid()
        _whole("seed", self.seed, 0, 2**62)
        _whole("min_features", self.min_features, 1)
        _whole("lqs_batches", self.lqs_batches, 1)
        if (
            isinstance(self.lqs_threshold, bool)
            or not isinstance(self.lqs_threshold, (int, float))
            or not 0 <= self.lqs_threshold <= 1
        ):
            raise ValueError(f"HOTConfig.lqs_threshold={self.lqs_threshold!r} must be a number from 0 to 1.")
        for name in ("include", "exclude", "linear_classes"):
            value = getattr(self, name)
            if not isinstance(value, (list, tuple)) or not all(isinstance(p, str) for p in value):
                raise ValueError(f"HOTConfig.{name}={value!r} must be a list of strings, for example ['*.q_proj'].")
            setattr(self, name, list(value))
        for name in ("skip_heads", "lora", "share"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"HOTConfig.{name}={getattr(self, name)!r} must be True or False.")
        self._check_selection()
        self._check_overrides()

    def _check_grid(self) -> None:
        if self.token_grid is None:
            return
        value = list(self.token_grid) if isinstance(self.token_grid, (list, tuple)) else []
        if len(value) != 3 or any(type(v) is not int for v in value) or value[0] < 0 or min(value[1:]) < 1:
            raise ValueError(
                f"HOTConfig.token_grid={self.token_grid!r} must be [prefix tokens, height, width] in patches, for "
                "example [1, 14, 14], or None."
            )
        self.token_grid = value

    def _check_selection(self) -> None:
        error, size = self.max_grad_error, self.max_bytes
        if self.selection is None:
            for name, value in (("max_grad_error", error), ("max_bytes", size)):
                if value is not None:
                    raise ValueError(f"HOTConfig.{name}={value!r} is a budget: write selection='budget' with it.")
            return
        _one_of("selection", self.selection, (*SELECTIONS, None))
        if (error is None) == (size is None):
            raise ValueError(
                "HOTConfig.selection='budget' needs exactly one of max_grad_error and max_bytes, not "
                f"{'both' if size is not None else 'neither'}: for example max_grad_error=0.15 or max_bytes='12.5%'."
            )
        if self.grad_input_granularity == "lqs":
            raise ValueError(
                "HOTConfig.selection='budget' chooses the granularity itself: leave grad_input_granularity='lqs' out "
                "(with the paper preset, write grad_input_granularity='per_token')."
            )
        if error is not None and (isinstance(error, bool) or not isinstance(error, (int, float)) or not 0 < error < 1):
            raise ValueError(f"HOTConfig.max_grad_error={error!r} must be a number between 0 and 1, such as 0.15.")
        if size is not None:
            byte_budget(size, 2**30)

    def _check_overrides(self) -> None:
        if not isinstance(self.overrides, dict):
            raise ValueError(f"HOTConfig.overrides={self.overrides!r} must map name patterns to settings.")
        for pattern, settings in self.overrides.items():
            if not isinstance(settings, dict) or set(settings) - set(PLAN_FIELDS):
                raise ValueError(
                    f"HOTConfig.overrides[{pattern!r}]={settings!r} must be a dictionary with keys of "
                    f"{list(PLAN_FIELDS)}."
                )
            try:
                HOTConfig(**{**self._plan_settings(), **settings})
            except ValueError as error:
                raise ValueError(f"HOTConfig.overrides[{pattern!r}]: {error}") from None

    def _plan_settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in PLAN_FIELDS}

    def plan(self, matches=lambda pattern: False) -> Plan:
        """The plan of one layer; ``matches`` tells whether an override's pattern is for it."""
        settings = self._plan_settings()
        for pattern, changes in self.overrides.items():
            if matches(pattern):
                settings.update(changes)
        return Plan(**settings)

    # Presets (SPEC section 8). Keyword arguments change single fields.

    @classmethod
    def paper(cls, **changes) -> HOTConfig:
        """As published: INT4 grad_input with LQS, HLA of rank 8 in INT8, per tensor, pseudo-stochastic rounding."""
        return cls(**{**PRESETS["paper"], **changes})

    @classmethod
    def fast(cls, **changes) -> HOTConfig:
        """Fewest operations: INT4 grad_input per token, HLA of rank 8."""
        return cls(**{**PRESETS["fast"], **changes})

    @classmethod
    def smallest(cls, **changes) -> HOTConfig:
        """1/16 of float32: INT8 grad_input per token, HLA of rank 8 kept in INT4."""
        return cls(**{**PRESETS["smallest"], **changes})

    @classmethod
    def from_preset(cls, name: str, **changes) -> HOTConfig:
        """A preset by name: ``default``, ``paper``, ``fast`` or ``smallest``.

        Raises:
            ValueError: for any other name.
        """
        if name not in PRESETS:
            raise ValueError(f"Unknown HOT preset {name!r}; choose one of {list(PRESETS)}.")
        return cls(**{**PRESETS[name], **changes})

    @classmethod
    def coerce(cls, value: HOTConfig | dict | str | None) -> HOTConfig:
        """A HOTConfig from what a user may pass as ``hot_config``: one, a dict, a preset name, or None (default)."""
        if value is None:
            return cls()
        if isinstance(value, cls):
            value.__post_init__()  # a field may have been assigned since it was made
            return value
        if isinstance(value, str):
            return cls.from_preset(value)
        if isinstance(value, dict):
            return cls.from_dict(value)
        raise TypeError(f"hot_config must be a HOTConfig, a dict or a preset name, not {type(value).__name__}.")

    @classmethod
    def from_plan(cls, path: str | Path, **changes) -> HOTConfig:
        """A saved plan as a configuration: an override for each of its layers, nothing left to measure.

        ``changes`` are other fields, for layers that the plan does not name among them.

        Raises:
            FileNotFoundError, ValueError: for a file that is missing or no plan, naming it.
        """
        from .selection.planfile import SelectedPlan

        return SelectedPlan.load(path).config(**changes)

    # Storage

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types only."""
        return asdict(self)

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> HOTConfig:
        """The inverse of ``to_dict``.

        Raises:
            ValueError: for a key that is no field.
        """
        if not isinstance(settings, dict):
            raise ValueError(f"HOTConfig.from_dict takes a dictionary of its fields, not {settings!r}.")
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(settings) - set(known))
        if unknown:
            raise ValueError(f"HOTConfig has no field {unknown}; known fields are {known}.")
        return cls(**settings)

    def save_pretrained(self, directory: str | Path) -> Path:
        """Write ``hot_config.json`` into ``directory`` (made if missing) and return its path."""
        path = Path(directory) / CONFIG_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_dict(), indent=2) + "\n")
        return path

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> HOTConfig:
        """Read ``hot_config.json`` from ``directory``.

        Raises:
            FileNotFoundError: where there is none, naming the path.
            ValueError: for a file that is not JSON or has unknown fields.
        """
        path = Path(directory) / CONFIG_NAME
        if not path.is_file():
            raise FileNotFoundError(f"No {CONFIG_NAME} in {str(directory)!r}; HOTConfig().save_pretrained writes one.")
        try:
            settings = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not valid JSON ({error}); HOTConfig().save_pretrained writes it.") from None
        return cls.from_dict(settings)


PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": {
        "grad_input_bits": 4,
        "grad_input_granularity": "lqs",
        "activation_format": "hla_int8",
        "rank": 8,
        "grad_weight_granularity": "per_tensor",
        "rounding": "pseudo_stochastic",
    },
    "fast": {"grad_input_bits": 4, "activation_format": "hla_int8", "rank": 8},
    "smallest": {"activation_format": "hla_int4", "rank": 8},
}

"""HOTConfig: what HOT does to a model, validated when it is made, saved as ``hot_config.json``."""

from __future__ import annotations

import glob
import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .plan import PLAN_FIELDS, Plan, without_retired
from .selected_plan import SelectedPlan

CONFIG_NAME = "hot_config.json"
COMPRESSIONS = ("auto", "inputs", "block", "checkpoint")
BLOCK_MODES = (*COMPRESSIONS, "exact")
BYTE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def byte_budget(value: int | str, exact: int | None = None, name: str = "max_bytes") -> int:
    """``HOTConfig.max_bytes`` in bytes: a whole number, ``"24MB"`` or ``"1.5GiB"``, or ``"12.5%"`` of ``exact``.

    Raises:
        ValueError: for anything else, for a share where there is no ``exact``, and for what is not above 0.
    """
    bytes_ = None
    if isinstance(value, int) and not isinstance(value, bool):
        bytes_ = value
    elif isinstance(value, str) and (found := re.fullmatch(r"(\d+\.?\d*)\s*(%|[A-Za-z]*)", value.strip())):
        number, unit = float(found[1]), found[2].upper()
        if unit == "%" and exact is not None:
            bytes_ = math.ceil(number * exact / 100)
        elif unit in BYTE_UNITS:
            bytes_ = int(number * BYTE_UNITS[unit])
    if bytes_ is None or bytes_ <= 0:
        share = "" if exact is None else ", or a share of what exact training keeps, such as '12.5%'"
        raise ValueError(
            f"HOTConfig.{name}={value!r} is no size: write a whole number of bytes above 0, or a string such as '24MB' "
            f"or '1.5GiB'{share}."
        )
    return bytes_


@dataclass
class HOTConfig(Plan):
    """Configuration of Hadamard-based optimized training: the plan of every layer, and which layers it is for.

    The default is for text and anything unknown; see ``paper()``, ``fast()`` and ``smallest()`` for the other presets.
    The first seven fields are those of ``Plan``.

    Raises:
        ValueError: for a value that is not known, naming the field, what was found and what to write instead.
    """

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
    lora: bool | None = field(
        default=None,
        metadata={
            "help": "lora_A of PEFT adapters, whose input is what LoRA keeps: None patches it where the adapter's base "
            "is frozen, True also beside a base that trains, False nowhere. lora_B stays exact, its input is only r "
            "wide."
        },
    )
    share: bool = field(
        default=True, metadata={"help": "Layers that read the same tensor (q/k/v, gate/up) keep one packed copy."}
    )
    compress: str | dict[str, str] = field(
        default="auto",
        metadata={
            "help": "inputs: the kept inputs of patched layers alone; block: also what norms, activation functions, "
            "attention, products and dropout keep in the blocks around them; checkpoint: of each block its input, "
            "packed, from which it runs again; auto: inputs, and where gradient checkpointing is switched on, packed "
            "inputs of its blocks. Or patterns on names of blocks to one of these or to exact, as without HOT; the "
            "last match wins, and auto is for the rest (docs/memory.md)."
        },
    )
    memory: int | str | None = field(
        default=None,
        metadata={
            "help": "Choose compress for each block, at the first batch and where a larger one comes, so that the "
            "predicted peak of a step (weights, gradients, optimizer state and activations) is at most this and the "
            "step the fastest: bytes, or a string such as '20GiB' (docs/memory.md)."
        },
    )
    chunked_loss: bool = field(
        default=True,
        metadata={
            "help": "Compute a token-wise cross-entropy in chunks of tokens, so that logits of (tokens x vocabulary) "
            "are never held; they are made where something else reads them (docs/memory.md)."
        },
    )
    lqs_batches: int = field(default=4, metadata={"help": "Micro-batches that lqs measures, exact meanwhile."})
    lqs_threshold: float = field(
        default=0.5, metadata={"help": "lqs takes per_token scales where e_token < lqs_threshold * e_tensor."}
    )
    selection: str | None = field(
        default=None,
        metadata={
            "help": "budget, which max_grad_error and max_bytes imply: measure every layer's candidates in the first "
            "lqs_batches micro-batches, exact meanwhile, and choose by that budget (docs/selection.md); None: as "
            "configured. Layers with an override keep it."
        },
    )
    max_grad_error: float | None = field(
        default=None,
        metadata={
            "help": "A budget: each layer takes the cheapest candidate whose relative gradient error, of "
            "single micro-batches and of their sum, is at most this; a layer without one stays exact."
        },
    )
    max_bytes: int | str | None = field(
        default=None,
        metadata={
            "help": "A budget: the most exact plan whose kept inputs of one micro-batch fit: bytes, '24MB', "
            "'1.5GiB', or '12.5%' of what exact training keeps of them."
        },
    )

    __setattr__ = object.__setattr__

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_compress()
        self._check_whole("seed", 0, 2**62)
        self._check_whole("min_features", 1)
        self._check_whole("lqs_batches", 1)
        self._check_number("lqs_threshold", 0 <= _number(self.lqs_threshold) <= 1, "a number from 0 to 1")
        for name in ("include", "exclude", "linear_classes"):
            value = getattr(self, name)
            if not isinstance(value, (list, tuple)) or not all(isinstance(p, str) for p in value):
                raise ValueError(f"HOTConfig.{name}={value!r} must be a list of strings, for example ['*.q_proj'].")
            setattr(self, name, list(value))
        for name in ("skip_heads", "share", "chunked_loss"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"HOTConfig.{name}={getattr(self, name)!r} must be True or False.")
        if self.lora is not None and not isinstance(self.lora, bool):
            raise ValueError(f"HOTConfig.lora={self.lora!r} must be True, False, or None for automatic.")
        self._check_selection()
        self._check_overrides()

    def _check_number(self, name: str, right: bool, what: str) -> None:
        if not right:
            raise ValueError(f"HOTConfig.{name}={getattr(self, name)!r} must be {what}.")

    def _check_compress(self) -> None:
        if isinstance(self.compress, dict):
            wrong = {p: m for p, m in self.compress.items() if not isinstance(p, str) or m not in BLOCK_MODES}
            if wrong or not self.compress:
                raise ValueError(
                    f"HOTConfig.compress={wrong or self.compress!r} must map patterns on names of blocks to modes of "
                    f"{list(BLOCK_MODES)}, for example {{'model.layers.*': 'block'}}."
                )
        else:
            self._check_one_of("compress", COMPRESSIONS)
        if self.memory is not None:
            byte_budget(self.memory, name="memory")
            if self.compress != "auto":
                raise ValueError(
                    f"HOTConfig.memory={self.memory!r} chooses compress for each block itself: leave "
                    f"compress={self.compress!r} out."
                )
            if self._measures:
                raise ValueError(
                    f"HOTConfig.memory={self.memory!r} cannot be kept while a selection measures, which takes exact "
                    "inputs: leave selection, max_grad_error and max_bytes out, and write "
                    "grad_input_granularity='per_token' in place of 'lqs'."
                )

    @property
    def _measures(self) -> bool:
        """Whether layers measure before their plans are chosen."""
        budgets = (self.selection, self.max_grad_error, self.max_bytes)
        return self.grad_input_granularity == "lqs" or any(value is not None for value in budgets)

    def _check_selection(self) -> None:
        error, size = self.max_grad_error, self.max_bytes
        if self._measures and isinstance(self.compress, dict) and "exact" in self.compress.values():
            raise ValueError(
                f"HOTConfig.compress={self.compress!r} has blocks that are exact, whose layers a selection could never "
                "measure: exclude their layers instead."
            )
        if self.selection is None and error is None and size is None:
            return
        if self.selection is None:
            self.selection = "budget"
        self._check_one_of("selection", ("budget", None))
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
        if error is not None:
            self._check_number("max_grad_error", 0 < _number(error) < 1, "a number between 0 and 1, such as 0.15")
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
                self._plan(settings)
            except ValueError as error:
                raise ValueError(f"HOTConfig.overrides[{pattern!r}]: {error}") from None

    def _plan(self, changes: dict[str, Any]) -> Plan:
        return Plan(**{**{name: getattr(self, name) for name in PLAN_FIELDS}, **changes})

    def compress_of(self, matches: Callable[[str], bool]) -> str:
        """The mode of one block; ``matches`` tells whether a pattern of ``compress`` is for it."""
        if isinstance(self.compress, str):
            return self.compress
        return next((mode for pattern, mode in reversed(self.compress.items()) if matches(pattern)), "auto")

    def plan(self, matches: Callable[[str], bool] = lambda pattern: False) -> Plan:
        """The plan of one layer; ``matches`` tells whether an override's pattern is for it."""
        changes: dict[str, Any] = {}
        for pattern, settings in self.overrides.items():
            if matches(pattern):
                changes.update(settings)
        return self._plan(changes)

    # Presets (docs/spec.md, section 8). Keyword arguments change single fields.

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
    def from_plan(cls, plan: SelectedPlan | str | Path, **changes) -> HOTConfig:
        """A selected plan, or the file of one, as a configuration: an override for each of its layers, nothing to
        measure.

        ``changes`` are other fields; an ``overrides`` among them comes after the plan's.

        Raises:
            FileNotFoundError, ValueError: for a file that is missing or no plan, naming it.
        """
        plan = plan if isinstance(plan, SelectedPlan) else SelectedPlan.load(plan)
        planned = {glob.escape(name): asdict(layer.plan) for name, layer in plan.layers.items()}
        overrides = {**plan.config_settings.get("overrides", {}), **planned, **changes.pop("overrides", {})}
        return cls.from_dict({**plan.config_settings, **changes, "overrides": overrides})

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
        settings = without_retired(settings)
        if isinstance(overrides := settings.get("overrides"), dict):
            settings["overrides"] = {
                pattern: without_retired(of) if isinstance(of, dict) else of for pattern, of in overrides.items()
            }
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


def _number(value: Any) -> float:
    """``value`` where it is a number, else NaN, which lies in no range."""
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


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

"""A selected plan as a small JSON file: what each layer does, what was measured of it, and the budget."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ._version import __version__
from .plan import Plan, without_retired

PLAN_NAME = "hot_plan.json"
FORMAT = 1
_KEYS = ("format", "hot_hf", "model", "budget", "config", "layers")
_BUDGET = ("selection", "max_grad_error", "max_bytes")


@dataclass(frozen=True)
class Score:
    """What was measured of one candidate, against the exact gradient, over all micro-batches and ranks.

    * ``error``: relative Frobenius error of single gradients, ``sqrt(sum |e_k|^2 / sum |g_k|^2)``;
    * ``accumulated``: that of their sum, ``|sum e_k| / |sum g_k|``: what an optimizer moves by;
    * ``repeated``: share of the error that is the same every time, ``|sum e_k|^2 / (K sum |e_k|^2)``: 1 / K where
      errors are independent, 1 where they repeat;
    * ``shrinkage``: ``sum <e_k, g_k> / sum |g_k|^2``, negative where gradients come out too short.
    """

    error: float = 0.0
    accumulated: float = 0.0
    repeated: float = 0.0
    shrinkage: float = 0.0

    @property
    def bound(self) -> float:
        """What a budget compares with."""
        return max(self.error, self.accumulated)


@dataclass(frozen=True)
class Choice:
    """What one layer does and what was measured of it: scores are None where nothing was.

    ``bytes`` and ``exact_bytes`` in one micro-batch, counted at the first layer that keeps a shared copy;
    ``operations`` as a share of those of exact products; ``batches`` gradients were measured, over all ranks.
    """

    plan: Plan
    grad_input: Score | None = None
    grad_weight: Score | None = None
    bytes: int = 0
    exact_bytes: int = 0
    operations: float = 1.0
    batches: int = 0


@dataclass
class SelectedPlan:
    """``of(model)`` after the choice, ``save`` and ``load``; ``HOTConfig.from_plan`` uses it again; ``print`` it for a
    table.

    ``config_settings`` are those of the HOTConfig that was measured with, without its budget, which is in ``budget``.
    """

    model: str
    budget: dict[str, float | int | str]
    config_settings: dict[str, Any]
    layers: dict[str, Choice] = field(default_factory=dict)
    version: str = ""

    @classmethod
    def of(cls, model: nn.Module) -> SelectedPlan:
        """The plan that a budget has chosen for ``model``.

        Raises:
            ValueError: when it has chosen nothing (yet).
        """
        states = [m.hot for m in model.modules() if getattr(m, "hot", None) is not None and m.hot.choice is not None]
        if not states:
            raise ValueError(
                f"No plan was selected for this {type(model).__name__}: apply_hot with HOTConfig(selection='budget', "
                "...), train for lqs_batches micro-batches, and call hot_hf.fix_selection(model)."
            )
        settings = states[0].config.to_dict()
        budget = {name: settings.pop(name) for name in _BUDGET}
        del budget["selection"]
        layers = {hot.name: hot.choice for hot in states}
        found = {name: value for name, value in budget.items() if value is not None}
        return cls(type(model).__name__.removeprefix("HOT"), found, settings, layers, __version__)

    def save(self, path: str | Path) -> Path:
        """Write it as JSON and return the path."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        layers = ",\n    ".join(f"{json.dumps(n)}: {json.dumps(_rounded(asdict(x)))}" for n, x in self.layers.items())
        head = {"format": FORMAT, "hot_hf": self.version, "model": self.model, "budget": self.budget}
        lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in (*head.items(), ("config", self.config_settings))]
        path.write_text("{\n  " + ",\n  ".join(lines) + ',\n  "layers": {\n    ' + layers + "\n  }\n}\n")
        return path

    @classmethod
    def load(cls, path: str | Path) -> SelectedPlan:
        """The inverse of ``save``.

        Raises:
            FileNotFoundError: where there is no such file.
            ValueError: for a file that is no plan, naming it and what is wrong.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"No plan at {str(path)!r}; SelectedPlan.of(model).save(path) writes one.")
        try:
            values = json.loads(path.read_text())
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not valid JSON ({error}); SelectedPlan.save writes it.") from None
        missing = [key for key in _KEYS if not isinstance(values, dict) or key not in values]
        if missing:
            raise ValueError(f"{path} is no plan: it lacks {missing}; SelectedPlan.save writes plans.")
        if values["format"] != FORMAT:
            raise ValueError(f"{path} has format {values['format']!r}, this version of hot_hf reads {FORMAT}.")
        layers = {}
        for name, layer in values["layers"].items():
            try:
                layers[name] = _choice(layer)
            except (TypeError, KeyError, AttributeError, ValueError) as error:
                raise ValueError(f"{path}: layer {name!r} is not as SelectedPlan.save writes it ({error}).") from None
        return cls(values["model"], values["budget"], values["config"], layers, values["hot_hf"])

    @property
    def bytes(self) -> int:
        """Kept inputs of all its layers in one micro-batch."""
        return sum(layer.bytes for layer in self.layers.values())

    @property
    def exact_bytes(self) -> int:
        """The same in exact training."""
        return sum(layer.exact_bytes for layer in self.layers.values())

    def __str__(self) -> str:
        """A row per layer: plan, errors of single gradients and of their sum, bytes, bit operations."""
        table = [("layer", "g_x", "error", "summed", "kept", "error", "summed", "KiB", "of", "operations")]
        for name, layer in self.layers.items():
            table.append((
                name,
                input_with_block(layer.plan),
                *_errors(layer.grad_input),
                kept_with_block(layer.plan),
                *_errors(layer.grad_weight),
                f"{layer.bytes / 2**10:,.1f}",
                f"{layer.exact_bytes / 2**10:,.1f}",
                f"{layer.operations:.1%}",
            ))  # fmt: skip
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in table]
        lines.insert(1, "-" * max(map(len, lines)))
        for label, count in Counter(layer.plan.label() for layer in self.layers.values()).most_common():
            lines.append(f"{count:4} layers: {label}")
        budget = ", ".join(f"{k}={v}" for k, v in self.budget.items())
        share = f" ({self.bytes / self.exact_bytes:.1%})" if self.exact_bytes else ""
        lines.append(
            f"{self.model}, {budget}: {self.bytes / 2**20:,.2f} of {self.exact_bytes / 2**20:,.2f} MiB{share} of "
            "inputs kept per micro-batch"
        )
        return "\n".join(lines)


def _choice(values: dict[str, Any]) -> Choice:
    scores = {k: None if values[k] is None else Score(**values[k]) for k in ("grad_input", "grad_weight")}
    return Choice(**{**values, **scores, "plan": Plan(**without_retired(values["plan"]))})


def input_with_block(plan: Plan) -> str:
    """``INT8 per_token H16``."""
    return plan.input_label + ("" if plan.grad_input_bits is None else f" H{plan.block_size}")


def kept_with_block(plan: Plan) -> str:
    """``ht_int4 H16``."""
    return plan.kept_label + (f" H{plan.block_size}" if plan.activation_format == "ht_int4" else "")


def _errors(score: Score | None) -> tuple[str, str]:
    return ("-", "-") if score is None else (f"{score.error:.3f}", f"{score.accumulated:.3f}")


def _rounded(value: Any) -> Any:
    """Floats to four digits, as precise as they were measured."""
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value

"""What apply_hot did, layer by layer, and how much of the model that is."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

from torch import nn

from .class_swap import original_class
from .decisions import LEFT_OUT
from .layer_kinds import CONV1D, is_linear, kind_of, kind_or_linear

logger = logging.getLogger("hot_hf")
PATCHED = "patched"
UNSEEN = "not patched yet: apply_hot has not seen it"
LOW = 0.5  # share of multiply-adds below which a model is said to be hardly covered


def _numel(parameter: nn.Parameter) -> int:
    """Elements of a parameter; of the whole one where ZeRO-3 shows a placeholder."""
    return getattr(parameter, "ds_numel", parameter.numel())


def _multiply_adds(module: nn.Module) -> int:
    """Multiply-adds per position of the input; 0 for what does not multiply by a weight matrix."""
    if isinstance(module, nn.Linear) or kind_of(module) is CONV1D:
        out_features, in_features = kind_or_linear(module).features(module)
        return out_features * in_features
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return module.weight.numel()
    # Fused mixture-of-experts weights: 3-D parameters held directly by their module. A leading 1 is a position
    # embedding or a class token, which is added.
    return sum(p.numel() for p in module.parameters(recurse=False) if p.dim() == 3 and p.shape[0] > 1)


def trains(module: nn.Module) -> bool:
    """Whether a linear layer's weight needs a gradient; where none does, HOT keeps nothing of its input."""
    weights = [p for name, p in module.named_parameters(recurse=False) if "bias" not in name]
    return any(w.requires_grad for w in (*weights, kind_or_linear(module).weight(module)))


@dataclass(frozen=True)
class ModuleRow:
    """One layer: ``action`` is ``patched`` with its plan, or ``exact`` with the reason."""

    name: str
    kind: str
    shape: tuple[int, int]
    action: str
    reason: str
    parameters: int
    multiply_adds: int

    @classmethod
    def of(cls, name: str, module: nn.Module, skip_reason: str | None, plan: str) -> ModuleRow:
        if skip_reason is None and not trains(module):
            plan = plan.partition(" / ")[0] + "; frozen, keeps nothing"
        return cls(
            name or "(root)",
            original_class(module).__name__,
            kind_or_linear(module).features(module),
            PATCHED if skip_reason is None else "exact",
            plan if skip_reason is None else skip_reason,
            sum(map(_numel, module.parameters(recurse=False))),
            _multiply_adds(module),
        )


@dataclass
class CoverageReport:
    """Every linear layer and what became of it; other weights that multiply are counted in ``others``."""

    model: str
    total_parameters: int
    total_multiply_adds: int
    others: dict[str, tuple[int, int]]  # class name: (modules, parameters)
    rows: list[ModuleRow] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # about the whole model, printed last

    @classmethod
    def of(cls, model: nn.Module) -> CoverageReport:
        """An empty report with the totals of ``model``."""
        others: dict[str, tuple[int, int]] = {}
        for module in model.modules():
            if not is_linear(module) and _multiply_adds(module):
                count, parameters = others.get(type(module).__name__, (0, 0))
                own = sum(map(_numel, module.parameters(recurse=False)))
                others[type(module).__name__] = (count + 1, parameters + own)
        return cls(
            type(model).__name__,
            sum(map(_numel, model.parameters())),
            sum(_multiply_adds(m) for m in model.modules()),
            others,
        )

    def alias(self, name: str, first_name: str) -> None:
        """Note that a module was reached again under a second name."""
        self.aliases[name] = first_name

    @property
    def patched(self) -> list[str]:
        return [row.name for row in self.rows if row.action == PATCHED]

    @property
    def skipped(self) -> dict[str, str]:
        """Reason by name of every linear layer that stays exact."""
        return {row.name: row.reason for row in self.rows if row.action != PATCHED}

    def _share(self, attribute: str, total: int) -> float:
        return sum(getattr(r, attribute) for r in self.rows if r.action == PATCHED) / total if total else 0.0

    @property
    def parameter_share(self) -> float:
        """Share of all parameters that lie in patched layers."""
        return self._share("parameters", self.total_parameters)

    @property
    def multiply_add_share(self) -> float:
        """Share of the weight products' multiply-adds, counted per position of each layer's input."""
        return self._share("multiply_adds", self.total_multiply_adds)

    @property
    def unseen(self) -> list[str]:
        """Layers that the configuration is for and that are not patched: made, or put in, after apply_hot."""
        return [row.name for row in self.rows if row.reason == UNSEEN]

    @property
    def low(self) -> bool:
        """Whether patched layers have less than half of the multiply-adds that the user has not left out himself.

        Never with patched adapters: there the inputs of the adapters are what is kept, whatever the base is.
        """
        left_out = sum(row.multiply_adds for row in self.rows if row.reason in LEFT_OUT)
        covered = sum(row.multiply_adds for row in self.rows if row.action == PATCHED)
        adapters = any(".lora_" in name for name in self.patched)
        return not adapters and covered < LOW * (self.total_multiply_adds - left_out)

    @property
    def summary(self) -> str:
        """One line with the counts and shares."""
        return (
            f"{self.model}: {len(self.patched)} of {len(self.rows)} linear layers patched, "
            f"{self.parameter_share:.1%} of parameters, {self.multiply_add_share:.1%} of multiply-adds"
        )

    def announce(self) -> None:
        """Log the summary to ``logging.getLogger("hot_hf")``: a warning where coverage is low, else at level INFO."""
        if self.low:
            logger.warning(
                "%s. HOT changes little of this model: print(hot_hf.report_of(model)) says why, layer by layer.",
                self.summary,
            )
        else:
            logger.info("%s", self.summary)

    def __str__(self) -> str:
        """Layers grouped by their last names, shapes and fates, largest first."""
        groups: Counter = Counter()
        for row in self.rows:
            # An adapter's own name (lora_A.default) says nothing without the one before it.
            last = row.name.split(".")[-2 if ".lora_" in row.name else -1 :]
            key = (".".join(last), row.kind, row.shape, row.action, row.reason)
            groups[key] += 1
        table = [("layer", "count", "out x in", "", "how / why")]
        for (last, kind, shape, action, reason), count in groups.items():
            table.append((f"{last} ({kind})", str(count), f"{shape[0]} x {shape[1]}", action, reason))
        for kind, (count, parameters) in self.others.items():
            table.append((kind, str(count), f"{parameters:,} param.", "exact", "not a linear layer"))
        widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in table]
        lines.insert(1, "-" * max(map(len, lines)))
        lines.append(self.summary)
        for name, first in self.aliases.items():
            lines.append(f"{name} is {first} under a second name")
        lines += self.notes
        return "\n".join(lines)

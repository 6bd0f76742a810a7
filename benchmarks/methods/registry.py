"""The methods: a name, a full configuration that goes into every row, and how it is applied to a model."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from fidelity.store import settings_of
from torch import Tensor, nn
from transformers import TrainerCallback

from hot_hf import HOTConfig
from hot_hf.rounding import StepClock, layer_seed

from .functions import FUNCTIONS


@dataclass(frozen=True)
class Method:
    """``group``: exact, rival, hot or ablation. Exactly one of ``hot`` and ``function`` says what the backward does;
    with neither it is exact. ``ingredient`` heads the ablation's tables."""

    name: str
    label: str
    group: str
    hot: HOTConfig | None = None
    function: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)  # of TrainingArguments
    ingredient: str = ""

    def config(self, seed: int, lora: bool) -> HOTConfig | None:
        """The HOTConfig of one run."""
        if self.hot is None:
            return None
        return HOTConfig.from_dict({**self.hot.to_dict(), "seed": seed})

    def configuration(self, seed: int, lora: bool) -> dict[str, Any]:
        """All of it as JSON types: what a row stores, and what makes it this run and no other."""
        config = self.config(seed, lora)
        return {
            "hot": settings_of(config),
            "function": self.function,
            "settings": self.settings,
            "arguments": self.arguments,
        }

    def prepare(self, linears: list[str], seed: int) -> Callable[[nn.Module], TrainerCallback | None]:
        """Puts a rival's Function on the layers named in ``linears``; HOT and exact training need nothing."""

        def apply(model: nn.Module) -> TrainerCallback | None:
            if self.function is None:
                return None
            clock = StepClock()
            for name in linears:
                layer = model.get_submodule(name)
                layer.forward = types.MethodType(
                    _forward(FUNCTIONS[self.function], self.settings, name, seed, clock), layer
                )
            return _Step(clock)

        return apply


def _forward(function: type, settings: dict[str, Any], name: str, seed: int, clock: StepClock):
    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        if not x.requires_grad and not self.weight.requires_grad:
            return F.linear(x, self.weight, self.bias)
        return function.apply(x, self.weight, self.bias, settings, layer_seed(seed, name, clock.step))

    return forward


class _Step(TrainerCallback):
    """Random rounding is keyed by the step, so that a continued run draws what the uninterrupted one would have."""

    def __init__(self, clock: StepClock) -> None:
        self.clock = clock

    def on_step_begin(self, args, state, control, **kwargs):
        self.clock.set(state.global_step)


EXACT = Method("exact", "exact float32", "exact")
DEFAULT = Method("default", "HOT default: g_x INT8 per token, `ht_int4`", "hot", HOTConfig())
PAPER = Method("paper", "HOT paper(): INT4 LQS, HLA r=8 INT8, per tensor, pseudo-stochastic", "hot", HOTConfig.paper())

BFLOAT16 = Method("bf16", "exact, bfloat16 autocast", "exact", arguments={"bf16": True})


def _plain(name: str, label: str, bits: int, stochastic: bool = False) -> Method:
    return Method(name, label, "rival", function="plain_integer", settings={"bits": bits, "stochastic": stochastic})


RIVALS = (
    Method("lbp-wht", "LBP-WHT r=8 of 16, float32", "rival", function="lbp_wht", settings={"rank": 8}),
    _plain("int8", "INT8 per tensor, no transform", 8),
    _plain("int4", "INT4 per tensor, no transform", 4),
    _plain("int4-stochastic", "INT4 per tensor, no transform, g stochastic", 4, stochastic=True),
    Method("luq", "LUQ: g FP4 logarithmic, W and x INT4", "rival", function="luq", settings={"exponent_bits": 3}),
    Method("switchback", "SwitchBack: g_x INT8, g_w exact", "rival", function="switchback"),
)


def _budget_plans() -> tuple[Method, ...]:
    """Plans that a budget of error or of bytes chooses layer by layer."""
    budgets = [
        *((f"{e:g}", f"gradient error at most {e:g}", {"max_grad_error": e}) for e in (0.1, 0.2)),
        ("eighth", "kept inputs at most 12.5%", {"max_bytes": "12.5%"}),
    ]
    return tuple(
        Method(f"budget-{name}", f"HOT budget plan: {what}", "hot", HOTConfig(selection="budget", **changes))
        for name, what, changes in budgets
    )


PLANS = (
    DEFAULT,
    *_budget_plans(),
    Method("smallest", "HOT smallest(): g_x INT8 per token, HLA r=8 INT4", "hot", HOTConfig.smallest()),
    Method("fast", "HOT fast(): g_x INT4 per token, HLA r=8 INT8", "hot", HOTConfig.fast()),
    PAPER,
)


def _changed(name: str, label: str, ingredient: str, **changes: Any) -> Method:
    return Method(f"ablation-{name}", label, "ablation", HOTConfig(**changes), ingredient=ingredient)


_HLA = {"activation_format": "hla_int8"}
ABLATION = (
    _changed("no-transform", "no transform", "transform", block_size=1),
    *(_changed(f"block-{n}", f"block of {n}", "block", block_size=n) for n in (32, 64, 128)),
    _changed("g_x-only", "g_x INT8, g_w exact", "which gradient", activation_format="none"),
    _changed("g_x-int4-only", "g_x INT4, g_w exact", "which gradient", activation_format="none", grad_input_bits=4),
    _changed("g_w-only", "g_x exact, g_w `ht_int4`", "which gradient", grad_input_bits=None),
    _changed("g_w-hla-only", "g_x exact, g_w HLA r=8 INT8", "which gradient", grad_input_bits=None, **_HLA),
    _changed("g_x-int4", "g_x INT4 per token", "bits of g_x", grad_input_bits=4),
    _changed("g_x-int4-no-transform", "g_x INT4 per token, no transform", "transform", grad_input_bits=4, block_size=1),
    _changed("g_x-per-tensor", "g_x INT8 per tensor", "granularity", grad_input_granularity="per_tensor"),
    _changed(
        "g_x-int4-per-tensor",
        "g_x INT4 per tensor",
        "granularity",
        grad_input_bits=4,
        grad_input_granularity="per_tensor",
    ),
    _changed("g_w-per-tensor", "g_w per tensor", "granularity", grad_weight_granularity="per_tensor"),
    _changed("g_w-int8", "g_w from `int8`", "kept activation", activation_format="int8"),
    *(_changed(f"rank-{r}", f"HLA INT8 r={r}", "rank", rank=r, **_HLA) for r in (4, 8, 12, 16)),
    *(
        _changed(f"g_x-int4-{r}", f"g_x INT4, {r.replace('_', '-')}", "rounding", grad_input_bits=4, rounding=r)
        for r in ("stochastic", "pseudo_stochastic")
    ),
    _changed("stochastic", "default, stochastic", "rounding", rounding="stochastic"),
    _changed("pseudo-stochastic", "default, pseudo-stochastic", "rounding", rounding="pseudo_stochastic"),
)

METHODS = {m.name: m for m in (EXACT, BFLOAT16, *PLANS, *RIVALS, *ABLATION)}
CORE = tuple(m.name for m in (EXACT, *PLANS))  # what the claims are about
ALL = tuple(m.name for m in (EXACT, *PLANS, BFLOAT16, *RIVALS))
ABLATED = tuple(m.name for m in ABLATION)

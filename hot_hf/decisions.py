"""What becomes of each linear layer of a model, and why: from its name, its kind and the configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from .class_swap import original_class
from .config import HOTConfig
from .layer_kinds import is_linear, kind_of, kind_or_linear
from .plan import Plan

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Routers send tokens by argmax: a noisy gradient there is a wrong expert, and they are a few columns wide anyway.
HEAD_PATTERNS = ("lm_head", "*.lm_head", "*.router", "router", "*.gate", "gate", "*.shared_expert_gate")
NOT_INCLUDED, EXCLUDED, CONFIGURED_EXACT = LEFT_OUT = ("not in include", "excluded", "configured exact")  # by the user
HEAD = "output head or router (skip_heads)"
BY_BUDGET = "chosen by budget"
_WRAPPING = re.compile(r"\.(base_layer|original_module|token_adapter|modules_to_save\.[^.]+)(?=\.|$)")
_WILDCARD = re.compile(r"[*?\[]")
_ADAPTER = re.compile(r"(^|\.)(lora_[A-Z]\w*|modules_to_save)\.")


def canonical_name(name: str) -> str:
    """A module's name without what PEFT wraps around it, so that patterns mean the same before and after LoRA."""
    return _WRAPPING.sub("", name.removeprefix("base_model.model."))


def matches(name: str, pattern: str) -> bool:
    """Whether a shell-style pattern matches a full module name, as it is or without PEFT's wrapping."""
    if not _WILDCARD.search(pattern):  # a plan has one for every layer
        return pattern in (name, canonical_name(name))
    return fnmatchcase(name, pattern) or fnmatchcase(canonical_name(name), pattern)


def named_linears(model: nn.Module) -> Iterator[tuple[str, nn.Module, str | None]]:
    """(name, module, first name it was seen under) of every linear layer, aliases included."""
    seen: dict[int, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if is_linear(module):
            yield name, module, seen.get(id(module))
            seen.setdefault(id(module), name)


@dataclass(frozen=True)
class Decision:
    """``plan`` as configured; ``reason`` why the layer stays exact, None where it is patched; ``by_budget`` where a
    budget is to choose another plan."""

    plan: Plan
    reason: str | None
    by_budget: bool = False

    @property
    def label(self) -> str:
        return BY_BUDGET if self.by_budget else self.plan.label()


class Decider:
    """Decides for the layers of ``model`` under ``config``."""

    def __init__(self, model: nn.Module, config: HOTConfig) -> None:
        self.model, self.config = model, config
        self.heads = output_heads(model)
        self._head_names = {canonical_name(name) for name in _names_of(model, self.heads)}

    def __call__(self, name: str, module: nn.Module) -> Decision:
        config = self.config
        plan = config.plan(lambda pattern: matches(name, pattern))
        # Not where the user has decided, with an override.
        measured = kind_or_linear(module).measured and not any(matches(name, p) for p in config.overrides)
        by_budget = config.selection == "budget" and measured
        reason = self._reason(name, module)
        if reason is None and plan.exact and not by_budget:
            reason = CONFIGURED_EXACT
        return Decision(plan, reason, by_budget)

    def _reason(self, name: str, module: nn.Module) -> str | None:
        """Why a layer stays as it is, whatever its plan. Order: what the user said comes first."""
        config = self.config
        if not any(matches(name, p) for p in config.include):
            return NOT_INCLUDED
        if any(matches(name, p) for p in config.exclude):
            return EXCLUDED
        is_head = canonical_name(name) in self._head_names  # under any wrapper, each of its copies
        if config.skip_heads and (is_head or any(matches(name, p) for p in HEAD_PATTERNS)):
            return HEAD
        cls = original_class(module)
        if kind_of(module) is None and cls.__name__ not in config.linear_classes:
            if cls.__name__ == "NonDynamicallyQuantizableLinear":
                return "nn.MultiheadAttention reads its weight and never calls it"
            return f"subclass {cls.__name__} may have its own forward; opt in with linear_classes"
        narrow = f"narrower than min_features={config.min_features}"
        adapter = _ADAPTER.search(name)
        if adapter is not None and adapter.group(2).startswith("lora_"):
            if not adapter.group(2).startswith("lora_A"):
                return "adapter output side: its input is only r wide"
            if config.lora is False:
                return "adapter (lora=False)"
            if config.lora is None and not _base_is_frozen(self.model.get_submodule(name[: adapter.start()])):
                return "adapter beside a base that trains; lora=True patches it"
            # out_features is r, narrow on purpose: what counts is the kept input.
            return narrow if module.in_features < config.min_features else None
        if min(kind_or_linear(module).features(module)) < config.min_features:
            return narrow
        dtype = kind_or_linear(module).weight(module).dtype
        return None if dtype in SUPPORTED_DTYPES else f"unsupported dtype {dtype}"


def output_heads(model: nn.Module) -> list[nn.Module]:
    """The linear layers that make up the output embedding: PEFT's wrappers hold several, each a head."""
    getter = getattr(model, "get_output_embeddings", None)
    try:
        head = getter() if callable(getter) else None
    except NotImplementedError:  # transformers: models without one
        head = None
    if not isinstance(head, nn.Module):
        return []
    return [m for name, m in head.named_modules() if is_linear(m) and "lora_" not in name]


def _names_of(model: nn.Module, modules: list[nn.Module]) -> list[str]:
    """All names of ``modules`` in ``model``."""
    wanted = set(map(id, modules))
    return [name for name, m in model.named_modules(remove_duplicate=False) if id(m) in wanted]


def layer_names(layers: dict[str, nn.Module]) -> dict[str, str]:
    """What each layer is called in plans, checkpoints and logs, by its full name: its canonical name, or, where PEFT
    keeps several copies of one (``modules_to_save``), that for the copy that trains and their full names for others."""
    trained = [name for name, layer in layers.items() if kind_or_linear(layer).weight(layer).requires_grad]
    first: dict[str, str] = {}
    for name in (*trained, *layers):
        first.setdefault(canonical_name(name), name)
    return {name: canonical_name(name) if first[canonical_name(name)] == name else name for name in layers}


def _base_is_frozen(adapted: nn.Module) -> bool:
    """Whether the layer that an adapter is for needs no weight gradient (its bias may)."""
    weight = getattr(getattr(adapted, "base_layer", None), "weight", None)
    return weight is None or not weight.requires_grad

"""apply_hot and remove_hot: which layers are patched, which are not and why."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import nn

from . import ops
from .block import HOTBlockMixin, changed_block, compress_blocks, restore_blocks
from .config import HOTConfig
from .kinds import LINEAR, features, hot_class_of, is_linear, kind_of, original_class
from .layers import HOTMixin, HOTState, is_dtensor, swap_class
from .report import LEFT_OUT, UNSEEN, CoverageReport, ModuleRow, trains
from .rounding import StepClock
from .saving import SavePretrained, configurations
from .saving import config_of as config_of
from .selection import Budget, BudgetProbe, GranularityProbe

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Routers send tokens by argmax: a noisy gradient there is a wrong expert, and they are a few columns wide anyway.
HEAD_PATTERNS = ("lm_head", "*.lm_head", "*.router", "router", "*.gate", "gate", "*.shared_expert_gate")
BY_BUDGET = "chosen by budget"
_WRAPPING = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.|$)")
_WILDCARD = re.compile(r"[*?\[]")
_ADAPTER = re.compile(r"(^|\.)(lora_[A-Z]\w*|modules_to_save)\.")


class HOTPatchError(RuntimeError):
    """The model cannot be patched as asked; the message names the module and the remedy."""


def canonical_name(name: str) -> str:
    """A module's name without what PEFT wraps around it, so that patterns mean the same before and after LoRA."""
    return _WRAPPING.sub("", name.removeprefix("base_model.model."))


def matches(name: str, pattern: str) -> bool:
    """Whether a shell-style pattern matches a full module name, as it is or without PEFT's wrapping."""
    if not _WILDCARD.search(pattern):  # a plan has one for every layer
        return pattern in (name, canonical_name(name))
    return fnmatchcase(name, pattern) or fnmatchcase(canonical_name(name), pattern)


def _output_embedding(model: nn.Module) -> nn.Module | None:
    getter = getattr(model, "get_output_embeddings", None)
    try:
        head = getter() if callable(getter) else None
        return getattr(head, "base_layer", head)  # the layer inside PEFT's wrapper
    except NotImplementedError:  # transformers: models without one
        return None


def _reason_to_skip(name: str, module: nn.Module, config: HOTConfig, head: nn.Module | None) -> str | None:
    """Why a linear layer stays as it is, or None when it is to be patched. Order: what the user said comes first."""
    if not any(matches(name, p) for p in config.include):
        return LEFT_OUT[0]
    if any(matches(name, p) for p in config.exclude):
        return LEFT_OUT[1]
    kind, cls = kind_of(module), original_class(module)
    if kind is None and cls.__name__ not in config.linear_classes:
        if cls.__name__ == "NonDynamicallyQuantizableLinear":
            return "nn.MultiheadAttention reads its weight and never calls it"
        return f"subclass {cls.__name__} may have its own forward; opt in with linear_classes"
    adapter = _ADAPTER.search(name)
    if adapter is not None and adapter.group(2).startswith("lora_"):
        if not adapter.group(2).startswith("lora_A"):
            return "adapter output side: its input is only r wide"
        if not config.lora:
            return "adapter; patch lora_A with lora=True"
        if module.in_features < config.min_features:
            return f"narrower than min_features={config.min_features}"
        return None  # out_features is r, narrow on purpose: what counts is the kept input
    if config.skip_heads and _is_head(name, module, head):
        return "output head or router (skip_heads)"
    if min(features(module)) < config.min_features:
        return f"narrower than min_features={config.min_features}"
    dtype = (kind or LINEAR).weight(module).dtype
    if dtype not in SUPPORTED_DTYPES:
        return f"unsupported dtype {dtype}"
    if config.plan(lambda p: matches(name, p)).exact and not (
        config.selection == "budget" and _in_budget(name, module, config)
    ):
        return LEFT_OUT[2]
    return None


def _in_budget(name: str, module: nn.Module, config: HOTConfig) -> bool:
    """Whether a selection by budget decides for a layer: not where the user has, with an override."""
    return (kind_of(module) or LINEAR).measured and not any(matches(name, p) for p in config.overrides)


def _is_head(name: str, module: nn.Module, head: nn.Module | None) -> bool:
    return module is head or any(matches(name, p) for p in HEAD_PATTERNS)


def _named_linears(model: nn.Module) -> Iterator[tuple[str, nn.Module, str | None]]:
    """(name, module, first name it was seen under) of every linear layer, aliases included."""
    seen: dict[int, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if is_linear(module):
            yield name, module, seen.get(id(module))
            seen.setdefault(id(module), name)


def _check_wrapping(name: str, module: nn.Module, under_fsdp: bool) -> None:
    """Refuse what a parallel engine has already made of a layer; looked up by name, so that none is imported."""
    name = name or "the root module"
    if any(c.__name__ == "FSDPModule" for c in original_class(module).__mro__):
        raise HOTPatchError(
            f"{name} is sharded by itself (fully_shard made it a {type(module).__name__}). Call apply_hot first and "
            "fully_shard afterwards; layers inside a sharded block may be patched at any time."
        )
    weight = (kind_of(module) or LINEAR).weight(module)
    if is_dtensor(weight) and not under_fsdp:
        raise HOTPatchError(
            f"{name} has a weight split by tensor parallelism (a DTensor of {tuple(weight.shape)}). HOT does not "
            "split its integer products: load without tp_plan and use FSDP2 or ZeRO-3 instead, or leave the "
            "layer out with HOTConfig(exclude=[...])."
        )


def _check_patchable(name: str, module: nn.Module) -> None:
    cls = original_class(module)
    own = module.__dict__.get("forward")
    # What accelerate's hooks call, and the plain method they leave behind when removed, follow the class swap.
    inner = module.__dict__.get("_old_forward") if hasattr(module, "_hf_hook") else own
    if own is not None and getattr(inner, "__func__", None) is not type(module).forward:
        raise HOTPatchError(
            f"{name or 'the root module'} carries a forward of its own ({own!r}), as tensor parallelism and other "
            "wrappers install it; HOT's would never run. Call apply_hot before wrapping the model, or leave the layer "
            "out with HOTConfig(exclude=[...])."
        )
    if kind_of(module) is None and cls.forward is not nn.Linear.forward:
        raise HOTPatchError(
            f"{name or 'the root module'} is a {cls.__name__}, whose forward is its own: HOT's would take its place "
            f"and what it adds be lost. Take {cls.__name__!r} out of HOTConfig.linear_classes."
        )


def apply_hot(model: nn.Module, config: HOTConfig | dict | str | None = None) -> CoverageReport:
    """Patch the linear layers of ``model`` in place and report on every one.

    Classes are swapped; parameters, names, hooks, ties and state_dict stay (DESIGN decision 1). A patched model may be
    patched again: the new configuration replaces the old one.

    Layers that are made afterwards are not patched. Where adapters come after it (``get_peft_model`` on a patched
    model) and ``config.lora`` is set, call it once more with the same configuration before the first step, as
    ``HOTCallback`` does by itself; a frozen base keeps nothing, so that without ``lora=True`` HOT saves no memory under
    LoRA, of which a warning tells.

    Args:
        model: any nn.Module, a transformers or PEFT model, or a single nn.Linear.
        config: a HOTConfig, its dict, a preset name, or None for the default. The model keeps a copy.

    Returns:
        a CoverageReport; ``print`` it for a table. ``report_of(model)`` gives it again at any time.

    Raises:
        HOTPatchError: when nothing is left to patch, when a pattern matches no layer, or when a layer has a forward
            of its own. Nothing is changed then.
    """
    config = copy.deepcopy(HOTConfig.coerce(config))
    linears = list(_named_linears(model))
    _check_patterns(linears, config)
    head = _output_embedding(model)
    under_fsdp = any(c.__name__ == "FSDPModule" for m in model.modules() for c in type(m).__mro__)
    report = CoverageReport.of(model)
    to_patch: list[tuple[str, nn.Module]] = []
    for name, module, first_name in linears:
        if first_name is not None:
            report.alias(name, first_name)
            continue
        reason = _reason_to_skip(name, module, config, head)
        if reason not in LEFT_OUT[:2] and not (config.skip_heads and _is_head(name, module, head)):
            _check_wrapping(name, module, under_fsdp)
        if reason is None:
            _check_patchable(name, module)
            to_patch.append((name, module))
        by_budget = config.selection == "budget" and _in_budget(name, module, config)
        label = BY_BUDGET if by_budget else config.plan(lambda p, n=name: matches(n, p)).label()
        report.rows.append(ModuleRow.of(name, module, reason, label))
    if not to_patch and LEFT_OUT[2] not in report.skipped.values():
        raise HOTPatchError(
            f"apply_hot found nothing to patch in {type(model).__name__}:\n{report}\n"
            "Widen include, shorten exclude, or lower min_features."
        )
    _unpatch(model)
    clock, budget = StepClock(), Budget(config) if config.selection == "budget" else None
    for name, module in to_patch:
        _patch(name, module, config, clock, budget)
    if not torch.accelerator.is_available() and any(p.is_cpu for _, m in to_patch for p in m.parameters(recurse=False)):
        ops.cpu.warm_up()  # the first time on a machine this compiles for seconds: here, not inside the first step
    if config.compress == "block":
        report.notes += compress_blocks(model)
    if (advice := advice_on_adapters(model)) is not None:
        warnings.warn(advice, stacklevel=2)
    return report


def _check_patterns(linears: list[tuple[str, nn.Module, str | None]], config: HOTConfig) -> None:
    """Refuse a pattern that matches no layer, or only a second name of one."""
    names = [name for name, _, first_name in linears if first_name is None]
    for where, patterns in (
        ("include", [p for p in config.include if p != "*"]),
        ("exclude", config.exclude),
        ("overrides", list(config.overrides)),
    ):
        missing = [pattern for pattern in patterns if not any(matches(name, pattern) for name in names)]
        for pattern in missing:
            for name, _, first_name in linears:
                if matches(name, pattern):
                    raise HOTPatchError(
                        f"HOTConfig.{where}: {pattern!r} matches {name}, a second name of {first_name}; write that."
                    )
        if missing:
            which = ", ".join(map(repr, missing[:5])) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise HOTPatchError(
                f"HOTConfig.{where}: {which} matches no linear layer. Patterns match full names, such as "
                f"{[canonical_name(n) for n in names[:3]]}; write '*.{missing[0]}' to match the end of a name."
            )


def report_of(model: nn.Module) -> CoverageReport | None:
    """What HOT does to ``model`` now, layer by layer, or None where no layer is patched.

    As ``apply_hot`` reported it, with the plans that a selection has chosen since, and with the layers that it has not
    seen because they were made later (``CoverageReport.unseen``).
    """
    found = configurations(model)
    if not found:
        return None
    report, head = CoverageReport.of(model), _output_embedding(model)
    for name, module, first_name in _named_linears(model):
        if first_name is not None:
            report.alias(name, first_name)
        elif isinstance(module, HOTMixin):
            label = BY_BUDGET if isinstance(module.hot.probe, BudgetProbe) else module.hot.plan.label()
            report.rows.append(ModuleRow.of(name, module, None, label))
        else:
            reason = _reason_to_skip(name, module, found[0][0], head) or UNSEEN
            report.rows.append(ModuleRow.of(name, module, reason, ""))
    if blocks := sum(isinstance(m, HOTBlockMixin) for m in model.modules()):
        report.notes.append(f"compress='block': {blocks} blocks")
    if len(found) > 1:
        report.notes.append(f"{len(found)} configurations: apply_hot was called on parts of the model")
    return report


def patched_as_a_whole(model: nn.Module) -> bool:
    """Whether ``model`` itself was given to apply_hot: layers know the names they had there."""
    patched = [(name, m) for name, m in model.named_modules() if isinstance(m, HOTMixin)]
    return bool(patched) and all(canonical_name(name) == m.hot.name for name, m in patched)


def advice_on_adapters(model: nn.Module) -> str | None:
    """What to say of a model whose adapters train while all that HOT has patched is frozen, or None."""
    adapters = False
    for name, module in model.named_modules():
        if isinstance(module, HOTMixin):
            if trains(module):
                return None
        elif ".lora_A." in name and is_linear(module):
            adapters = adapters or trains(module)
    configs = [config for config, _ in configurations(model)]
    if not adapters or all(config.lora for config in configs):
        return None
    block = any(config.compress == "block" for config in configs)
    saves = "saves memory only by compress='block'" if block else "saves no memory"
    return (
        f"hot_hf: every patched layer is frozen and only the adapters train, so HOT keeps nothing, {saves}, and "
        "its gradients are inexact all the same. HOTConfig(lora=True) patches lora_A as well, whose kept inputs are "
        "what fills memory under LoRA."
    )


def _patch(name: str, module: nn.Module, config: HOTConfig, clock: StepClock, budget: Budget | None) -> None:
    plan = config.plan(lambda p: matches(name, p))
    kind = kind_of(module) or LINEAR
    probe = None
    if budget is not None and _in_budget(name, module, config):
        probe = BudgetProbe(plan, canonical_name(name), config.seed, budget)
    elif plan.grad_input_bits is not None and plan.grad_input_granularity == "lqs":
        if kind.measured:
            probe = GranularityProbe(plan, config.lqs_batches, config.lqs_threshold)
        else:
            plan = replace(plan, grad_input_granularity="per_token")
    original = type(module)
    module.hot = HOTState(canonical_name(name), original, plan, config.seed, config.share, clock, probe, config=config)
    swap_class(module, hot_class_of(original, kind.mixin))


def remove_hot(model: nn.Module) -> list[str]:
    """Give every patched layer its class back; returns their names. A model without HOT is left as it is.

    Raises:
        HOTPatchError: when something else has changed a layer's class since (parametrizations, fully_shard). Nothing
            is changed then.
    """
    names = _unpatch(model)
    if isinstance(vars(model).get("save_pretrained"), SavePretrained):
        del model.save_pretrained
    return names


def _unpatch(model: nn.Module) -> list[str]:
    patched = [(name, module) for name, module in model.named_modules() if isinstance(module, HOTMixin)]
    for name, module in patched:
        if type(module) is not hot_class_of(module.hot.original_class):
            raise HOTPatchError(
                f"{name or 'the root module'} is a {type(module).__name__} since apply_hot, as parametrizations and "
                "fully_shard do; undo that first, then call remove_hot or apply_hot."
            )
    if (name := changed_block(model)) is not None:
        raise HOTPatchError(f"{name} has another class since apply_hot; undo that first, then call remove_hot.")
    restore_blocks(model)
    for _, module in patched:
        swap_class(module, module.hot.original_class)
        del module.hot
    return [name for name, _ in patched]

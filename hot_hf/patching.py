"""apply_hot and remove_hot: which layers are patched, which are not and why."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace

import torch
from torch import nn

from .block import compress_blocks, find_blocks, notes_on_blocks, restore_blocks, unmatched_blocks
from .class_swap import has_changed, original_class, own_forward, restore, swap, swapped_class
from .config import HOTConfig
from .decisions import (
    BY_BUDGET,
    CONFIGURED_EXACT,
    EXCLUDED,
    HEAD,
    NOT_INCLUDED,
    Decider,
    Decision,
    canonical_name,
    layer_names,
    matches,
    named_linears,
)
from .fit import fit_at_run, forget_fit, notes_on_fit
from .layer_kinds import is_linear, kind_of, kind_or_linear
from .layers import HOTMixin, HOTState, Probe, is_dtensor
from .logits import defer_heads, notes_on_heads, restore_heads
from .ops import backend_for
from .report import UNSEEN, CoverageReport, ModuleRow, trains
from .rounding import StepClock
from .saving import SavePretrained, configurations
from .selection import Budget, BudgetProbe, GranularityProbe


class HOTPatchError(RuntimeError):
    """The model cannot be patched as asked; the message names the module and the remedy."""


def _check_wrapping(name: str, module: nn.Module, under_fsdp: bool) -> None:
    """Refuse what a parallel engine has already made of a layer; looked up by name, so that none is imported."""
    name = name or "the root module"
    if any(c.__name__ == "FSDPModule" for c in original_class(module).__mro__):
        raise HOTPatchError(
            f"{name} is sharded by itself (fully_shard made it a {type(module).__name__}). Call apply_hot first and "
            "fully_shard afterwards; layers inside a sharded block may be patched at any time."
        )
    weight = kind_or_linear(module).weight(module)
    if is_dtensor(weight) and not under_fsdp:
        raise HOTPatchError(
            f"{name} has a weight split by tensor parallelism (a DTensor of {tuple(weight.shape)}). HOT does not "
            "split its integer products: load without tp_plan and use FSDP2 or ZeRO-3 instead, or leave the "
            "layer out with HOTConfig(exclude=[...])."
        )


def _check_patchable(name: str, module: nn.Module) -> None:
    cls = original_class(module)
    if (own := own_forward(module)) is not None:
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

    Classes are swapped; parameters, names, hooks, ties and state_dict stay. A patched model may be patched again: the
    new configuration replaces the old one.

    Layers that are made afterwards are not patched. Where adapters come after it (``get_peft_model`` on a patched
    model), call it once more with the same configuration before the first step, as ``HOTCallback`` does by itself: a
    frozen base keeps nothing, and what LoRA keeps is the input of the adapters.

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
    linears = list(named_linears(model))
    _check_patterns(linears, config)
    if missing := unmatched_blocks(model, config):
        raise HOTPatchError(
            f"HOTConfig.compress: {', '.join(map(repr, missing))} matches no block. Blocks of this model are "
            f"{list(find_blocks(model))[:3]} and so on; patterns match full names."
        )
    decide = Decider(model, config)
    under_fsdp = any(c.__name__ == "FSDPModule" for m in model.modules() for c in type(m).__mro__)
    report = CoverageReport.of(model)
    to_patch: list[tuple[str, nn.Module, Decision]] = []
    for name, module, first_name in linears:
        if first_name is not None:
            report.alias(name, first_name)
            continue
        decision = decide(name, module)
        if decision.reason not in (NOT_INCLUDED, EXCLUDED, HEAD):
            _check_wrapping(name, module, under_fsdp)
        if decision.reason is None:
            _check_patchable(name, module)
            to_patch.append((name, module, decision))
        report.rows.append(ModuleRow.of(name, module, decision.reason, decision.label))
    if not to_patch and CONFIGURED_EXACT not in report.skipped.values():
        raise HOTPatchError(
            f"apply_hot found nothing to patch in {type(model).__name__}:\n{report}\n"
            "Widen include, shorten exclude, or lower min_features."
        )
    _unpatch(model)
    clock, budget = StepClock(), Budget(config) if config.selection == "budget" else None
    names = layer_names({name: module for name, module, _ in to_patch})
    for name, module, decision in to_patch:
        _patch(names[name], module, decision, config, clock, budget)
    _warm_up([module for _, module, _ in to_patch])
    compress_blocks(model, config)
    if config.memory is not None:
        fit_at_run(model, config.memory)
    if config.chunked_loss:
        defer_heads(decide.heads)
    report.notes += _notes(model, config, decide)
    if (advice := advice_on_adapters(model)) is not None:
        warnings.warn(advice, stacklevel=2)
    return report


def _notes(model: nn.Module, config: HOTConfig, decide: Decider) -> list[str]:
    notes = notes_on_blocks(model, config) + notes_on_fit(model)
    return notes + (notes_on_heads(model, decide.heads) if config.chunked_loss else [])


def _warm_up(layers: list[nn.Module]) -> None:
    """The first time on a machine the CPU's kernels are compiled, for seconds: here, not inside the first step."""
    if not torch.accelerator.is_available():
        for parameter in (p for layer in layers for p in layer.parameters(recurse=False) if p.is_cpu):
            backend_for(parameter).warm_up()
            return


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
    report, decide = CoverageReport.of(model), Decider(model, found[0][0])
    for name, module, first_name in named_linears(model):
        if first_name is not None:
            report.alias(name, first_name)
        elif isinstance(module, HOTMixin):
            label = BY_BUDGET if isinstance(module.hot.probe, BudgetProbe) else module.hot.plan.label()
            report.rows.append(ModuleRow.of(name, module, None, label))
        else:
            report.rows.append(ModuleRow.of(name, module, decide(name, module).reason or UNSEEN, ""))
    report.notes += _notes(model, found[0][0], decide)
    if len(found) > 1:
        report.notes.append(f"{len(found)} configurations: apply_hot was called on parts of the model")
    return report


def patched_as_a_whole(model: nn.Module) -> bool:
    """Whether ``model`` itself was given to apply_hot: layers know the names they had there."""
    patched = [(name, m) for name, m in model.named_modules() if isinstance(m, HOTMixin)]
    return bool(patched) and all(m.hot.name in (name, canonical_name(name)) for name, m in patched)


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
    if not adapters or not any(config.lora is False for config in configs):
        return None
    block = next((config.compress for config in configs if config.compress not in ("auto", "inputs")), None)
    saves = "saves no memory" if block is None else f"saves memory only by compress={block!r}"
    return (
        f"hot_hf: every patched layer is frozen and only the adapters train, so HOT keeps nothing, {saves}, and "
        "its gradients are inexact all the same. Without HOTConfig(lora=False) the lora_A are patched as well, whose "
        "kept inputs are what fills memory under LoRA."
    )


def _probe(name: str, decision: Decision, config: HOTConfig, measured: bool, budget: Budget | None) -> Probe | None:
    """What measures a layer before its plan is chosen, where anything does."""
    if decision.by_budget:
        return BudgetProbe(decision.plan, name, budget)
    lqs = decision.plan.grad_input_bits is not None and decision.plan.grad_input_granularity == "lqs"
    return GranularityProbe(decision.plan, config) if lqs and measured else None


def _patch(
    name: str, module: nn.Module, decision: Decision, config: HOTConfig, clock: StepClock, budget: Budget | None
) -> None:
    kind, plan = kind_or_linear(module), decision.plan
    probe = _probe(name, decision, config, kind.measured, budget)
    if probe is None and plan.grad_input_granularity == "lqs":
        plan = replace(plan, grad_input_granularity="per_token")  # nothing will measure it: the safer choice
    module.hot = HOTState(name, plan, config, clock, probe)
    swap(module, swapped_class(kind.mixin, type(module)))


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
    swapped = [(n, m) for n, m in model.named_modules() if isinstance(m, HOTMixin)]
    for name, module in swapped:
        if has_changed(module):
            raise HOTPatchError(
                f"{name or 'the root module'} is a {type(module).__name__} since apply_hot, as parametrizations and "
                "fully_shard do; undo that first, then call remove_hot or apply_hot."
            )
    forget_fit(model)
    restore_blocks(model)
    restore_heads(model)
    for _, layer in swapped:
        restore(layer)
        del layer.hot
    return [name for name, _ in swapped]

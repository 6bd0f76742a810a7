"""Which modules of a model are its blocks: the repeated units that checkpointing and block compression work on."""

from __future__ import annotations

from torch import nn


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost repeated units of ``model`` by name: transformers' checkpointing layers, or, where there are none,
    the elements of its ModuleLists and Sequentials that have layers of their own."""
    found = _outermost(model, lambda module, parent: is_checkpointing_layer(module))
    return found or _outermost(
        model, lambda module, parent: isinstance(parent, (nn.ModuleList, nn.Sequential)) and any(module.children())
    )


def is_checkpointing_layer(module: nn.Module) -> bool:
    """Whether ``module`` is a unit of transformers' checkpointing; by name, so that transformers need not be
    imported for a plain torch model."""
    return any(cls.__name__ == "GradientCheckpointingLayer" for cls in type(module).__mro__)


def _outermost(model: nn.Module, wanted) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def visit(module: nn.Module, name: str, parent: nn.Module | None) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        if wanted(module, parent):
            found[name] = module
            return
        for child_name, child in module.named_children():
            visit(child, f"{name}.{child_name}" if name else child_name, module)

    visit(model, "", None)
    return found

"""Blocks whose forward runs in a BlockContext: made by swapping a living module's class, as HOT layers are."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import nn

from ..class_swap import Swapped, own_forward, restore, swap, swapped_class
from ..layers import HOTMixin
from .context import BlockContext
from .find import find_blocks


@dataclass
class BlockState:
    """What compress_blocks leaves on a block, as the plain attribute ``hot_block``."""

    told: bool = False  # that checkpointing keeps less than compression would


class HOTBlockMixin(Swapped):
    """A block that is compressed; ``hot_block`` is its BlockState."""

    hot_block: BlockState

    @classmethod
    def members(cls, original: type) -> dict[str, Any]:
        @wraps(original.forward)
        def forward(self, *args, **kwargs):
            if _stands_aside(self):
                return original.forward(self, *args, **kwargs)
            with BlockContext():
                return original.forward(self, *args, **kwargs)

        # Of the same name, which FSDP policies read.
        return {"__name__": original.__name__, "__module__": original.__module__, "forward": forward}


def _stands_aside(module: HOTBlockMixin) -> bool:
    """Whether this forward must run as it is: nothing to hold, or somebody else decides what is saved."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return True
    if torch._C._functorch.peek_interpreter_stack() is not None:  # torch.func refuses saved-tensor hooks
        return True
    if torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
        return True
    if torch._C._current_graph_task_id() != -1:  # recomputed inside a backward: used at once, not worth packing
        return True
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if outer is not None and getattr(outer[0], "__module__", "") == "torch.utils.checkpoint":
        if not module.hot_block.told:
            module.hot_block.told = True
            warnings.warn(
                "hot_hf: HOTConfig(compress='block') does nothing in blocks under gradient checkpointing: they keep "
                "only their input, less than compression would. Switch gradient checkpointing off to trade those "
                "bytes for the time of its second forward (docs/memory.md).",
                stacklevel=3,
            )
        return True
    return False


def compress_blocks(model: nn.Module) -> list[str]:
    """Compress the blocks of ``model`` that hold patched layers (or the model itself where it has no blocks).

    Returns:
        lines for the coverage report: what is compressed, what is not and why.
    """
    found = find_blocks(model) or {"": model}
    blocks = {
        name: block
        for name, block in found.items()
        if not isinstance(block, HOTMixin) and any(isinstance(m, HOTMixin) for m in block.modules())
    }
    notes = []
    for name, block in list(blocks.items()):
        if own_forward(block) is not None:
            notes.append(f"compress='block' leaves out {name or 'the root module'}: it carries a forward of its own")
            del blocks[name]
    for block in blocks.values():
        block.hot_block = BlockState()
        swap(block, swapped_class(HOTBlockMixin, type(block)))
    if not blocks:
        return [*notes, "compress='block' found no block with patched layers: as compress='inputs'"]
    kinds = sorted({type(block).__name__ for block in blocks.values()})
    notes.insert(0, f"compress='block': {len(blocks)} blocks ({', '.join(kinds)}); not inside torch.compile")
    if any(getattr(block, "gradient_checkpointing", False) for block in blocks.values()):
        notes.append("gradient checkpointing is on: blocks keep only their input, compress='block' does nothing")
    return notes


def restore_blocks(model: nn.Module) -> None:
    """Give every compressed block its class back."""
    for module in list(model.modules()):
        if isinstance(module, HOTBlockMixin):
            restore(module)
            del module.hot_block

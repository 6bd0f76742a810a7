"""Blocks that keep less for their backward: made by swapping a living module's class, as HOT layers are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import nn

from ..class_swap import Swapped, own_forward, release, swap, swapped_class
from ..config import HOTConfig
from ..layers import HOTMixin
from ..saved_hooks import in_backward, in_checkpoint, refuses_hooks
from .boundaries import checkpoint_packed, own_checkpoint
from .context import BlockContext
from .find import find_blocks, is_checkpointing_layer


@dataclass
class BlockState:
    """What compress_blocks leaves on a block, as the plain attribute ``hot_block``: ``mode`` is HOTConfig.compress."""

    mode: str


class HOTBlockMixin(Swapped):
    """A block that is compressed while it has ``hot_block``, its BlockState; without, it is what it was."""

    hot_block: BlockState

    @classmethod
    def members(cls, original: type) -> dict[str, Any]:
        @wraps(original.forward)
        def forward(self, *args, **kwargs):
            mode = self.hot_block.mode if is_compressed(self) else "auto"
            if mode == "auto" or _cannot_save() or in_checkpoint():
                return original.forward(self, *args, **kwargs)
            if mode == "checkpoint":
                return checkpoint_packed(own_checkpoint, partial(original.forward, self), *args, **kwargs)
            with BlockContext():
                return original.forward(self, *args, **kwargs)

        # Of the same name, which FSDP policies read.
        return {"__name__": original.__name__, "__module__": original.__module__, "forward": forward}

    @property
    def _gradient_checkpointing_func(self) -> Callable:
        """What transformers' checkpointing calls, whenever that was switched on: its function, with packed inputs."""
        try:
            run = self.__dict__["_gradient_checkpointing_func"]
        except KeyError:
            raise AttributeError("_gradient_checkpointing_func") from None
        return partial(checkpoint_packed, run) if is_compressed(self) and not _cannot_save() else run

    @_gradient_checkpointing_func.setter
    def _gradient_checkpointing_func(self, run: Callable) -> None:
        self.__dict__["_gradient_checkpointing_func"] = run


def is_compressed(module: nn.Module) -> bool:
    """Whether ``module`` is a compressed block."""
    return "hot_block" in module.__dict__


def _cannot_save() -> bool:
    """Whether a forward must run as it is: nothing to hold, or what is recomputed inside a backward is used at once."""
    return not torch.is_grad_enabled() or refuses_hooks() or in_backward()


def compress_blocks(model: nn.Module, config: HOTConfig) -> None:
    """Compress the blocks of ``model`` that hold patched layers, or layers that are exact by configuration (or the
    model itself where it has no blocks), as ``config.compress`` says. Blocks that carry a forward of their own are left
    out."""
    for block in _candidates(model, config).values():
        if own_forward(block) is None:
            block.hot_block = BlockState(config.compress)
            if not isinstance(block, HOTBlockMixin):  # one that was sharded since it was last restored still is
                swap(block, swapped_class(HOTBlockMixin, type(block)))


def _candidates(model: nn.Module, config: HOTConfig) -> dict[str, nn.Module]:
    if config.compress == "inputs":
        return {}
    return {
        name or "the root module": block
        for name, block in (find_blocks(model) or {"": model}).items()
        if not isinstance(block, HOTMixin)
        and (config.exact or any(isinstance(m, HOTMixin) for m in block.modules()))
        and (config.compress != "auto" or is_checkpointing_layer(block))
    }


def notes_on_blocks(model: nn.Module, config: HOTConfig) -> list[str]:
    """Lines for the coverage report: what is compressed beside the inputs of patched layers, what is not and why."""
    candidates, mode = _candidates(model, config), config.compress
    blocks = [block for block in candidates.values() if is_compressed(block)]
    checkpointed = [block for block in blocks if getattr(block, "gradient_checkpointing", False)]
    kinds = ", ".join(sorted({type(block).__name__ for block in blocks}))
    notes = []
    if blocks and mode in ("block", "checkpoint"):
        what = {"block": "what they keep", "checkpoint": "their inputs, and run them again"}[mode]
        notes.append(f"compress={mode!r}: {len(blocks)} blocks ({kinds}): {what}; not inside torch.compile")
    elif not blocks and mode in ("block", "checkpoint"):
        notes.append(f"compress={mode!r} found no block with patched layers: as compress='inputs'")
    if checkpointed:
        notes.append(
            f"gradient checkpointing is on: {len(checkpointed)} blocks keep their inputs alone, packed in int8"
        )
    for name, block in candidates.items():
        if not is_compressed(block):
            notes.append(f"compress={mode!r} leaves out {name}: it carries a forward of its own")
    return notes


def restore_blocks(model: nn.Module) -> None:
    """Let every compressed block be what it was."""
    for module in list(model.modules()):
        if is_compressed(module):
            release(module, "hot_block")

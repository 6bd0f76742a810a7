"""Blocks that keep less for their backward: made by swapping a living module's class, as HOT layers are."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import nn

from ..class_swap import Swapped, original_class, own_forward, release, swap, swapped_class
from ..config import HOTConfig
from ..decisions import matches
from ..layers import HOTMixin
from ..saved_hooks import in_backward, in_checkpoint, refuses_hooks
from ..torch_compile import is_plain_here
from .boundaries import checkpoint_packed, own_checkpoint, without_caches
from .context import BlockContext
from .find import find_blocks, is_checkpointing_layer


@dataclass
class BlockState:
    """What compress_blocks leaves on a block, as the plain attribute ``hot_block``.

    ``mode`` is one of BLOCK_MODES; ``fitted`` where ``HOTConfig.memory`` chooses it, also against checkpointing that
    is switched on.
    """

    name: str
    mode: str
    fitted: bool = False


class HOTBlockMixin(Swapped):
    """A block that is compressed while it has ``hot_block``, its BlockState; without, it is what it was."""

    hot_block: BlockState

    @classmethod
    def members(cls, original: type) -> dict[str, Any]:
        @wraps(original.forward)
        def forward(self, *args, **kwargs):
            mode = self.hot_block.mode if is_compressed(self) else "auto"
            if mode in ("auto", "inputs", "exact") or _cannot_save() or in_checkpoint():
                return original.forward(self, *args, **kwargs)
            if mode == "checkpoint":
                again = without_caches(self, args, kwargs)
                if again is None:
                    if self.training:
                        warnings.warn("hot_hf: a block whose cache holds keys is not checkpointed", stacklevel=2)
                    return original.forward(self, *args, **kwargs)
                kwargs = again
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
        if not is_compressed(self) or _cannot_save():
            return run
        if self.hot_block.fitted and self.hot_block.mode != "checkpoint":
            return lambda function, *args, **kwargs: function(*args, **kwargs)
        return partial(checkpoint_packed, run)

    @_gradient_checkpointing_func.setter
    def _gradient_checkpointing_func(self, run: Callable) -> None:
        self.__dict__["_gradient_checkpointing_func"] = run


WHAT = {  # is said of the blocks of each mode
    "exact": "as without HOT",
    "inputs": "the inputs of their layers",
    "block": "what they keep; not inside torch.compile",
    "checkpoint": "their inputs, and run them again; not inside torch.compile",
}


def is_compressed(module: nn.Module) -> bool:
    """Whether ``module`` is a compressed block."""
    return "hot_block" in module.__dict__


def _cannot_save() -> bool:
    """Whether a forward must run as it is: nothing to hold, or what is recomputed inside a backward is used at once."""
    return not torch.is_grad_enabled() or refuses_hooks() or in_backward() or is_plain_here()


def compress_blocks(model: nn.Module, config: HOTConfig) -> None:
    """Compress the blocks of ``model`` that hold patched layers, or layers that are exact by configuration (or the
    model itself where it has no blocks), as ``config.compress`` says; under ``config.memory`` each is checkpointed
    until the first batch is known. Blocks that carry a forward of their own are left out."""
    for name, block in _candidates(model, config).items():
        if own_forward(block) is None:
            fitted = config.memory is not None
            block.hot_block = BlockState(name, "auto", fitted)
            set_mode(block, "checkpoint" if fitted else _mode(name, config))
            if not isinstance(block, HOTBlockMixin):  # one that was sharded since it was last restored still is
                swap(block, swapped_class(HOTBlockMixin, type(block)))


def set_mode(block: nn.Module, mode: str) -> None:
    """Let a compressed block be what ``mode``, one of BLOCK_MODES, says, from its next forward on."""
    block.hot_block.mode = mode
    for layer in block.modules():
        if isinstance(layer, HOTMixin):
            layer.hot.paused = mode == "exact"


def compressed_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The compressed blocks of ``model`` by the names they had when it was patched."""
    return {module.hot_block.name: module for module in model.modules() if is_compressed(module)}


def unmatched_blocks(model: nn.Module, config: HOTConfig) -> list[str]:
    """The patterns of ``config.compress`` that match no block of ``model``."""
    names = list(find_blocks(model) or {"": model})
    patterns = config.compress if isinstance(config.compress, dict) else {}
    return [pattern for pattern in patterns if not any(matches(name, pattern) for name in names)]


def _mode(name: str, config: HOTConfig) -> str:
    return config.compress_of(lambda pattern: matches(name, pattern))


def _candidates(model: nn.Module, config: HOTConfig) -> dict[str, nn.Module]:
    found = {}
    for name, block in (find_blocks(model) or {"": model}).items():
        mode = "checkpoint" if config.memory is not None else _mode(name, config)
        holds = config.exact or any(isinstance(m, HOTMixin) for m in block.modules())
        wanted = mode != "inputs" and (mode != "auto" or is_checkpointing_layer(block))
        if holds and wanted and not isinstance(block, HOTMixin):
            found[name] = block
    return found


def notes_on_blocks(model: nn.Module, config: HOTConfig) -> list[str]:
    """Lines for the coverage report: what is compressed beside the inputs of patched layers, what is not and why."""
    candidates = _candidates(model, config)
    blocks = [block for block in candidates.values() if is_compressed(block)]
    notes = []
    for mode, what in WHAT.items():
        of_mode = [block for block in blocks if block.hot_block.mode == mode]
        if of_mode:
            kinds = ", ".join(sorted({original_class(block).__name__ for block in of_mode}))
            notes.append(f"compress={mode!r}: {len(of_mode)} blocks ({kinds}): {what}")
        elif not blocks and mode == config.compress:
            notes.append(f"compress={mode!r} found no block with patched layers: as compress='inputs'")
    checkpointed = [b for b in blocks if getattr(b, "gradient_checkpointing", False) and not b.hot_block.fitted]
    if checkpointed:
        notes.append(
            f"gradient checkpointing is on: {len(checkpointed)} blocks keep their inputs alone, packed in int8"
        )
    for name, block in candidates.items():
        if not is_compressed(block):
            name, mode = name or "the root module", _mode(name, config)
            notes.append(f"compress={mode!r} leaves out {name}: it carries a forward of its own")
    return notes


def restore_blocks(model: nn.Module) -> None:
    """Let every compressed block be what it was."""
    for module in list(model.modules()):
        if is_compressed(module):
            release(module, "hot_block")

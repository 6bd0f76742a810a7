"""``HOTConfig(memory=...)``: the modes of a model's blocks, chosen when its first training batch comes."""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..block import compressed_blocks, set_mode
from ..config import byte_budget
from ..dry_run import batch_without_data, without_data
from ..layers import is_dtensor
from .fitter import Fitted, Fitter, largest_that_fits, size

logger = logging.getLogger("hot_hf")
UNPREDICTED = "nothing can be predicted, so that every block is checkpointed"
Shapes = tuple[tuple[int, ...], ...]


class MemoryFit:
    """A forward pre-hook of the patched model. Until a batch was seen, and where nothing can be predicted, every block
    is checkpointed."""

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.optimizer, self.accumulating, self.progress = "adamw", False, False
        self.forget()

    def forget(self) -> None:
        """Choose anew at the next batch."""
        self.fits: list[Shapes] = []  # shapes of batches that are known to fit
        self.fitted: Fitted | None = None
        self.problem: str | None = None

    def __call__(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if not model.training or not torch.is_grad_enabled() or torch.compiler.is_compiling() or self.problem:
            return
        shapes = tuple(tuple(t.shape) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor))
        if not any(_within(shapes, known) for known in self.fits):
            self._fit(model, args, kwargs)
            self.fits.append(shapes)

    def _fit(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        parameters = list(model.parameters())
        if any(is_dtensor(p) or hasattr(p, "ds_id") for p in parameters):
            raise ValueError(
                f"HOTConfig.memory={self.memory} predicts the step of one process with whole weights, but these are "
                "sharded. Leave memory out and write compress= yourself; hot-hf fit helps to choose."
            )
        try:
            fitter = self._fitter(model, args, kwargs)
            found = None if fitter is None else fitter.within(self.memory)
        except Exception as error:  # of a model that runs: only the prediction fails, and all that is lost is speed
            self.problem = str(error).splitlines()[0][:200]
            logger.warning(f"hot_hf: HOTConfig.memory: {UNPREDICTED}: {self.problem}")
            return
        if fitter is None:
            return
        if found is None:
            raise ValueError(self._too_little(fitter, args, kwargs))
        self.fitted = found
        for name, block in compressed_blocks(model).items():
            set_mode(block, found.modes[name])
        logger.info(f"hot_hf: HOTConfig.memory={size(self.memory)}: {found}")

    def _fitter(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Fitter | None:
        """None where the modes as they are fit this batch as well."""
        copy = without_data(model)
        forget_fit(copy)
        autocast = _autocast(copy)
        first = next(p for p in model.parameters() if p.is_floating_point())
        fitter = Fitter(
            copy,
            batch_without_data(args),
            batch_without_data(kwargs),
            device=first.device.type,
            dtype=first.dtype,
            optimizer=self.optimizer,
            autocast=autocast,
            accumulating=self.accumulating,
            progress=self.progress,
        )
        if self.fitted is not None and fitter.states + fitter.peak_of(self.fitted.modes) <= self.memory:
            return None
        return fitter

    def _too_little(self, fitter: Fitter, args: tuple, kwargs: dict[str, Any]) -> str:
        least = fitter.at(0)
        rows = max((t.shape[0] for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.dim()), default=1)

        def total(batch: int) -> int:
            return fitter.states + fitter.peak_at(_rows(fitter.args, rows, batch), _rows(fitter.kwargs, rows, batch))

        batch = largest_that_fits(total, self.memory, rows // 2, rows - 1)
        remedy = f"{batch} rows of this length fit" if batch else "not even one row of this length fits"
        return (
            f"HOTConfig.memory={self.memory} ({size(self.memory)}) is too little for this step: weights and "
            f"optimizer state ({self.optimizer}) take {size(least.states)}, gradients and activations with "
            f"every block checkpointed {size(least.peak)}: {size(least.total)} is the least that would "
            f"do. Of this batch of {rows}, {remedy}."
        )


def _within(shapes: Shapes, known: Shapes) -> bool:
    """Whether no dimension of any tensor is larger than it was."""
    return len(shapes) == len(known) and all(
        len(a) == len(b) and all(m <= n for m, n in zip(a, b, strict=True)) for a, b in zip(shapes, known, strict=True)
    )


def _rows(batch: Any, of: int, count: int) -> Any:
    """The first ``count`` of ``of`` rows of every tensor that has as many."""

    def cut(value: Any) -> Any:
        return value[:count] if isinstance(value, Tensor) and value.dim() and value.shape[0] == of else value

    return tree_map(cut, batch)


def _autocast(copy: nn.Module) -> torch.dtype | None:
    """The type of the autocast that the model runs under: the caller's, or the one that accelerate has put into the
    model's own forward, which is taken off the copy (it would call the original)."""
    if "_original_forward" in vars(copy):
        vars(copy).pop("forward", None)
        state = sys.modules.get("accelerate.state")
        mixed = None if state is None else state.AcceleratorState._shared_state.get("_mixed_precision")
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mixed)
    device = next(iter(copy.parameters())).device.type
    for kind in {device, "cpu", getattr(torch.accelerator.current_accelerator(), "type", "cpu")}:
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
    return None


def fit_at_run(model: nn.Module, memory: int | str) -> None:
    """Let ``model``, whose blocks are compressed, choose their modes at its first training batch."""
    model.register_forward_pre_hook(MemoryFit(byte_budget(memory, name="memory")), with_kwargs=True, prepend=True)


def _fits(model: nn.Module) -> list[MemoryFit]:
    return [hook for m in model.modules() for hook in m._forward_pre_hooks.values() if isinstance(hook, MemoryFit)]


def configure_fit(model: nn.Module, optimizer: str, accumulating: bool, progress: bool) -> None:
    """What a trainer knows: its optimizer (one of ``OPTIMIZERS``), whether gradients of earlier micro-batches are
    there, and whether to show a bar. Choices are made anew."""
    for fit in _fits(model):
        fit.optimizer, fit.accumulating, fit.progress = optimizer, accumulating, progress
        fit.forget()


def notes_on_fit(model: nn.Module) -> list[str]:
    """Lines for the coverage report."""
    notes = []
    for fit in _fits(model):
        memory = f"memory={size(fit.memory)}"
        if fit.problem is not None:
            notes.append(f"{memory}: {UNPREDICTED}: {fit.problem}")
        elif fit.fitted is None:
            notes.append(f"{memory}: blocks are checkpointed until the first batch is seen")
        else:
            notes.append(f"{memory}: predicted {fit.fitted}")
    return notes


def forget_fit(model: nn.Module) -> None:
    """Take the hook off ``model`` and its modules."""
    for module in model.modules():
        for key in [k for k, hook in module._forward_pre_hooks.items() if isinstance(hook, MemoryFit)]:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)

"""One training step of a model that holds no data: the most bytes that are alive at once, its backward included."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from .autocast import FakeAutocast
from .live import LiveBytes
from .meta import MetaForward


@dataclass(frozen=True)
class StepBytes:
    """Bytes of one step beside parameters, buffers, optimizer state and the batch: ``kept`` when the forward ends,
    ``peak`` at most, gradients included; ``units`` by name, what the forward of each named module left alive."""

    kept: int
    peak: int
    units: dict[str, int] = field(default_factory=dict)


class DryRun:
    """A step of ``model``, which is on the meta device, as it would be on ``device``.

    Args:
        model: as ``without_data`` or ``torch.device("meta")`` make one, in training mode.
        device: type whose kernels decide what attention and dropout keep ("cpu", "cuda", ...).
        autocast: bfloat16, float16, or None; the parameters become fake ones then (autocast.py).
        units: modules of ``model`` by name, of which ``StepBytes.units`` is asked.
        accumulating: gradients of an earlier micro-batch are there already.
    """

    def __init__(
        self,
        model: nn.Module,
        device: str,
        autocast: torch.dtype | None = None,
        units: Mapping[str, nn.Module] | None = None,
        accumulating: bool = False,
    ) -> None:
        self.model, self.device, self.units, self.accumulating = model, device, units or {}, accumulating
        self.autocast = None if autocast is None else FakeAutocast(autocast, model)

    def __call__(self, *args: Any, **kwargs: Any) -> StepBytes:
        """Forward and backward; arguments are the model's.

        Raises:
            ValueError: for a model whose forward asks for values (some mixtures of experts), naming what it asked.
        """
        self.model.zero_grad(set_to_none=True)
        if self.autocast is not None:
            fake = self.autocast.fake
            args, kwargs = tree_map(lambda v: fake(v) if isinstance(v, Tensor) else v, (args, kwargs))
        try:
            found = self._run(args, kwargs)
            if self.accumulating:
                there = sum(p.grad.untyped_storage().nbytes() for p in self.model.parameters() if p.grad is not None)
                found = self._run(args, kwargs)
                found = StepBytes(found.kept, found.peak + there, found.units)
        except (NotImplementedError, RuntimeError) as error:
            raise ValueError(
                f"{type(self.model).__name__} cannot run on meta tensors, which have shapes but no values "
                f"({str(error).splitlines()[0][:120]}); measure a small real model instead."
            ) from error
        finally:
            self.model.zero_grad(set_to_none=True)
        return found

    def _run(self, args: tuple, kwargs: dict[str, Any]) -> StepBytes:
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        live = LiveBytes([*self.model.parameters(), *self.model.buffers(), *grads, *_tensors((args, kwargs))])
        with ExitStack() as stack:
            stack.enter_context(nullcontext() if self.autocast is None else self.autocast.mode)
            stack.enter_context(live)
            stack.enter_context(MetaForward(self.device))
            units: dict[str, int] = {}
            for name, unit in self.units.items():
                stack.enter_context(_watched(unit, name, live, units))
            with nullcontext() if self.autocast is None else self.autocast.forward():
                loss = loss_of(self.model(*args, **kwargs))
            kept = live.now
            # Not loss.backward(): a function mode is off inside the functions that it handles, and what a checkpoint
            # runs again would miss it.
            engine = torch.autograd.Variable._execution_engine
            engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, True)
            del loss
        return StepBytes(kept, live.peak, units)


class _watched:
    """While entered: what one forward of ``unit`` leaves alive goes to ``units[name]``."""

    def __init__(self, unit: nn.Module, name: str, live: LiveBytes, units: dict[str, int]) -> None:
        self.unit, self.name, self.live, self.units = unit, name, live, units

    def __enter__(self) -> None:
        self.handles = [
            self.unit.register_forward_pre_hook(self._before),
            self.unit.register_forward_hook(self._after),
        ]

    def __exit__(self, *error) -> None:
        for handle in self.handles:
            handle.remove()

    def _before(self, *_: Any) -> None:
        self.before = self.live.now

    def _after(self, *_: Any) -> None:
        self.units.setdefault(self.name, self.live.now - self.before)  # the first: a recompute is none of the forward


def _tensors(batch: Any) -> list[Tensor]:
    return [t for t in tree_leaves(batch) if isinstance(t, Tensor)]


def loss_of(output: Any) -> Tensor:
    """The loss in a model's output; where the loss is computed elsewhere, one that takes what a cross-entropy does."""
    loss = output.get("loss") if isinstance(output, Mapping) else None
    if loss is not None:
        return loss.mean()
    first = next(t for t in _tensors(output) if t.is_floating_point() and t.requires_grad)
    return first.mean() if first.dim() == 0 else first.float().log_softmax(-1).mean()


def without_data(model: nn.Module) -> nn.Module:
    """A copy of ``model`` on the meta device: of its parameters and buffers only the shapes are copied, and of its
    hooks only those that transformers and peft have put there (inputs that require gradients)."""
    known: dict[int, Any] = {}
    for tensors in (model.parameters(), model.buffers()):
        for tensor in tensors:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            known[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    copied = copy.deepcopy(model, known)
    for module in copied.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks):
            for key in [key for key, hook in hooks.items() if not _is_theirs(hook)]:
                del hooks[key]
    return copied


def _is_theirs(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or "").partition(".")[0] in ("transformers", "peft")


def batch_without_data(batch: Any) -> Any:
    """``batch`` with its tensors on the meta device."""
    return tree_map(lambda v: torch.empty_like(v, device="meta") if isinstance(v, Tensor) else v, batch)

"""What HOTCallback measures while a model trains; nothing here is active unless someone reads it."""

from __future__ import annotations

import math
import weakref

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from . import compiling
from .autograd import _exact_types, _grad_input, _grad_weight
from .buffer import compress
from .kinds import kind_of
from .layers import HOTMixin
from .rounding import layer_seed


def hot_layers(model: nn.Module) -> list[HOTMixin]:
    """The patched layers of ``model``, each once."""
    return [m for m in model.modules() if isinstance(m, HOTMixin)]


class KeptMeter:
    """Bytes of packed inputs and scales alive at once, as ``HOTState.meter``.

    Shared buffers count once, and what checkpointing drops after the forward does not stay counted: a buffer counts
    from when it is made until the last reference, autograd's own included, is gone.
    """

    def __init__(self) -> None:
        self.live = self.peak = 0
        self._known: dict[int, TensorWeakRef] = {}

    def add(self, *tensors: Tensor | None) -> None:
        for tensor in tensors:
            if tensor is None or ((ref := self._known.get(id(tensor))) is not None and ref() is tensor):
                continue
            size = tensor.numel() * tensor.element_size()
            self._known[id(tensor)] = TensorWeakRef(tensor)
            weakref.finalize(tensor, self._release, id(tensor), size).atexit = False
            self.live += size
        self.peak = max(self.peak, self.live)

    def _release(self, key: int, size: int) -> None:
        self._known.pop(key, None)
        self.live -= size

    def take_peak(self) -> int:
        """The most bytes alive at once since the last call."""
        peak, self.peak = self.peak, self.live
        return peak


class GradientErrors:
    """Relative Frobenius errors of HOT's gradients, measured inside the real backward on some layers' own x and g.

    ``start`` before a forward, ``stop`` after its backward. Each layer is measured at its first call; its input is held
    for that long and both products are computed once more, exactly and with HOT.
    """

    def __init__(self, layers: list[HOTMixin]) -> None:
        self.layers = layers
        self.errors: dict[str, float] = {}
        self._handles: list = []

    @classmethod
    def sample(cls, model: nn.Module, count: int) -> GradientErrors:
        """``count`` layers spread over the patched ones, of different kinds where blocks repeat; experts have no single
        product to measure."""
        layers = [m for m in hot_layers(model) if (kind := kind_of(m)) is None or kind.measured]
        count = min(count, len(layers))
        return cls([layers[(i * len(layers) // count + i) % len(layers)] for i in range(count)])

    def start(self) -> None:
        self.stop()
        self._seen: set[str] = set()
        for layer in self.layers:
            if layer.hot.probe is None and not layer.hot.plan.exact:
                self._handles.append(layer.register_forward_hook(self._watch))

    def stop(self) -> dict[str, float]:
        """Remove the hooks; errors by ``grad_input_error/LAYER`` and ``grad_weight_error/LAYER``, finite ones only."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        errors, self.errors = self.errors, {}
        return {name: error for name, error in errors.items() if math.isfinite(error)}

    def _watch(self, layer: HOTMixin, args: tuple, y: Tensor) -> None:
        if y.requires_grad and layer.hot.name not in self._seen:  # under reentrant checkpointing: in the recompute
            self._seen.add(layer.hot.name)
            x, needs_x = args[0].detach(), args[0].requires_grad
            step = layer.hot.clock.step
            y.register_hook(lambda g: self._measure(layer, x, needs_x, g, step))

    def _measure(self, layer: HOTMixin, x: Tensor, needs_x: bool, g: Tensor, step: int) -> None:
        hot, weight = layer.hot, layer.matrix.detach()
        if tuple(weight.shape) != (g.shape[-1], x.shape[-1]):  # sharded away by FSDP
            return
        seed = layer_seed(hot.seed, hot.name, step) if hot.plan.rounding == "stochastic" else 0
        with torch.no_grad(), _exact_types(g.device.type):
            g, x = g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1])
            if needs_x and hot.plan.grad_input_bits is not None:
                value = _grad_input(g, weight, hot.plan, seed, torch.float32)
                self._note("grad_input_error", hot.name, value, g.float() @ weight.float())
            if layer.matrix.requires_grad and hot.plan.activation_format != "none":
                kept, scale = compress(x, hot.plan, seed, share=False)
                value = _grad_weight(g, kept, scale, hot.plan, seed, x.shape[-1], torch.float32)
                self._note("grad_weight_error", hot.name, value, g.float().t() @ x.float())

    def _note(self, what: str, layer: str, value: Tensor, exact: Tensor) -> None:
        norm = exact.norm()
        self.errors[f"{what}/{layer}"] = ((value - exact).norm() / norm).item() if norm > 0 else 0.0


class NonFiniteGradients:
    """Counts optimizer steps, and gradients in them, with an entry that is NaN or infinite; synchronizes only when
    read. Under gradient clipping one NaN has spread to every gradient before the optimizer step, where this looks."""

    def __init__(self) -> None:
        self._counts: Tensor | None = None

    @torch.no_grad()
    def count(self, model: nn.Module) -> None:
        gradients = []
        for parameter in model.parameters():
            if parameter.grad is not None and parameter.grad.numel():
                gradient = parameter.grad
                gradient = gradient.coalesce().values() if gradient.is_sparse else gradient
                gradients.append(gradient.to_local() if hasattr(gradient, "to_local") else gradient)
        if not gradients:
            return
        device = gradients[0].device
        largest = torch._foreach_norm(gradients, ord=math.inf)  # the largest magnitude: NaN stays NaN, none overflows
        bad = torch.stack([~torch.isfinite(n).to(device) for n in largest]).sum()
        counts = torch.stack((bad, (bad > 0).to(bad.dtype)))
        self._counts = counts if self._counts is None else self._counts + counts

    def read(self) -> tuple[int, int]:
        """(gradients, steps) so far."""
        return (0, 0) if self._counts is None else tuple(self._counts.tolist())


def never_called(model: nn.Module) -> list[str]:
    """Names of patched layers whose forward has not run: their weight is read some other way, or not at all.

    Unknown, and left out, where layers were compiled since: compiled code leaves no note.
    """
    return [m.hot.name for m in hot_layers(model) if not m.hot.called and m.hot.traces == compiling.traces]

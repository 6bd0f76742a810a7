"""What HOTCallback measures while a model trains; nothing here is active unless someone reads it."""

from __future__ import annotations

import math
import weakref

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from . import torch_compile
from .decisions import canonical_name
from .gradients import exact_types, grad_input, grad_weight, keep
from .layer_kinds import hot_layers, kind_or_linear
from .layers import HOTMixin
from .rounding import layer_seed


class KeptMeter:
    """Bytes of packed inputs and scales alive at once, as ``HOTState.meter``.

    Shared buffers count once, and what checkpointing drops after the forward does not stay counted: a buffer counts
    from when it is made until the last reference, autograd's own included, is gone.
    """

    def __init__(self) -> None:
        self.live = self.peak = 0
        self.seen = False  # any buffer: layers that keep nothing, are compiled or still measure show none
        self._known: dict[int, TensorWeakRef] = {}

    def add(self, *tensors: Tensor | None) -> None:
        for tensor in tensors:
            if tensor is None or ((ref := self._known.get(id(tensor))) is not None and ref() is tensor):
                continue
            size = tensor.numel() * tensor.element_size()
            self.seen = True
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
        layers = [m for m in hot_layers(model) if kind_or_linear(m).measured]
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
        seed = layer_seed(hot.config.seed, hot.name, step) if hot.plan.rounding == "stochastic" else 0
        with torch.no_grad(), exact_types(g.device.type):
            g, x = g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1])
            if needs_x and hot.plan.grad_input_bits is not None:
                value = grad_input(g, weight, hot.plan, seed, torch.float32)
                self._note("grad_input_error", hot.name, value, g.float() @ weight.float())
            if layer.matrix.requires_grad and hot.plan.activation_format != "none":
                kept, scale = keep(x, hot.plan, seed, share=False)
                value = grad_weight(g, kept, scale, hot.plan, seed, x.shape[-1], torch.float32)
                self._note("grad_weight_error", hot.name, value, g.float().t() @ x.float())

    def _note(self, what: str, layer: str, value: Tensor, exact: Tensor) -> None:
        norm = exact.norm()
        self.errors[f"{what}/{layer}"] = ((value - exact).norm() / norm).item() if norm > 0 else 0.0


class NonFiniteGradients:
    """Counts optimizer steps, and gradients in them, with an entry that is NaN or infinite.

    One pass over the gradients of this process in every step, less than gradient clipping takes. On an accelerator it
    synchronizes only when read. Under gradient clipping one NaN has spread to every gradient before the
    optimizer step, where this looks.
    """

    def __init__(self) -> None:
        self._counts: Tensor | None = None

    @torch.no_grad()
    def count(self, model: nn.Module) -> None:
        gradients = []
        for parameter in model.parameters():
            if (gradient := parameter.grad) is not None:
                gradient = gradient.coalesce().values() if gradient.is_sparse else gradient
                gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                if gradient.numel():  # of a sharded one there may be nothing here
                    gradients.append(gradient)
        if not gradients:
            return
        device = gradients[0].device
        if all(gradient.is_cpu for gradient in gradients):
            # The CPU takes 6 to 10 times as long for the largest magnitude as for the 2-norm, which a sum that
            # overflows makes infinite too: looked at again.
            norms = torch._foreach_norm(gradients)
            gradients = [g for g, norm in zip(gradients, norms, strict=True) if not math.isfinite(norm)]
        # The largest magnitude: NaN stays NaN, and none overflows.
        bad = torch.zeros((), dtype=torch.int64, device=device)
        if gradients:
            largest = torch.stack([n.to(device) for n in torch._foreach_norm(gradients, ord=math.inf)])
            bad = (~torch.isfinite(largest)).sum()
        counts = torch.stack((bad, (bad > 0).to(bad.dtype)))
        self._counts = counts if self._counts is None else self._counts + counts

    def read(self) -> tuple[int, int] | None:
        """(gradients, steps) so far, or None where no gradient was seen, as under DeepSpeed, which keeps them."""
        return None if self._counts is None else tuple(self._counts.tolist())


def stop_measuring(model: nn.Module) -> None:
    """Take off ``model`` what a run has put there, also one that ended with an error: meters, and the hooks of any
    GradientErrors."""
    for layer in hot_layers(model):
        layer.hot.meter = None
        for key, hook in list(layer._forward_hooks.items()):
            if isinstance(getattr(hook, "__self__", None), GradientErrors):
                del layer._forward_hooks[key]


def never_called(model: nn.Module) -> list[str]:
    """Names of patched layers whose forward has not run: their weight is read some other way, or not at all.

    Unknown, and left out, where layers were compiled since: compiled code leaves no note. Left out too are the copies
    that PEFT keeps beside one that has run: originals, and those of inactive adapters.
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, HOTMixin)}
    run = {canonical_name(name) for name, m in layers.items() if m.hot.called}
    return [
        name
        for name, m in layers.items()
        if not m.hot.called and m.hot.traces == torch_compile.traces and canonical_name(name) not in run
    ]

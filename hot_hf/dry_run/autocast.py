"""Autocast without data: torch's own rules, on fake tensors, since autocast knows no meta device.

A fake tensor is a meta tensor that claims a device. It claims the CPU here: others need a torch that is built for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

# What autocast runs in float32 on accelerators and not on the CPU: torch's list (AT_FORALL_FP32 in autocast_mode.h), as
# far as functions of models keep their inputs or results.
FLOAT32_ON_ACCELERATORS = {
    *("layer_norm", "group_norm", "norm", "softmax", "log_softmax", "softplus", "cosine_similarity"),
    *("exp", "log", "pow", "__pow__", "reciprocal", "rsqrt"),
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss"),
}


class FakeAutocast:
    """Forwards of ``models``, which are on the meta device, under autocast to ``dtype``.

    Their parameters and buffers become fake ones of the same shapes, in place; ties stay.

    Raises:
        ValueError: for a type other than bfloat16 and float16.
    """

    def __init__(self, dtype: torch.dtype, *models: nn.Module) -> None:
        if dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"autocast={dtype} must be torch.bfloat16, torch.float16 or None.")
        self.dtype, self.mode = dtype, FakeTensorMode()
        for model in models:
            self._place(model)

    def _place(self, model: nn.Module) -> None:
        made: dict[int, tuple[Tensor, Tensor]] = {}  # with the old one, lest its id be given out again
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                for name, old in tensors.items():
                    if old is not None and id(old) not in made:
                        new = self.fake(old)
                        made[id(old)] = (nn.Parameter(new, old.requires_grad) if _is_parameter(old) else new, old)
                    tensors[name] = None if old is None else made[id(old)][0]

    def fake(self, tensor: Tensor) -> Tensor:
        """A fake tensor of the same shape and type."""
        with self.mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

    @contextmanager
    def forward(self) -> Iterator[None]:
        with self.mode, _as_in_training(), torch.autocast("cpu", self.dtype):
            yield


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


@contextmanager
def _as_in_training() -> Iterator[None]:
    """transformers takes fake tensors for tracing, where it makes the masks that training without padding skips."""
    from transformers.utils import import_utils

    if (asked := getattr(import_utils, "is_fake_tensor", None)) is None:
        yield
        return
    import_utils.is_fake_tensor = lambda tensor: False
    try:
        yield
    finally:
        import_utils.is_fake_tensor = asked


def cast_for(func: Callable, device: str, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
    """``func``'s arguments as autocast of ``device`` hands them on, where that of the CPU, which is on, does not."""
    runs_in_float32 = device != "cpu" and getattr(func, "__name__", "") in FLOAT32_ON_ACCELERATORS
    if not runs_in_float32 or not torch.is_autocast_enabled("cpu"):
        return args, kwargs
    return cast(args, kwargs, torch.float32)


def cast(args: tuple, kwargs: dict[str, Any], dtype: torch.dtype) -> tuple[tuple, dict]:
    """Floating-point tensors among the arguments in ``dtype``; float64 stays, as under autocast."""

    def one(value: Any) -> Any:
        eligible = isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
        return value.to(dtype) if eligible else value

    return tuple(map(one, args)), {name: one(value) for name, value in kwargs.items()}

"""Layer-wise quantizer selection (LQS; docs/spec.md, section 7), measured in flight."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..config import HOTConfig
from ..ops import reference
from ..plan import Plan


class GranularityProbe:
    """Records one layer's 4-bit quantization errors of g while its gradients are still exact.

    After ``lqs_batches`` recorded micro-batches ``choose`` gives the plan. In a single process the layer takes it by
    itself at its next forward; with several, ``fix_selection`` adds the errors over ranks first, so that all choose
    alike.
    """

    def __init__(self, plan: Plan, config: HOTConfig) -> None:
        self.plan, self.config = plan, config
        self.choice = None  # a budget's record of what it measured
        self.recorded = 0  # micro-batches: a layer that is called several times in each (ALBERT's) counts once
        self._backward = -1
        self.error_tensor: float | Tensor = 0.0
        self.error_token: float | Tensor = 0.0

    def watch(self, y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Record in the backward of this output; returns it, not marked as a view: a view that is changed in place gets
        another node, and the hook were lost."""
        y = torch.ops.aten._unsafe_view(y, y.shape)
        y.register_hook(self.record)
        return y

    def record(self, g: Tensor) -> None:
        """Add the squared Frobenius errors of the untransformed ``g`` (..., out_features), per tensor and per token."""
        if torch._C._functorch.is_functorch_wrapped_tensor(g):
            return  # its values belong to the transform and may not outlive it
        with torch.no_grad():
            v = g.reshape(-1, g.shape[-1])
            v = v.to(reference.compute_dtype(v))
            errors = []
            for dim in (None, 1):
                q, scale = reference.quantize(v, 4, dim)
                errors.append((q * scale[:, None] - v).square().sum())
            # A non-finite gradient (a GradScaler's overflow step) says nothing about the layer.
            if torch.isfinite(errors[0]) and torch.isfinite(errors[1]):
                self.error_tensor = self.error_tensor + errors[0]
                self.error_token = self.error_token + errors[1]
                backward = torch._C._current_graph_task_id()
                self.recorded += backward == -1 or backward != self._backward
                self._backward = backward

    def choose(self) -> Plan:
        """per_token where ``e_token < lqs_threshold * e_tensor``, errors as Frobenius norms."""
        per_token = float(self.error_token) ** 0.5 < self.config.lqs_threshold * float(self.error_tensor) ** 0.5
        return replace(self.plan, grad_input_granularity="per_token" if per_token else "per_tensor")

    @property
    def summary(self) -> list[float]:
        """What ranks add."""
        return [float(self.error_tensor), float(self.error_token)]

    def conclude(self, summary: list[float]) -> Plan:
        """The plan by the ``summary`` of all ranks; per_token, the safer one, where nothing was recorded."""
        self.error_tensor, self.error_token = summary
        unseen = self.error_tensor == self.error_token == 0
        return replace(self.plan, grad_input_granularity="per_token") if unseen else self.choose()

    def ready(self) -> Plan | None:
        """The choice, once enough was recorded; never inside a backward, where a recompute must repeat its forward."""
        if self.recorded < self.config.lqs_batches or torch._C._current_graph_task_id() != -1:
            return None
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return None  # ranks saw different data: fix_selection decides for all
        return self.choose()

"""What a layer measures for a budget: every candidate's gradients beside the exact ones, inside the real backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ..config import HOTConfig
from ..gradients import exact_types, grad_input, grad_weight, keep
from ..ops.reference import TOKEN_BLOCK, compute_dtype, padded
from ..plan import Plan
from ..rounding import layer_seed
from ..selected_plan import Choice
from .candidates import GRAD_INPUTS, KEPT_INPUTS, Shape
from .sums import ErrorSums, Sketch, project_features

MAX_TOKENS = 1024  # measured of each micro-batch, in whole blocks; the candidates take 25 products over them


class Decider(Protocol):
    """The budget that all probes of a model share."""

    config: HOTConfig
    probes: dict[str, BudgetProbe]
    choices: dict[str, Choice] | None  # by layer, once made

    def first_reader(self, x: Tensor, name: str) -> str: ...

    def ready(self, probe: BudgetProbe) -> Plan | None: ...

    def choose(self, probes: Sequence[BudgetProbe]) -> None: ...


class BudgetProbe:
    """Records one layer's candidates while its gradients are still exact; ``budget`` decides for all layers."""

    def __init__(self, plan: Plan, name: str, budget: Decider) -> None:
        self.plan, self.name, self.budget = plan, name, budget
        self.choice: Choice | None = None
        self.recorded = 0
        self.tokens = self.stored = self.uses = self._waiting = 0
        self.needs_input = self.needs_weight = False
        self.shape: Shape | None = None
        self.leader = name  # the first layer that reads the same tensor
        self.input_sums, self.weight_sums = ErrorSums(len(GRAD_INPUTS)), ErrorSums(len(KEPT_INPUTS))
        budget.probes[name] = self

    def ready(self) -> Plan | None:
        """The plan, once ``budget`` has chosen; see ``Budget.ready``."""
        return self.budget.ready(self)

    def decided(self) -> Plan:
        """The plan that ``budget`` has chosen."""
        self.choice = self.budget.choices[self.name]
        return self.choice.plan

    def watch(self, y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """A copy of this output that records in its backward; ``y`` itself under functorch, whose values may not
        outlive the transform."""
        if any(map(torch._C._functorch.is_functorch_wrapped_tensor, (y, x, weight))) or not y.numel():
            return y
        if torch._C._current_graph_task_id() == -1:
            self._waiting += 1
        self.uses = max(self.uses, self._waiting, 1)
        self.tokens = max(self.tokens, x.numel() // x.shape[-1])
        self.stored = max(self.stored, x.untyped_storage().nbytes() // x.element_size())
        self.needs_input |= x.requires_grad
        self.needs_weight |= weight.requires_grad
        self.leader = self.budget.first_reader(x, self.name) if weight.requires_grad else self.name
        with torch.no_grad():
            rows = x.detach().reshape(-1, x.shape[-1])
            columns = project_features(sample(rows)) if x.requires_grad else None
        kept = x.detach() if weight.requires_grad else None
        # Only what grad_input takes is saved: elsewhere the weight may change before the backward, as after nn.Linear.
        multiplied = weight if x.requires_grad else None
        return _Watch.apply(y, kept, columns, multiplied, weight.shape, self, self.recorded)

    def record(
        self,
        g: Tensor,
        x: Tensor | None,
        columns: Tensor | None,
        weight: Tensor | None,
        shape: torch.Size,
        turn: int,
    ) -> None:
        """Add one backward. g (..., out); x (..., in) or None; columns: the projection of sampled x, with the weight of
        ``shape`` (out, in), or None for both."""
        self._waiting = 0
        if (weight is not None and weight.dim() != 2) or torch._C._functorch.is_functorch_wrapped_tensor(g):
            return  # weights that an engine has released
        g = sample(g.reshape(-1, g.shape[-1]))
        seed = layer_seed(self.budget.config.seed, self.name, turn)
        found = []
        if columns is not None:
            found.append((self.input_sums, *self._input_errors(g, weight, columns, seed)))
        if x is not None:
            x = sample(x.reshape(-1, x.shape[-1]))
            found.append((self.weight_sums, *self._weight_errors(g, x, shape, seed)))
        # A non-finite gradient (a GradScaler's overflow step) says nothing about the layer.
        if all(bool(norms.isfinite().all()) for _, norms, _ in found):
            for sums, norms, sketches in found:
                sums.scalars += norms
                sums.sketches += sketches
            self.recorded += 1
            element_size = (
                self.shape.element_size if x is None and self.shape else (g if x is None else x).element_size()
            )
            self.shape = Shape(self.tokens, *shape, element_size, g.element_size(), self.stored)

    def _input_errors(self, g: Tensor, weight: Tensor, columns: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(g)
        exact = g.to(dtype) @ weight.to(dtype)
        # What a change of x adds up over steps: (N, I) gradients meet other tokens each time, so they are judged by
        # g_x^T x, the weight gradient of a linear layer in front of this one.
        sketch = Sketch(weight.shape[1], columns.shape[1], g.device)
        summed = _Summed(exact, lambda e: sketch(e.t() @ columns.to(e.dtype)))
        for candidate in GRAD_INPUTS:
            plan = replace(self.plan, **candidate.settings)
            summed.add(grad_input(g, weight, plan, seed, dtype))
        return summed.result()

    def _weight_errors(self, g: Tensor, x: Tensor, shape: torch.Size, seed: int) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(g)
        summed = _Summed(g.to(dtype).t() @ x.to(dtype), Sketch(*shape, g.device))
        for candidate in KEPT_INPUTS:
            plan = replace(self.plan, **candidate.settings)
            packed, scale = keep(x, plan, seed, share=False)
            summed.add(grad_weight(g, packed, scale, plan, seed, x.shape[1], dtype))
        return summed.result()


class _Summed:
    """Norms and sketches of errors against one exact gradient, fetched from the device once."""

    def __init__(self, exact: Tensor, sketch) -> None:
        self.exact, self.sketch = exact, sketch
        self.norms: list[Tensor] = []
        self.sketches: list[Tensor] = []

    def add(self, value: Tensor) -> None:
        self._note(value - self.exact)

    def _note(self, error: Tensor) -> None:
        sketched = self.sketch(error)
        inner = torch.dot(error.flatten(), self.exact.flatten())
        self.norms.append(torch.stack((error.norm().float(), inner.float(), sketched.norm())))
        self.sketches.append(sketched)

    def result(self) -> tuple[Tensor, Tensor]:
        """As ErrorSums has them, the exact gradient last."""
        self._note(self.exact)
        norms = torch.stack(self.norms).cpu().double()
        norms[:, (0, 2)] **= 2  # squared here: float32 would overflow at 2e19
        return norms, torch.stack(self.sketches).cpu()


def sample(rows: Tensor) -> Tensor:
    """At most MAX_TOKENS rows: whole blocks of 16 as the layer cuts them, spread evenly."""
    tokens = rows.shape[0]
    if tokens <= MAX_TOKENS:
        return rows
    blocks, kept = padded(tokens, TOKEN_BLOCK) // TOKEN_BLOCK, MAX_TOKENS // TOKEN_BLOCK
    first = torch.arange(kept) * blocks // kept * TOKEN_BLOCK
    index = (first[:, None] + torch.arange(TOKEN_BLOCK)).flatten()
    return rows[index[index < tokens].to(rows.device)]


class _Watch(torch.autograd.Function):
    """The identity, whose backward lets a probe look at g. x and the weight go through ``save_for_backward``, so that
    checkpointing, saved-tensor hooks and FSDP see them; a copy is returned, since a view could not be changed in
    place by what follows."""

    @staticmethod
    def forward(ctx, y, x, columns, weight, shape, probe, turn):
        ctx.save_for_backward(x, columns, weight)
        ctx.shape, ctx.probe, ctx.turn = shape, probe, turn
        return y.clone()

    @staticmethod
    def backward(ctx, g):
        x, columns, weight = ctx.saved_tensors
        with torch.no_grad(), exact_types(g.device.type):
            weight = None if weight is None else weight.detach()
            ctx.probe.record(g.detach(), x, columns, weight, ctx.shape, ctx.turn)
        return g, None, None, None, None, None, None

"""One budget for all layers of a model: when enough was measured, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from ..buffer import REMEMBERED
from ..config import HOTConfig, byte_budget
from ..plan import Plan
from ..selected_plan import Choice, Score
from .candidates import EXACT_INPUT, GRAD_INPUTS, KEPT_INPUTS
from .choose import Layer, Pick, cheapest, exact_bytes, within_bytes
from .probe import BudgetProbe

# A layer that runs in few of the micro-batches does not keep the others measuring for longer than this many times.
PATIENCE = 4


class Budget:
    """Shared by the probes of one model."""

    def __init__(self, config: HOTConfig) -> None:
        self.config = config
        self.probes: dict[str, BudgetProbe] = {}
        self.choices: dict[str, Choice] | None = None
        self._read: list[tuple[TensorWeakRef, int, str]] = []

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_read": []}  # weak references to tensors, which cannot be copied

    def first_reader(self, x: Tensor, name: str) -> str:
        """The layer that read this very tensor first: q for k and v, where ``HOTConfig.share`` keeps one copy."""
        if not self.config.share:
            return name
        for reference, version, reader in self._read:
            if reference() is x and version == x._version:
                return reader
        self._read = [*self._read[1 - REMEMBERED :], (TensorWeakRef(x), x._version, name)]
        return name

    def ready(self, probe: BudgetProbe) -> Plan | None:
        """``probe``'s plan once all layers have seen enough; never inside a backward, where a recompute must repeat its
        forward, and with several processes only after ``fix_selection``."""
        if torch._C._current_graph_task_id() != -1:
            return None
        if self.choices is None:
            if (torch.distributed.is_available() and torch.distributed.is_initialized()) or not self._enough(probe):
                return None
            self.choose(list(self.probes.values()))
        return probe.decided()

    def _enough(self, probe: BudgetProbe) -> bool:
        """When this layer and all that ran have seen their micro-batches; at the latest when it has seen far more."""
        turns = [p.recorded / max(p.uses, 1) for p in (probe, *self.probes.values()) if p.recorded or p is probe]
        return min(turns) >= self.config.lqs_batches or turns[0] >= PATIENCE * self.config.lqs_batches

    def choose(self, probes: Sequence[BudgetProbe]) -> None:
        """Decide, by what ``probes`` hold now. A layer that saw no gradient keeps the configuration's plan.

        Raises:
            ValueError: when ``max_bytes`` cannot be met.
        """
        layers = [_measured(p) for p in probes if p.recorded]
        layers = [layer for layer in layers if layer.inputs is not None or layer.kept is not None]
        if not layers:
            picks = {}
        elif self.config.max_grad_error is not None:
            picks = cheapest(layers, self.config.max_grad_error)
        else:
            picks = within_bytes(layers, byte_budget(self.config.max_bytes, exact_bytes(layers)))
        recorded = {p.name: p.recorded for p in probes}
        self.choices = {p.name: Choice(p.plan) for p in probes}
        counted: set = set()
        for layer in layers:
            self.choices[layer.name] = _choice(layer, picks[layer.name], recorded[layer.name], counted)


def _measured(probe: BudgetProbe) -> Layer:
    sums = {}
    for name, needed, of, candidates in (
        ("inputs", probe.needs_input, probe.input_sums, GRAD_INPUTS),
        ("kept", probe.needs_weight, probe.weight_sums, KEPT_INPUTS),
    ):
        scored = needed and of.seen
        sums[name] = {c: of.score(i, probe.recorded) for i, c in enumerate(candidates)} if scored else None
    return Layer(probe.name, probe.plan, probe.shape, **sums, leader=probe.leader, uses=max(probe.uses, 1))


def _choice(layer: Layer, pick: Pick, batches: int, counted: set) -> Choice:
    def once(key, size: int) -> int:
        if key in counted:
            return 0
        counted.add(key)
        return size

    products = sum(scores is not None for scores in (layer.inputs, layer.kept))
    return Choice(
        pick.plan,
        None if layer.inputs is None else layer.inputs.get(pick.grad_input, Score()),
        None if layer.kept is None else layer.kept.get(pick.kept, Score()),
        0 if pick.kept is None else once((layer.leader, pick.kept), layer.bytes(pick.kept)),
        0 if layer.kept is None else once((layer.leader, "exact"), layer.uses * layer.shape.own_bytes),
        pick.operations / (products * EXACT_INPUT.operations(layer.shape)),
        batches,
    )

"""From what was measured to one candidate per layer: the cheapest within an error, or the best within bytes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

from ..plan import Plan
from ..selected_plan import Score
from .candidates import EXACT_INPUT, EXACT_KEPT, GradInput, KeptInput, Shape, combine

# Of the budget, for what was measured: the error of a sum is known to 2% (sums.SKETCH), and later micro-batches differ.
# With 5% the worst of 210 layers came to 1.09 (single) and 1.13 (summed) of the budget on fresh text.
MARGIN = 0.9
# Operations that differ by less are as cheap: the most exact wins. A scale per token costs a layer 1 to 6% more than
# one per tensor and divides the error of its g_x by four; without this SmolLM2's gradient was worse than by default.
AS_CHEAP = 1.1


@dataclass(frozen=True)
class Layer:
    """What was measured of one layer. ``None`` for the scores of a gradient that it does not compute.

    ``leader``: the first layer that reads the same tensor; ``uses``: calls in one micro-batch.
    """

    name: str
    base: Plan
    shape: Shape
    inputs: dict[GradInput, Score] | None
    kept: dict[KeptInput, Score] | None
    leader: str
    uses: int = 1

    def bytes(self, kept: KeptInput) -> int:
        return self.uses * kept.bytes(self.shape, self.base.grad_weight_granularity == "per_feature")


@dataclass(frozen=True)
class Pick:
    """One layer's two candidates and what they come to; ``loss`` is the squared error that a byte budget minimizes."""

    grad_input: GradInput | None
    kept: KeptInput | None
    plan: Plan
    operations: float
    loss: float


@dataclass(frozen=True)
class Option:
    """Picks for all layers that read one tensor: a packed copy counts once however many layers keep it."""

    picks: dict[str, Pick]
    bytes: int
    operations: float
    loss: float


def _fewest_operations(choices: list) -> Pick | Option:
    """The most exact of those within AS_CHEAP of the fewest operations."""
    limit = AS_CHEAP * min(c.operations for c in choices)
    return min((c for c in choices if c.operations <= limit), key=lambda c: (c.loss, c.operations))


def _most_exact(choices: list) -> Pick | Option:
    return min(choices, key=lambda c: (c.loss, c.operations))


def _picks(layer: Layer, max_error: float | None) -> dict[KeptInput | None, Pick]:
    """The best choice of g_x beside each admissible kept form: fewest operations within ``max_error``, else (None) the
    most exact integers, since g_x keeps nothing."""
    inputs: dict[GradInput | None, Score] = {None: Score()} if layer.inputs is None else dict(layer.inputs)
    kept: dict[KeptInput | None, Score] = {None: Score()} if layer.kept is None else {**layer.kept, EXACT_KEPT: Score()}
    if max_error is not None:
        if layer.inputs is not None:
            inputs[EXACT_INPUT] = Score()
        inputs = {c: s for c, s in inputs.items() if s.bound <= MARGIN * max_error}
        kept = {c: s for c, s in kept.items() if s.bound <= MARGIN * max_error}
    best, take = {}, _most_exact if max_error is None else _fewest_operations
    for k, k_score in kept.items():
        picks = []
        for i, i_score in inputs.items():
            plan = combine(layer.base, i, k)
            if plan is not None:
                operations = sum(c.operations(layer.shape) for c in (i, k) if c is not None)
                picks.append(Pick(i, k, plan, operations, i_score.bound**2 + k_score.bound**2))
        best[k] = take(picks)
    return best


def _options(layers: list[Layer], max_error: float | None) -> list[Option]:
    """All sensible ways for the readers of one tensor."""
    picks = {layer.name: _picks(layer, max_error) for layer in layers}
    forms = {form: layer.bytes(form) for layer in layers for form in picks[layer.name] if form is not None}
    take = _most_exact if max_error is None else _fewest_operations
    options = []
    for count in range(1, min(len(layers), len(forms)) + 1) if forms else [0]:
        for chosen in combinations(forms, count):
            allowed = {name: [p for k, p in of.items() if k is None or k in chosen] for name, of in picks.items()}
            if all(allowed.values()):
                best = {name: take(of) for name, of in allowed.items()}
                used = {p.kept for p in best.values()} - {None}
                options.append(
                    Option(
                        best,
                        sum(forms[k] for k in used),
                        sum(p.operations for p in best.values()),
                        sum(p.loss for p in best.values()),
                    )
                )
    return options


def _groups(layers: list[Layer]) -> list[list[Layer]]:
    """Layers by the tensor they read."""
    groups: dict[str, list[Layer]] = {}
    for layer in layers:
        groups.setdefault(layer.leader, []).append(layer)
    return list(groups.values())


def cheapest(layers: list[Layer], max_error: float) -> dict[str, Pick]:
    """Fewest bytes, then fewest operations, of what keeps every gradient's error within MARGIN of ``max_error``.

    Where no integer candidate does, a gradient stays exact.
    """
    chosen = {}
    for group in _groups(layers):
        options = _options(group, max_error)
        smallest = min(o.bytes for o in options)
        chosen.update(_fewest_operations([o for o in options if o.bytes == smallest]).picks)
    return chosen


def within_bytes(layers: list[Layer], budget: int) -> dict[str, Pick]:
    """The least sum of squared relative errors whose kept inputs fit in ``budget`` bytes.

    Greedy: every group of layers starts at its fewest bytes; then, again and again, the step that lowers the sum most
    per byte among those that still fit.

    Raises:
        ValueError: when even the fewest bytes are too many.
    """
    options = [_options(group, None) for group in _groups(layers)]
    chosen = [min(of, key=lambda o: (o.bytes, o.loss)) for of in options]
    left = budget - sum(o.bytes for o in chosen)
    if left < 0:
        raise ValueError(
            f"HOTConfig.max_bytes={budget:,} bytes is too little: the smallest forms of the {len(layers)} measured "
            f"layers' inputs take {budget - left:,} bytes in a micro-batch; raise max_bytes or shorten the micro-batch."
        )
    while True:
        steps = [
            ((now.loss - o.loss) / max(o.bytes - now.bytes, 1), g, o)
            for g, (now, of) in enumerate(zip(chosen, options, strict=True))
            for o in of
            if o.loss < now.loss and o.bytes - now.bytes <= left
        ]
        if not steps:
            return {name: pick for option in chosen for name, pick in option.picks.items()}
        _, group, option = max(steps, key=lambda step: step[:2])
        left -= option.bytes - chosen[group].bytes
        chosen[group] = option


def exact_bytes(layers: list[Layer]) -> int:
    """What exact training keeps of the measured layers' inputs, each tensor once; of a view its own bytes, so that a
    share of it promises no more than a share of what is really kept."""
    return sum(max((x.uses * x.shape.own_bytes for x in g if x.kept is not None), default=0) for g in _groups(layers))

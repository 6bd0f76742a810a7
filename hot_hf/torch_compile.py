"""What takes down or transforms a patched layer: room for plans under torch.compile, and where it must be plain."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch


def is_plain_here() -> bool:
    """Whether all is to be as without HOT now: while a graph is taken down that is to run without hot_hf (torch.export,
    ONNX, jit.trace), and under forward-mode differentiation, which keeps nothing."""
    if torch.compiler.is_exporting() or torch.jit.is_tracing():
        return True
    return not torch.compiler.is_compiling() and torch.autograd.forward_ad._current_level >= 0


_layers: dict[int, weakref.ref] = {}  # what apply_hot has left on patched layers, while it lives
traces = 0  # of patched layers, in this process
outside_graph: Callable | None = None  # calls its first argument with the others, uncompiled; there once traced
_plans: set[tuple] = set()


def count_layer(state: object) -> None:
    """Count a patched layer until its state is gone: unpatched, patched anew, or deleted with its model."""
    key = id(state)
    _layers[key] = weakref.ref(state, lambda _, gone=_layers.pop: gone(key, None))


def tracing(*plan) -> None:
    """Runs while a layer is traced, never in compiled code.

    Blocks compiled one by one (regional compilation) share one code object, and torch.compile gives up on a code object
    after ``recompile_limit`` (8) versions: the ninth combination of plans would run uncompiled. Where plans differ,
    every layer may need a version of its own, so the limit is raised to 8, for shapes, and the patched layers that are
    alive. It is process-wide, and never lowered: somebody else may have raised it.
    """
    global outside_graph, traces
    import torch._dynamo  # there already: it is what traces

    traces += 1
    if outside_graph is None:
        outside_graph = torch.compiler.disable(_layer_that_measures_or_rounds_stochastically)
    _plans.add(plan)
    if len(_plans) > 1:
        config = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, 8 + len(_layers))


# torch.compiler.assume_constant_result does this, after importing torch._dynamo (2 s) for everyone.
tracing._dynamo_marked_constant = True


# The name is what a graph break, or fullgraph=True, reports.
def _layer_that_measures_or_rounds_stochastically(function: Callable, *args):
    return function(*args)

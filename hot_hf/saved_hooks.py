"""Who decides what is saved for the backward here, told from autograd's saved-tensor hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

Hook = Callable[[Any], Any]


def top_hooks() -> tuple[Hook, Hook] | None:
    """The innermost pack and unpack hooks, or None where there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def in_checkpoint() -> bool:
    """Whether this runs inside a non-reentrant ``torch.utils.checkpoint``, in its forward or its recompute."""
    hooks = top_hooks()
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def in_backward() -> bool:
    """Whether a backward is running: a recompute is at work, whose results are used at once."""
    return torch._C._current_graph_task_id() != -1


def unseen() -> torch.autograd.graph.saved_tensors_hooks:
    """A context in which nobody's hooks see what is saved: for a graph that lives inside one function."""
    # Detached: an output kept as it is would hold its own node, and the node it, for ever.
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t if t.is_leaf else t.detach(), lambda t: t)


def is_dropped() -> bool:
    """Whether what is saved here is thrown away at once and computed again in the backward: the forward of a
    non-reentrant checkpoint. A selective one keeps results of operators, by a dispatch mode, and takes what it kept."""
    if not in_checkpoint() or in_backward() or _get_current_dispatch_mode_stack():
        return False
    return top_hooks()[0].__qualname__.startswith("_checkpoint_hook.")


def refuses_hooks() -> bool:
    """Whether saved-tensor hooks are forbidden or do not reach what runs here: torch.func, compiled graphs."""
    return (
        torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None
    )

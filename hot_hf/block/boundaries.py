"""Checkpointed blocks that keep their input packed, and run again from what was kept.

A checkpointed block keeps its inputs and nothing else. Here the large ones are kept as int8 in groups of 32, a bfloat16
scale each: 1.06 bytes a value instead of 4 or 2. The first run of the block sees the inputs themselves: only the second
one, inside the backward, and with it the gradient, belongs to the rounded ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from ..buffer import shared
from ..saved_hooks import top_hooks
from .context import SMALLEST
from .hold import is_fake, pack_groups, unpack_groups
from .kinds import BOUNDARY

own_checkpoint = partial(checkpoint, use_reentrant=False)


def _packable(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and (type(value) is Tensor or is_fake(value))
        and not isinstance(value, nn.Parameter)
        and value.is_floating_point()
        and value.requires_grad
        and value.numel() >= SMALLEST
    )


class _Packed:
    """All about a packed input but its bytes."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype

    @staticmethod
    def pack(tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Integers and scales; the same ones for a tensor that several blocks read (an encoder's output)."""
        return shared(tensor, ("boundary",), lambda: pack_groups(tensor.detach().reshape(-1), BOUNDARY))

    def unpack(self, packed: Tensor, scale: Tensor) -> Tensor:
        values = unpack_groups(packed, scale, BOUNDARY, self.shape.numel(), self.dtype)
        return values.view(self.shape).requires_grad_()


def without_caches(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """``kwargs`` of a block's forward without a cache of keys and values, which a second run would fill a second time,
    as transformers' checkpointing leaves it out in training; None where the cache holds something (prefix tuning) or is
    wanted (evaluation): such a block cannot run twice."""
    caches = [v for v in (*args, *kwargs.values()) if hasattr(v, "get_seq_length")]
    if not caches:
        return kwargs
    by_position = any(hasattr(v, "get_seq_length") for v in args)
    if not block.training or by_position or any(_holds_something(cache, block) for cache in caches):
        return None
    changes = {name: None for name, value in kwargs.items() if hasattr(value, "get_seq_length")}
    return {**kwargs, **changes, **({"use_cache": False} if kwargs.get("use_cache") else {})}


def _holds_something(cache: Any, block: nn.Module) -> bool:
    """Whether ``cache`` has keys for ``block`` before it runs."""
    places = {m.layer_idx for m in block.modules() if isinstance(getattr(m, "layer_idx", None), int)}
    return not places or any(int(cache.get_seq_length(place)) > 0 for place in places)


def checkpoint_packed(run: Callable, function: Callable, *args: Any, **kwargs: Any) -> Any:
    """``run(function, *args, **kwargs)``, where ``run`` is a checkpoint function, keeping large inputs packed.

    Under reentrant checkpointing they are packed as they are saved; where something in between has hooks of its own
    (``save_on_cpu``), those decide. Otherwise ``run`` is handed the packed bytes, so that whatever it does with inputs
    (moving them to the host) it does with those.
    """
    if getattr(run, "keywords", {}).get("use_reentrant", True):
        with _packed_inputs():
            return run(function, *args, **kwargs)
    if isinstance(function, partial):  # transformers binds a block's keyword arguments
        kwargs = {**function.keywords, **kwargs}
        function = partial(function.func, *function.args)
    inputs, structure = tree_flatten((args, kwargs))
    layouts = {i: _Packed(value) for i, value in enumerate(inputs) if _packable(value)}
    kept = [part for i in layouts for part in _Packed.pack(inputs[i])]
    others = [None if i in layouts else value for i, value in enumerate(inputs)]
    live: list[list] = [inputs]  # for the first run alone: what is kept of them afterwards is packed
    del inputs, args, kwargs

    def packed_run(*kept: Tensor) -> Any:
        values = live.pop() if live else list(others)
        for place, (i, layout) in enumerate(layouts.items()):
            if values[i] is None:
                values[i] = layout.unpack(*kept[2 * place : 2 * place + 2])
        args, kwargs = tree_unflatten(values, structure)
        return function(*args, **kwargs)

    return run(packed_run, *kept)


def _packed_inputs() -> torch.autograd.graph.saved_tensors_hooks:
    """Saved-tensor hooks that pack, and hand on to those that were there before, if any."""
    pack, unpack = top_hooks() or (_as_is, _as_is)

    def pack_saved(tensor: Tensor) -> tuple:
        if not _packable(tensor):
            return None, pack(tensor)
        return (_Packed(tensor), *map(pack, _Packed.pack(tensor)))

    def unpack_saved(held: tuple) -> Tensor:
        layout, *parts = held
        parts = [unpack(part) for part in parts]
        return parts[0] if layout is None else layout.unpack(*parts).detach()

    return torch.autograd.graph.saved_tensors_hooks(pack_saved, unpack_saved)


def _as_is(value: Any) -> Any:
    return value

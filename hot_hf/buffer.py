"""Packed activations: one copy per tensor, however many layers read it (docs/spec.md, section 4)."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

# q/k/v and gate/up follow each other; every decoder layer returns to the encoder's output after six other tensors.
REMEMBERED = 16


class _Recent(threading.local):
    """The last few packed tensors of this thread. Everything is held weakly: a freed graph frees its buffers."""

    def __init__(self) -> None:
        self.entries: OrderedDict[tuple, tuple] = OrderedDict()

    def find(self, key: tuple, x: Tensor) -> tuple[Tensor, Tensor] | None:
        entry = self.entries.get(key)
        if entry is None:
            return None
        seen, version, packed, scale = (entry[0](), entry[1], entry[2](), entry[3]())
        if seen is not x or version != x._version or packed is None or scale is None:
            del self.entries[key]
            return None
        self.entries.move_to_end(key)
        return packed, scale

    def add(self, key: tuple, x: Tensor, packed: Tensor, scale: Tensor) -> None:
        self.entries[key] = (TensorWeakRef(x), x._version, TensorWeakRef(packed), TensorWeakRef(scale))
        while len(self.entries) > REMEMBERED:
            self.entries.popitem(last=False)


_recent = _Recent()


def _shareable(x: Tensor) -> bool:
    # Under compilation common-subexpression elimination does the sharing; functorch wrappers change their meaning
    # with the level; inference tensors have no version to check.
    return not (torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(x) or x.is_inference())


def shared(x: Tensor, settings: tuple, pack: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """What ``pack`` gave for the same unchanged ``x`` and ``settings`` while somebody holds it, else what it gives
    now: integers and scales."""
    if not _shareable(x):
        return pack()
    key = (id(x), *settings)  # never under torch.compile, where it would be a guard that no other x fulfils
    if (found := _recent.find(key, x)) is None:
        found = pack()
        _recent.add(key, x, *found)
    return found

"""Which tensors are alive, and the most that they took at once: what an allocator without slack would hold."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operators make, while it is entered, until they die.

    ``now`` and ``peak`` in bytes. Tensors that are there already count nothing where ``known`` names them. What an
    operator takes inside itself is not seen.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._alive or key in self._known:
            return
        self._alive.add(key)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, nbytes: int) -> None:
        self._alive.discard(key)
        self.now -= nbytes

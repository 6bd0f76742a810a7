"""Bytes kept for the backward, as autograd itself keeps them: measured with saved-tensor hooks, each storage once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .layers import HOTMixin


@dataclass
class _Storage:
    nbytes: int
    dtypes: set[torch.dtype] = field(default_factory=set)
    owners: set[str] = field(default_factory=set)


class SavedTensors:
    """Record what is saved for the backward while the context is open.

    ::

        with SavedTensors(model) as saved:
            loss = model(**batch).loss
        saved.total_bytes, saved.hot_bytes

    A storage counts once with its whole size, however many views of it are saved and however many nodes save it; it
    belongs to every module (innermost, by name) that saved it. Parameters and buffers of ``model`` are not counted.
    Do not run the backward inside the context: a checkpointed recompute would be counted on top.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.storages: dict[int, _Storage] = {}
        self._stack: list[str] = []
        self._handles: list = []
        # Keeps the storages alive, so that an address cannot be given out twice while it is recorded.
        self._alive: list = []

    def __enter__(self) -> SavedTensors:
        self._own = {t.untyped_storage().data_ptr() for t in (*self.model.parameters(), *self.model.buffers())}
        for name, module in self.model.named_modules():
            self._handles.append(module.register_forward_pre_hook(lambda m, args, n=name: self._stack.append(n)))
            self._handles.append(module.register_forward_hook(lambda m, args, out: self._leave(), always_call=True))
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._record, lambda t: t)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._hooks.__exit__(*error)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._alive.clear()

    def _leave(self) -> None:  # a hook's return value other than None would replace the output
        self._stack.pop()

    def _record(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address and address not in self._own:
            if address not in self.storages:
                self.storages[address] = _Storage(storage.nbytes())
                self._alive.append(storage)
            entry = self.storages[address]
            entry.dtypes.add(tensor.dtype)
            entry.owners.add(self._stack[-1] if self._stack else "")
        return tensor

    @property
    def total_bytes(self) -> int:
        """All bytes kept, each storage once."""
        return sum(s.nbytes for s in self.storages.values())

    def bytes_of(self, modules: Iterable[str]) -> int:
        """Bytes of the storages that at least one of the named modules saved, each once."""
        names = set(modules)
        return sum(s.nbytes for s in self.storages.values() if s.owners & names)

    @property
    def hot_bytes(self) -> int:
        """Bytes kept by patched layers: packed inputs and scales (or inputs as they are, for exact formats)."""
        return self.bytes_of(name for name, module in self.model.named_modules() if isinstance(module, HOTMixin))

"""Bytes kept for the backward, as autograd itself keeps them: measured with saved-tensor hooks, each storage once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..layers import HOTMixin


@dataclass
class _Storage:
    nbytes: int
    dtypes: list[torch.dtype] = field(default_factory=list)
    owners: list[str] = field(default_factory=list)


class SavedTensors:
    """Record what is saved for the backward while the context is open.

    ::

        with SavedTensors(model) as saved:
            loss = model(**batch).loss
        saved.total_bytes, saved.hot_bytes

    A storage counts once with its whole size, however many views of it are saved and however many nodes save it; it
    belongs to every module (innermost, by name) that saved it. Parameters and buffers of ``model`` are not counted.
    Works on meta tensors too: a storage is told by its identity, not by its address. What a checkpointed layer would
    save is not counted, its inputs are. Do not run the backward inside the context: a checkpointed recompute would be
    counted on top.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.storages: dict[int, _Storage] = {}
        self._stack: list[str] = []
        self._handles: list = []
        # Keeps the storages alive, so that an identity cannot be given out twice while it is recorded.
        self._alive: list = []

    def __enter__(self) -> SavedTensors:
        self._own = {t.untyped_storage()._cdata for t in (*self.model.parameters(), *self.model.buffers())}
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
        key = storage._cdata
        if key not in self._own:
            if key not in self.storages:
                self.storages[key] = _Storage(storage.nbytes())
                self._alive.append(storage)
            entry = self.storages[key]
            entry.dtypes.append(tensor.dtype)
            entry.owners.append(self._stack[-1] if self._stack else "")
        # An output holds its own node: kept as it is, node and tensor would keep each other alive for ever.
        return tensor if tensor.is_leaf else tensor.detach()

    @property
    def total_bytes(self) -> int:
        """All bytes kept, each storage once."""
        return sum(s.nbytes for s in self.storages.values())

    def bytes_of(self, modules: Iterable[str]) -> int:
        """Bytes of the storages that at least one of the named modules saved, each once."""
        names = set(modules)
        return sum(s.nbytes for s in self.storages.values() if names.intersection(s.owners))

    @property
    def hot_bytes(self) -> int:
        """Bytes kept by patched layers: packed inputs and scales (or inputs as they are, for exact formats)."""
        return self.bytes_of(name for name, module in self.model.named_modules() if isinstance(module, HOTMixin))


@dataclass(frozen=True)
class KeptStorage:
    """One storage: ``owner`` is the innermost module that saved it first ("" is the model's own code, such as the
    loss), ``kind`` that module's class, ``dtype`` as it was first saved."""

    owner: str
    kind: str
    dtype: torch.dtype
    nbytes: int


@dataclass
class Measurement:
    """What one training forward keeps for its backward, each storage once, under its first owner."""

    kept: list[KeptStorage]

    @property
    def total_bytes(self) -> int:
        return sum(k.nbytes for k in self.kept)

    def by(self, what: str) -> dict[Any, int]:
        """Bytes by ``kind`` (module class), ``dtype`` or ``owner`` (module name), largest first."""
        totals: dict[Any, int] = {}
        for k in self.kept:
            totals[getattr(k, what)] = totals.get(getattr(k, what), 0) + k.nbytes
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def outside(self, *owners: str) -> int:
        """Bytes kept by anything but the named modules; ``outside("")`` leaves out the loss and its logits."""
        return sum(k.nbytes for k in self.kept if k.owner not in owners)

    def __str__(self) -> str:
        lines = [f"{self.total_bytes / 2**20:,.1f} MiB kept for the backward"]
        for what in ("kind", "dtype"):
            lines += [f"  {name!s:32} {nbytes / 2**20:10,.1f} MiB" for name, nbytes in self.by(what).items()]
        return "\n".join(lines)


def measure(model: nn.Module, batch: Mapping[str, Any] | Any) -> Measurement:
    """Run one forward of ``model`` as it stands (its mode, its autocast) and account for what is kept.

    Args:
        batch: keyword arguments of the model, or its one positional input. Tensors may be on the meta device, with a
            model that is.

    Returns:
        a Measurement; ``print`` it for a table. The global random state is as it was before.

    Raises:
        RuntimeError: when gradients are switched off, where nothing would be kept.
    """
    if not torch.is_grad_enabled():
        raise RuntimeError("hot_hf.memory.measure: gradients are switched off here; call it outside torch.no_grad().")
    devices = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
    # The CPU's random state is restored in any case.
    with torch.random.fork_rng(devices=list(devices), device_type=next((d.type for d in devices), "cpu")):
        with SavedTensors(model) as saved:
            output = model(**batch) if isinstance(batch, Mapping) else model(batch)
        del output
    kinds = {name: type(module).__name__.removeprefix("HOT") for name, module in model.named_modules()}
    return Measurement(
        [KeptStorage(s.owners[0], kinds.get(s.owners[0], ""), s.dtypes[0], s.nbytes) for s in saved.storages.values()]
    )

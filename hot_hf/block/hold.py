"""How a saved tensor is held until its backward: as it is, packed in groups, as bits, or recomputed from another."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from .. import ops
from ..ops import reference
from .kinds import Codec

Hook = Callable[[Any], Any]

FLOAT16_MAX = torch.finfo(torch.float16).max


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor that is no Parameter has a device but no data, as in ``hot_hf.memory.estimate``."""
    return isinstance(tensor, FakeTensor) and not isinstance(tensor, torch.nn.Parameter)


def _as_is(value: Any) -> Any:
    return value


@cache
def _largest_scale(dtype: torch.dtype) -> float:
    """The largest bfloat16 that 127 times stays finite in ``dtype``: 512 in float16, as 65,504 / 127 rounds to 516."""
    fraction, exponent = math.frexp(min(torch.finfo(dtype).max, torch.finfo(torch.float32).max) / 127)
    return math.ldexp(math.floor(fraction * 256), exponent - 8)


def pack_groups(flat: Tensor, codec: Codec, centered: bool = False) -> tuple[Tensor, Tensor]:
    """Pack a flat tensor in groups of ``codec.group``; scales in bfloat16, 2^-9 off: a fifth of int8's error.

    Returns:
        integers (groups, ...) and scales (groups,); where ``centered``, (groups, 2): the scale of what is left of each
        group without its mean, and that mean.
    """
    if tail := -flat.numel() % codec.group:
        flat = torch.cat((flat, flat[-1:].expand(tail)))  # not zeros: they would move a mean
    groups = flat.view(-1, codec.group)
    if centered:
        groups = groups.to(torch.promote_types(groups.dtype, torch.float32))
        mean = groups.mean(1).to(torch.bfloat16)
        groups = groups - mean[:, None]
    packed, scale = ops.compress(groups, codec.format, 8, 16, True, "nearest", 0)
    rounded = scale.to(torch.bfloat16)
    if codec.format == "int8":  # what was finite stays so; what was not shows as nan
        rounded = torch.where(scale.isfinite(), rounded.clamp(max=_largest_scale(groups.dtype)), rounded)
    return packed, torch.stack((rounded, mean), 1) if centered else rounded


def unpack_groups(packed: Tensor, scale: Tensor, codec: Codec, numel: int, dtype: torch.dtype) -> Tensor:
    """The inverse of ``pack_groups``: ``numel`` values in ``dtype``, flat."""
    scale, mean = (scale, None) if scale.dim() == 1 else scale.unbind(1)
    if codec.format == "int8":
        # Eight bits times eight bits: in bfloat16 the product is rounded once, as it would be from float32.
        wide = torch.bfloat16 if dtype == torch.bfloat16 and mean is None else torch.float32
        values = packed.to(wide).mul_(scale.to(wide)[:, None])
    else:
        wide = torch.float32
        values = reference.unpack_int4(packed, codec.group).to(wide).mul_(scale.to(wide)[:, None])
        values = reference.hadamard(values, 16)
    if mean is not None:
        values.add_(mean.to(wide)[:, None])
    if dtype == torch.float16 and (mean is not None or codec.format != "int8"):  # a sum may exceed the largest
        values.clamp_(-FLOAT16_MAX, FLOAT16_MAX)
    return values.view(-1)[:numel].to(dtype)


class Exact:
    """The tensor itself, with autograd's check that nobody has changed it since."""

    __slots__ = ("checked", "handle", "shape", "tensor_version", "unpack")
    rounded = False

    def __init__(self, tensor: Tensor, outer: tuple[Hook, Hook] | None) -> None:
        # Detached: an output kept as it is would hold its own node, and the node it, for ever. Versions are shared.
        tensor = tensor if tensor.is_leaf else tensor.detach()
        pack, self.unpack = outer or (_as_is, _as_is)
        self.shape = tensor.shape
        self.checked = outer is None and not tensor.is_inference()
        self.tensor_version = tensor._version if self.checked else 0
        self.handle = pack(tensor)

    def value(self) -> Tensor:
        tensor = self.unpack(self.handle)
        if self.checked and tensor._version != self.tensor_version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{tensor.dtype} {tuple(tensor.shape)} is at version {tensor._version}, "
                f"saved at version {self.tensor_version}"
            )
        return tensor


def _dense(tensor: Tensor) -> bool:
    """Whether the elements lie side by side in memory, in whichever order."""
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != step:
                return False
            step *= size
    return True


class Layout:
    """All about a packed tensor but its bytes: where the values go when they are unpacked."""

    __slots__ = ("codec", "dtype", "numel", "shape", "stride")

    @classmethod
    def pack(cls, tensor: Tensor, codec: Codec, centered: bool = False) -> tuple[Layout, Tensor, Tensor]:
        """The layout of ``tensor``, its packed values in the order of its memory (``centered``: of its rows), and their
        scales."""
        tensor = tensor.detach()
        if centered or not _dense(tensor):
            tensor = tensor.contiguous()
        layout = cls()
        layout.codec, layout.numel, layout.dtype = codec, tensor.numel(), tensor.dtype
        layout.shape, layout.stride = tensor.shape, tensor.stride()
        flat = tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((layout.numel,), (1,))
        return layout, *pack_groups(flat, codec, centered)

    def unpack(self, packed: Tensor, scale: Tensor) -> Tensor:
        return unpack_groups(packed, scale, self.codec, self.numel, self.dtype).as_strided(self.shape, self.stride)


class _Unpacked(threading.local):
    """The last tensors that this thread's backward unpacked: x of a norm is asked for three times in a row."""

    SIZE = 2  # a gated product asks for gate, up, and gate again

    def __init__(self) -> None:
        self.entries: list[tuple[Groups, Tensor]] = []
        self.backward = -1

    def find(self, groups: Groups) -> Tensor | None:
        return next((value for held, value in self.entries if held is groups), None)

    def add(self, groups: Groups, value: Tensor) -> None:
        backward = torch._C._current_graph_task_id()
        if backward == -1:
            return
        entries = self.entries
        if backward != self.backward:  # nothing outlives its backward, also where that ended with an error
            entries.clear()
            self.backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(entries.clear)
        entries.append((groups, value))
        del entries[: -self.SIZE]


_unpacked = _Unpacked()


class Groups:
    """A tensor in packed groups, handed on to the saved-tensor hooks that were there before, if any."""

    __slots__ = ("better", "centered", "layout", "packed", "scale", "shape", "unpack")

    def __init__(self, tensor: Tensor, codec: Codec, outer: tuple[Hook, Hook] | None, centered: bool = False) -> None:
        pack, self.unpack = outer or (_as_is, _as_is)
        self.layout, packed, scale = Layout.pack(tensor, codec, centered)
        self.packed, self.scale, self.shape = pack(packed), pack(scale), tensor.shape
        self.centered, self.better = centered, None

    @property
    def rounded(self) -> bool:
        return self.better is None or self.better.rounded

    def become(self, better: Exact | Groups) -> None:
        """Let go of these bytes: somebody has to hold the tensor better."""
        self.better, self.packed, self.scale = better, None, None

    def value(self) -> Tensor:
        if self.better is not None:
            return self.better.value().reshape(self.shape)
        value = _unpacked.find(self)
        if value is None:
            value = self.layout.unpack(self.unpack(self.packed), self.unpack(self.scale))
            _unpacked.add(self, value)
        return value


class Recipe:
    """A tensor computed again, by the function that made it, from what its input is held as."""

    __slots__ = ("args", "function", "kwargs", "shape")
    centered = False

    def __init__(self, function: Callable, args: tuple, kwargs: dict, shape: torch.Size) -> None:
        self.function, self.args, self.kwargs, self.shape = function, args, kwargs, shape

    @property
    def rounded(self) -> bool:
        return any(a.rounded for a in self.args if isinstance(a, HELD))

    def become(self, better: Exact | Groups) -> None:
        """Those who hold it go on computing it: it has no bytes to let go of."""

    @torch.no_grad()
    def value(self) -> Tensor:
        args = [a.value() if isinstance(a, HELD) else a for a in self.args]
        out = self.function(*args, **self.kwargs)
        return out.clamp(-FLOAT16_MAX, FLOAT16_MAX) if out.dtype == torch.float16 and self.rounded else out


class View:
    """The contiguous tensor that somebody else holds, in another shape."""

    __slots__ = ("held", "shape")

    def __init__(self, held: Exact | Groups | Recipe, shape: torch.Size) -> None:
        self.held, self.shape = held, shape

    @property
    def rounded(self) -> bool:
        return self.held.rounded

    @property
    def centered(self) -> bool:
        return self.held.centered

    def become(self, better: Exact | Groups) -> None:
        self.held.become(better)

    def value(self) -> Tensor:
        return self.held.value().reshape(self.shape)


HELD = (Exact, Groups, Recipe, View)


def bits_of(mask: Tensor) -> Tensor:
    """Pack a bool tensor into bits: uint8 (ceil(numel / 8),)."""
    flat = torch.nn.functional.pad(mask.reshape(-1).to(torch.uint8), (0, -mask.numel() % 8)).view(-1, 8)
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=mask.device)
    return (flat * weights).sum(1, dtype=torch.uint8)


def mask_of(bits: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of ``bits_of``."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits[:, None] >> shifts) & 1).view(-1)[: shape.numel()].view(shape).bool()


class Identity:
    """Tells whether a tensor is the one seen before: same memory, layout and version, the memory not freed since."""

    __slots__ = ("storage",)

    def __init__(self, tensor: Tensor) -> None:
        self.storage = StorageWeakRef(tensor.untyped_storage())  # keeps the identity, not the bytes

    @staticmethod
    def key(tensor: Tensor) -> tuple:
        version = 0 if tensor.is_inference() else tensor._version
        layout = () if tensor.is_contiguous() else (tensor.shape, tensor.stride())
        return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.numel(), tensor.dtype, layout, version

    def alive(self) -> bool:
        return not self.storage.expired()

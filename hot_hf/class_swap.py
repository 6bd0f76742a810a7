"""Swapping the class of a living module: parameters, names, ties, hooks and state_dict stay.

``module.__class__`` becomes a class made of a mixin and the class that was there, and what is bound to the old class
follows. Layers and blocks are both patched this way, each with a mixin of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, ClassVar

from torch import nn


class Swapped:
    """Base of the mixins."""

    hot_original_class: ClassVar[type]  # what a module's class was; of each class made here

    @classmethod
    def members(cls, original: type) -> dict[str, Any]:
        """The body of the class made of this mixin and ``original``: its ``__name__`` and ``__module__`` at least."""
        raise NotImplementedError


_made: dict[tuple[type[Swapped], type], type] = {}


def swapped_class(mixin: type[Swapped], original: type) -> type:
    """``original`` with ``mixin`` in front of it, made once."""
    if (mixin, original) not in _made:
        body = {"__doc__": original.__doc__, "__reduce_ex__": _reduce, **mixin.members(original)}
        made = type(body.pop("__name__"), (mixin, original), {**body, "hot_original_class": original})
        _made[mixin, original] = made
    return _made[mixin, original]


def register(mixin: type[Swapped], made: type) -> type:
    """Let ``made``, which can be imported by name, be the class of ``mixin`` and its ``hot_original_class``."""
    _made[mixin, made.hot_original_class] = made
    return made


def _reduce(module: Swapped, protocol: int):
    """Copy and pickle by the original class: one made here cannot be imported by name."""
    made = _made_class(module)
    return _new, (made.__mro__[1], made.hot_original_class), module.__dict__


def _new(mixin: type[Swapped], original: type) -> Swapped:
    made = swapped_class(mixin, original)
    return made.__new__(made)


def _made_class(module: nn.Module) -> type:
    """The class that was made for ``module``, also where something else has put its own on top since."""
    return next(cls for cls in type(module).__mro__ if "hot_original_class" in vars(cls))


def original_class(module: nn.Module) -> type:
    """The class of ``module`` without HOT."""
    return getattr(type(module), "hot_original_class", type(module))


def has_changed(module: Swapped) -> bool:
    """Whether something else has changed the class of a swapped module since, as parametrizations and fully_shard
    do."""
    return type(module) is not _made_class(module)


def swap(module: nn.Module, cls: type) -> None:
    """Change the class, and with it the bound forward that accelerate's hooks remember."""
    old = type(module).forward
    module.__class__ = cls
    for attribute in ("forward", "_old_forward"):
        if getattr(module.__dict__.get(attribute), "__func__", None) is old:
            module.__dict__[attribute] = MethodType(cls.forward, module)


def restore(module: Swapped) -> None:
    """Give ``module`` the class back that it had."""
    swap(module, original_class(module))


def release(module: Swapped, attribute: str) -> None:
    """Take off the state by which a swapped module differs, and its class; where something else has put its own on top
    since, ours stays below it and does nothing without that state."""
    delattr(module, attribute)
    if not has_changed(module):
        restore(module)


def own_forward(module: nn.Module) -> Callable | None:
    """A forward that ``module`` carries itself, so that its class's would never run; None where there is none, or one
    that ``swap`` takes along: what accelerate's hooks call, and the plain method that they leave behind."""
    own = module.__dict__.get("forward")
    inner = module.__dict__.get("_old_forward") if hasattr(module, "_hf_hook") else own
    return None if own is None or getattr(inner, "__func__", None) is type(module).forward else own

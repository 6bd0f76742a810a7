"""The configuration of a patched model, and how it comes to lie beside the weights."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from .config import CONFIG_NAME, HOTConfig
from .layer_kinds import hot_layers
from .layers import HOTMixin
from .selected_plan import PLAN_NAME, SelectedPlan

logger = logging.getLogger("hot_hf")


def configurations(model: nn.Module) -> list[tuple[HOTConfig, list[str]]]:
    """The different configurations of ``model``'s patched layers, each with the names of its layers."""
    found: list[tuple[HOTConfig, list[str]]] = []
    for name, module in model.named_modules():
        if isinstance(module, HOTMixin):
            config = module.hot.config
            names = next((n for known, n in found if known is config or known == config), None)
            if names is None:
                found.append((config, names := []))
            names.append(name or "(root)")
    return found


def config_of(model: nn.Module) -> HOTConfig | None:
    """The configuration that ``model`` was patched with, or None where no layer is patched.

    Raises:
        ValueError: when apply_hot was called on parts of ``model`` with different configurations.
    """
    found = configurations(model)
    if len(found) > 1:
        where = "; ".join(
            f"{names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "") for _, names in found
        )
        raise ValueError(
            f"The layers of this {type(model).__name__} were patched with {len(found)} different configurations, so no "
            f"single one describes it: {where}. Call apply_hot on the whole model, with overrides for some layers."
        )
    return found[0][0] if found else None


def save_beside(model: nn.Module, directory: str | Path) -> bool:
    """Write ``hot_config.json``, and ``hot_plan.json`` after a selection by budget, into ``directory``.

    Returns:
        whether there was something to write. Where layers have different configurations nothing is written, and a
        warning names them: a file that describes half of a model is worse than none.
    """
    try:
        config = config_of(model)
    except ValueError as error:
        logger.warning("No %s is written into %s. %s", CONFIG_NAME, directory, error)
        return False
    if config is None:
        return False
    config.save_pretrained(directory)
    if any(m.hot.choice is not None for m in hot_layers(model)):
        SelectedPlan.of(model).save(Path(directory) / PLAN_NAME)
    return True


def save_with_config(original: Callable, model: nn.Module, save_directory, *args, **kwargs) -> Any:
    """``original(model, save_directory, ...)``, a ``save_pretrained``, with our files beside the weights."""
    settings = inspect.signature(original).bind(model, save_directory, *args, **kwargs)
    settings.apply_defaults()
    if not settings.arguments.get("is_main_process", True) or Path(save_directory).is_file():
        return original(model, save_directory, *args, **kwargs)
    if settings.arguments.get("push_to_hub"):
        # It uploads what has changed in the folder since its call, as its last act: our files have to come before that.
        vars(model)["_upload_modified_files"] = partial(_upload, weakref.ref(model))
    try:
        result = original(model, save_directory, *args, **kwargs)
    finally:
        vars(model).pop("_upload_modified_files", None)
    save_beside(model, save_directory)
    return result


def _upload(model: weakref.ref, working_dir, *args, **kwargs) -> Any:
    save_beside(model(), working_dir)
    return type(model())._upload_modified_files(model(), working_dir, *args, **kwargs)


class SavePretrained:
    """``model.save_pretrained`` that writes ``hot_config.json`` too, while the model is patched.

    An attribute of the one model: its class, and other models of it, stay as they are. It holds the model weakly (a
    cycle would keep its memory after ``del model``), and follows it into copies and pickles.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    def __call__(self, save_directory, *args, **kwargs):
        model = self._model()
        return save_with_config(type(model).save_pretrained, model, save_directory, *args, **kwargs)

    def __reduce__(self):
        return SavePretrained, (self._model(),)


def save_config_with(model: nn.Module) -> bool:
    """Let ``model.save_pretrained`` write our files too. Whether it does: not where the model has no such method, or
    somebody else has replaced it on this very model."""
    own = vars(model).get("save_pretrained")
    if own is None and callable(getattr(type(model), "save_pretrained", None)):
        own = vars(model)["save_pretrained"] = SavePretrained(model)
    return isinstance(own, SavePretrained)

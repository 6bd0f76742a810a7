"""``hot_config=`` for from_pretrained and from_config: Auto classes of our own, and install() for transformers'."""

from __future__ import annotations

import warnings
from functools import cache, wraps
from pathlib import Path
from typing import Any

from torch import nn

from .config import CONFIG_NAME, HOTConfig
from .patching import HOTPatchError, apply_hot
from .saving import save_config_with, save_with_config

SAVED = "saved"
_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


def _resolve(hot_config: Any, source: Any, kwargs: dict[str, Any]) -> HOTConfig:
    """The HOTConfig meant by ``hot_config``; ``"saved"`` is the file beside the weights of ``source``."""
    if hot_config != SAVED:
        return HOTConfig.coerce(hot_config)
    if source is None:
        raise ValueError(f"hot_config={SAVED!r} reads {CONFIG_NAME} beside the weights, and from_config has none.")
    from transformers.utils import cached_file

    found = cached_file(
        source,
        CONFIG_NAME,
        _raise_exceptions_for_missing_entries=False,
        **{name: kwargs[name] for name in _HUB_ARGUMENTS if kwargs.get(name) is not None},
    )
    if found is None:
        raise FileNotFoundError(
            f"hot_config={SAVED!r}, but there is no {CONFIG_NAME} in {str(source)!r}; HOTConfig().save_pretrained "
            "writes one, as do save_pretrained of a model loaded with hot_config=, and HOTCallback in its checkpoints."
        )
    return HOTConfig.from_pretrained(Path(found).parent)


def _patch(loaded: Any, config: HOTConfig) -> Any:
    """Patch what from_pretrained returned: a model, or (model, loading info); log the coverage."""
    model: nn.Module = loaded[0] if isinstance(loaded, tuple) else loaded
    try:
        apply_hot(model, config).announce()
    except HOTPatchError as error:
        method = getattr(model, "quantization_method", None)
        if method is None:
            raise
        raise HOTPatchError(
            f"{error}\nThe base is quantized ({method}), so its frozen layers keep nothing and stay as they are. "
            "Attach the adapters first, then call hot_hf.apply_hot(model, HOTConfig()), or give the trainer "
            "HOTCallback(HOTConfig())."
        ) from error
    if getattr(model, "quantization_method", None) == "gguf":
        # A GGUF file's weights are plain tensors once loaded; with its mark on them Trainer would refuse to train them,
        # and a checkpoint would name a quantization that its weights do not have.
        model.hf_quantizer.remove_quantization_config(model)
    save_config_with(model)
    return loaded


@cache
def _auto_class(name: str) -> type:
    import transformers
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

    base = getattr(transformers, name, None)
    if not (isinstance(base, type) and issubclass(base, _BaseAutoModelClass)):
        raise AttributeError(f"transformers has no model class {name!r} for hot_hf to extend.")

    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, hot_config=None, **kwargs):
        if hot_config is None:
            return base.from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)
        config = _resolve(hot_config, pretrained_model_name_or_path, kwargs)
        return _patch(base.from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs), config)

    def from_config(cls, config, hot_config=None, **kwargs):
        model = base.from_config(config, **kwargs)
        return model if hot_config is None else _patch(model, _resolve(hot_config, None, kwargs))

    doc = (
        f"transformers.{name} whose from_pretrained and from_config also take ``hot_config``: a HOTConfig, a dict, a "
        f"preset name, ``{SAVED!r}`` for the {CONFIG_NAME} beside the weights, or None for the plain model.\n\n"
        f"The model's save_pretrained and push_to_hub then write {CONFIG_NAME} too. What was patched is in "
        "``hot_hf.report_of(model)``; its last line is logged to ``logging.getLogger('hot_hf')``, as a warning where "
        "less than half of the multiply-adds are in patched layers, else at level INFO, which Python does not show "
        "unless told to (``logging.basicConfig(level='INFO')``). Adapters that are made later need "
        "HOTCallback, or another apply_hot (its docstring says why)."
    )
    members = {
        "from_pretrained": classmethod(wraps(base.from_pretrained.__func__)(from_pretrained)),
        "from_config": classmethod(wraps(base.from_config.__func__)(from_config)),
        "__doc__": doc,
        "__module__": __name__,
    }
    return type(name, (base,), members)


def auto_names() -> list[str]:
    """The names of transformers' model classes that are extended here."""
    from transformers.models.auto import modeling_auto

    return [name for name in modeling_auto.__all__ if name.startswith("AutoModel")]


def __getattr__(name: str) -> type:
    """``AutoModel`` and every ``AutoModelFor...`` of transformers."""
    if name.startswith("AutoModel"):
        return _auto_class(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# install(): originals by name of what is wrapped, and the wrappers, to know them again.
_originals: dict[str, Any] = {}
_wrappers: dict[str, Any] = {}
_active = False


def _loading(original: classmethod, has_source: bool) -> classmethod:
    function = original.__func__

    @wraps(function)
    def wrapper(cls, *args, **kwargs):
        if not _active or "hot_config" not in kwargs:
            return function(cls, *args, **kwargs)
        hot_config = kwargs.pop("hot_config")
        if hot_config is None:
            return function(cls, *args, **kwargs)
        source, where = None, kwargs
        if has_source:
            source = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        adapters = kwargs.get("adapter_kwargs") or {}
        if "_adapter_model_path" in adapters:  # an Auto class found adapters, and passes on the model that they name
            source, where = adapters["_adapter_model_path"], {**kwargs, **adapters}
        config = _resolve(hot_config, source, where)
        return _patch(function(cls, *args, **kwargs), config)

    return classmethod(wrapper)


def _saving(original):
    @wraps(original)
    def save_pretrained(self, save_directory, *args, **kwargs):
        if not _active:
            return original(self, save_directory, *args, **kwargs)
        return save_with_config(original, self, save_directory, *args, **kwargs)

    return save_pretrained


_WRAP = {
    "from_pretrained": lambda original: _loading(original, has_source=True),
    "_from_config": lambda original: _loading(original, has_source=False),
    "save_pretrained": _saving,
}


def install() -> None:
    """Let every model class of transformers take ``hot_config=`` in from_pretrained and from_config, remote code too.

    A patched model's save_pretrained then writes ``hot_config.json`` beside the weights. Calling it again changes
    nothing.
    """
    from transformers import PreTrainedModel

    global _active
    _active = True
    for name, wrap in _WRAP.items():
        if name not in _originals:
            _originals[name] = PreTrainedModel.__dict__[name]
            _wrappers[name] = wrap(_originals[name])
            setattr(PreTrainedModel, name, _wrappers[name])


def uninstall() -> None:
    """Undo ``install``. Where another library has wrapped a method since, ours stays below it and does nothing; a
    warning says so."""
    from transformers import PreTrainedModel

    global _active
    _active = False
    covered = []
    for name in list(_originals):
        if PreTrainedModel.__dict__[name] is _wrappers[name]:
            setattr(PreTrainedModel, name, _originals.pop(name))
            del _wrappers[name]
        else:
            covered.append(name)
    if covered:
        warnings.warn(
            f"hot_hf.uninstall: PreTrainedModel.{', '.join(covered)} was wrapped again after hot_hf.install(); "
            "hot_hf's own wrapper cannot be taken out from below it and stays there, inactive.",
            stacklevel=2,
        )

"""Training memory predicted from a configuration alone: the real forward, run on meta tensors, which hold no data
(under autocast on fake ones: autocast.py).

Nothing is modelled by formula but the attention kernel and the optimizer: the model's own code runs, HOT patches it as
it would a real one, and what autograd saves is counted as ``measure`` counts it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..block import find_blocks
from ..config import PRESETS, HOTConfig
from ..dry_run import OPTIMIZERS as OPTIMIZERS
from ..dry_run import FakeAutocast, MetaForward, device_type, optimizer_bytes
from ..patching import apply_hot
from ..selection import fix_selection
from .saved import Measurement, measure

METHODS = ("exact", "hot", *(p for p in PRESETS if p != "default"), "block", "lora", "checkpointing")
TASKS = {  # without a task and an architecture, the first that the configuration fits
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "image-classification": "AutoModelForImageClassification",
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
}


@dataclass(frozen=True)
class Estimate:
    """Bytes of one training step. ``activations`` is what the forward keeps; ``recompute`` is what the largest
    checkpointed block keeps on top while its backward runs. Not in it: the allocator's slack, temporary tensors of
    single operations, the library's own contexts."""

    method: str
    batch: int
    length: int | None
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    recompute: int
    kept: Measurement

    PARTS = ("parameters", "gradients", "optimizer", "activations", "recompute")

    @property
    def total(self) -> int:
        return sum(getattr(self, part) for part in self.PARTS)


class Method:
    """A ``+``-joined list of METHODS, read: which HOTConfig, LoRA or not, checkpointing or not.

    Raises:
        ValueError: for a part that is not known, or two presets at once.
    """

    def __init__(self, text: str) -> None:
        parts = [p.strip() for p in text.lower().split("+")]
        unknown = [p for p in parts if p not in METHODS]
        if unknown:
            raise ValueError(f"method {text!r}: {unknown} not known; join any of {list(METHODS)} with '+'.")
        presets = [p for p in parts if p in PRESETS]
        if len(presets) > 1:
            raise ValueError(f"method {text!r} names {len(presets)} presets, {presets}; give one.")
        self.text = "+".join(parts)
        self.lora = "lora" in parts
        self.checkpointing = "checkpointing" in parts
        self.config: HOTConfig | None = None
        if presets or "hot" in parts or "block" in parts:
            changes: dict[str, Any] = {"compress": "block"} if "block" in parts else {}
            self.config = HOTConfig.from_preset(*presets or ["default"], **changes)


def load_config(source: Any):
    """A transformers configuration from one, a dict, a local folder or JSON file, or a name on the hub."""
    from transformers import AutoConfig, PretrainedConfig

    if isinstance(source, PretrainedConfig):
        return source
    if isinstance(source, dict):
        settings = dict(source)
        if "model_type" not in settings:
            raise ValueError("a configuration given as a dict needs 'model_type', for example 'llama'.")
        return AutoConfig.for_model(settings.pop("model_type"), **settings)
    path = Path(str(source)).expanduser()
    if path.is_file():
        import json

        return load_config(json.loads(path.read_text()))
    return AutoConfig.from_pretrained(str(path) if path.exists() else str(source))


def _model_class(config, task: str | None):
    import transformers

    if task is not None and task not in TASKS:
        raise ValueError(f"task {task!r} is not known; choose one of {list(TASKS)}.")
    for name in config.architectures or [] if task is None else []:
        if "For" in name and hasattr(transformers, name):  # a bare encoder has no loss
            return getattr(transformers, name)
    for auto in [TASKS[task]] if task is not None else TASKS.values():
        mapping = getattr(transformers, auto)._model_mapping
        if type(config) in mapping:
            return mapping[type(config)]
    raise ValueError(f"no model class with a loss is known for {type(config).__name__}; name one with task.")


def build(config, method: Method, *, task: str | None, dtype: torch.dtype, lora_rank: int) -> nn.Module:
    """The model of ``config`` under ``method``, on the meta device, ready to train."""
    with torch.device("meta"):
        model = _model_class(config, task)._from_config(config, dtype=dtype)
        if hasattr(model.config, "use_cache"):
            model.config.use_cache = False
        if method.checkpointing:
            switch_on_checkpointing(model)
        if method.lora:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=lora_rank, target_modules="all-linear", **_peft_task(model)))
    if method.config is not None:
        apply_hot(model, method.config)
        fix_selection(model)  # the lasting state, not that of the first micro-batches
    return model.train()


def switch_on_checkpointing(model: nn.Module) -> None:
    """transformers' non-reentrant checkpointing; ``gradient_checkpointing_enable`` is the name before 5.24."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _peft_task(model: nn.Module) -> dict[str, str]:
    """PEFT keeps the output layer trainable and whole when it knows the task."""
    tasks = {"ForCausalLM": "CAUSAL_LM", "ForSequenceClassification": "SEQ_CLS", "ForTokenClassification": "TOKEN_CLS"}
    for ending, task in tasks.items():
        if type(model).__name__.endswith(ending):
            return {"task_type": task}
    if type(model).__name__.endswith("ForImageClassification"):
        return {"modules_to_save": ["classifier"]}
    return {}


def example_batch(model: nn.Module, batch: int, length: int | None) -> dict[str, Tensor]:
    """A batch of the model's main input, with labels, on the device of ``model``; no padding.

    Raises:
        ValueError: when the model takes neither tokens nor pixels.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    config, name, device = inner.config, inner.main_input_name, next(model.parameters()).device
    if name == "pixel_values":
        size = config.image_size if isinstance(config.image_size, (list, tuple)) else (config.image_size,) * 2
        dtype = next(model.parameters()).dtype
        pixels = torch.zeros(batch, getattr(config, "num_channels", 3), *size, dtype=dtype, device=device)
        return {"pixel_values": pixels, "labels": torch.zeros(batch, dtype=torch.long, device=device)}
    if name != "input_ids" or getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{type(inner).__name__} takes {name!r} (and is an encoder-decoder: "
            f"{getattr(config, 'is_encoder_decoder', False)}); estimate knows decoders and encoders of input_ids, and "
            "pixel_values."
        )
    tokens = torch.zeros(batch, length or default_length(config), dtype=torch.long, device=device)
    per_sequence = "ForSequenceClassification" in type(inner).__name__
    return {"input_ids": tokens, "labels": tokens[:, 0].contiguous() if per_sequence else tokens.clone()}


def default_length(config) -> int | None:
    """512 tokens, or fewer where the model's positions end before; None for models of images."""
    if getattr(config, "image_size", None) is not None:
        return None
    return min(512, getattr(config, "max_position_embeddings", None) or 512)


class Estimator:
    """One configuration under one method; ``at(batch)`` gives the Estimate. Arguments as ``estimate``."""

    def __init__(
        self,
        source: Any,
        *,
        length: int | None = None,
        method: str = "hot",
        optimizer: str = "adamw",
        lora: int = 8,
        dtype: torch.dtype = torch.float32,
        autocast: torch.dtype | None = None,
        task: str | None = None,
        device: str | None = None,
    ) -> None:
        self.config = load_config(source)
        self.method = Method(method)
        self.length = length or default_length(self.config)
        self.device = device_type(device)
        options = {"task": task, "dtype": dtype, "lora_rank": lora}
        self.model = build(self.config, self.method, **options)
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        self.fixed = {
            "parameters": sum(p.numel() * p.element_size() for p in self.model.parameters()),
            "gradients": sum(p.numel() * p.element_size() for p in trainable),
            "optimizer": optimizer_bytes(self.model, optimizer),
        }
        self.whole = None  # the same without checkpointing: what a recomputed block holds
        if self.method.checkpointing:
            plain = Method(
                "+".join(p for p in self.method.text.split("+") if p not in ("checkpointing", "block")) or "exact"
            )
            self.whole = build(self.config, plain, **options)
        models = (model for model in (self.model, self.whole) if model is not None)
        self.autocast = None if autocast is None else FakeAutocast(autocast, *models)

    def _measure(self, model: nn.Module, batch: int) -> Measurement:
        context = torch.autocast("cpu", enabled=False) if self.autocast is None else self.autocast.forward()
        try:
            with context, MetaForward(self.device):
                return measure(model, example_batch(model, batch, self.length))
        except (NotImplementedError, RuntimeError) as error:  # routing by values, kernels without shapes
            raise ValueError(
                f"{self.method.text}: {type(self.config).__name__} cannot run on meta tensors, which have shapes but "
                f"no values ({str(error).splitlines()[0][:120]}); measure a small real model instead."
            ) from error

    def at(self, batch: int) -> Estimate:
        if batch < 1:
            raise ValueError(f"batch={batch} must be at least 1.")
        kept = self._measure(self.model, batch)
        recompute = 0
        if self.whole is not None:
            owners = self._measure(self.whole, batch).by("owner")
            for block in find_blocks(self.whole):
                inside = sum(n for owner, n in owners.items() if owner == block or owner.startswith(f"{block}."))
                recompute = max(recompute, inside)
        return Estimate(
            self.method.text,
            batch,
            self.length,
            **self.fixed,
            activations=kept.total_bytes,
            recompute=recompute,
            kept=kept,
        )


def estimate(source: Any, batch: int = 8, length: int | None = None, method: str = "hot", **options) -> Estimate:
    """Predict what training needs, without weights, data or an accelerator.

    Args:
        source: a transformers configuration, a dict with ``model_type``, a local folder or JSON file, or a hub name.
        batch: sequences (or images) per step.
        length: tokens per sequence, without padding.
        method: a '+'-joined list of METHODS: "exact", "hot" or a preset, "block", "lora", "checkpointing".

    Keyword Args:
        optimizer: one of OPTIMIZERS.
        lora: rank of adapters on all linear layers, for methods with "lora".
        dtype: of the weights. Training is in that type, or with autocast=torch.bfloat16 (or float16) under autocast, as
            with ``TrainingArguments(bf16=True)``.
        task: as the ``task`` of hot-hf estimate, when the configuration names no architecture.
        device: "cpu", "cuda" or another type that torch knows, whose kernels decide what attention and dropout keep
            (those of every accelerator are taken for fused); by default what this machine has.

    Returns:
        an Estimate, in bytes.

    Raises:
        ValueError: for an unknown method, optimizer, task, device or autocast type, or a model that takes neither
            tokens nor pixels.
    """
    return Estimator(source, length=length, method=method, **options).at(batch)


def largest_batch(estimator: Estimator, memory: int) -> int:
    """The largest batch whose estimate is at most ``memory`` bytes; 0 when one example does not fit.

    Bytes grow linearly with the batch: two points give the line, and its answer is checked and corrected.
    """
    one, two = estimator.at(1).total, estimator.at(2).total
    if one > memory:
        return 0
    batch = max(1, 1 + (memory - one) // max(two - one, 1))
    while batch > 1 and estimator.at(batch).total > memory:
        batch -= 1
    while estimator.at(batch + 1).total <= memory:
        batch += 1
    return batch

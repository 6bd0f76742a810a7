"""What is trained: a starting model, data and Trainer settings, the same for every run of a comparison."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from . import data, models

TEXT_STEPS = 60
VISION_STEPS = 300
HELD_OUT_ROWS = 32  # 8,192 tokens


@dataclass(frozen=True)
class Task:
    """``make_model(seed)`` gives the same starting point each time; ``arguments`` go to TrainingArguments."""

    name: str
    what: str
    train: Any
    held_out: Any
    make_model: Callable[[int], nn.Module]
    arguments: dict[str, Any]
    accuracy: bool  # whether the held-out set is also scored by the share of right answers


def accuracy_of(prediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def vision() -> Task:
    """A small ViT, from scratch, on scikit-learn's digits."""
    from transformers import set_seed

    train, held_out = data.digits()

    def make_model(seed: int) -> nn.Module:
        set_seed(seed)
        return models.small_vit()

    return Task(
        "vision",
        f"a small ViT from scratch on scikit-learn's digits ({len(train)} images, {len(held_out)} held out)",
        train,
        held_out,
        make_model,
        {
            "max_steps": VISION_STEPS,
            "per_device_train_batch_size": 64,
            "per_device_eval_batch_size": 256,
            "learning_rate": 1e-3,
            "weight_decay": 0.05,
            "warmup_steps": 30,
            "lr_scheduler_type": "cosine",
        },
        accuracy=True,
    )


def text(
    lora: bool = False,
    steps: int | None = None,
    rows: Callable = data.python_sources,
    source: str = "the standard library's sources",
) -> Task:
    """SmolLM2-135M on ``source``, all weights or LoRA adapters; 2 x 256 tokens a step.

    ``rows(tokenizer, train_rows, held_out_rows)`` gives the two data sets, as ``data.python_sources`` does.
    """
    from transformers import set_seed

    if lora:
        data.require("peft", "pip install peft")
    data.require("datasets", "pip install datasets")
    batch = 2
    base, tokenizer = models.smollm2()
    train, held_out = rows(tokenizer, batch * (steps or TEXT_STEPS), HELD_OUT_ROWS)

    def make_model(seed: int) -> nn.Module:
        model = copy.deepcopy(base)
        set_seed(seed)  # the adapters' initialization
        return models.with_lora(model) if lora else model

    return Task(
        "text-lora" if lora else "text",
        f"SmolLM2-135M {'with LoRA' if lora else '(all weights)'} on {source} "
        f"({len(train)} rows of {data.ROW_TOKENS} tokens, {len(held_out)} held out)",
        train,
        held_out,
        make_model,
        {
            "max_steps": TEXT_STEPS,
            "per_device_train_batch_size": batch,
            "per_device_eval_batch_size": 4,
            "learning_rate": 1e-3 if lora else 3e-5,
            "lr_scheduler_type": "constant",
        },
        accuracy=False,
    )

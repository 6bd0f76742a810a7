"""A Trainer for tiny models, and what the tests read from its runs."""

from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments

from hot_hf import HOTCallback
from hot_hf.layers import HOTMixin


def rows(count: int = 16, length: int = 12) -> list[dict]:
    ids = torch.randint(97, (count, length))
    return [{"input_ids": row, "labels": row} for row in ids]


def trainer(model, data, directory, callbacks=(), eval_dataset=None, **settings) -> Trainer:
    defaults = {
        "per_device_train_batch_size": 2,
        "max_steps": 6,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 1,
    }
    args = TrainingArguments(directory, **{**defaults, **settings})
    made = Trainer(model, args, train_dataset=data, eval_dataset=eval_dataset, callbacks=list(callbacks))
    for callback in callbacks:
        if isinstance(callback, HOTCallback) and made.args.report_to:
            callback.report_through(made)
    return made


def layers(model) -> dict[str, HOTMixin]:
    return {m.hot.name: m for m in model.modules() if isinstance(m, HOTMixin)}


def same(a, b) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def losses(run: Trainer) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def tensorboard(directory) -> dict[str, list]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out: dict[str, list] = {}
    for path in Path(directory).rglob("events.out.tfevents.*"):
        events = EventAccumulator(str(path)).Reload()
        for tag in events.Tags()["scalars"]:
            out.setdefault(tag, []).extend((e.step, e.value) for e in events.Scalars(tag))
    return out

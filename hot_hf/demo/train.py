"""One training run through transformers.Trainer, with everything the comparison reports about it."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from transformers import ProgressCallback, Trainer, TrainingArguments, default_data_collator

from ..config import HOTConfig
from ..memory import SavedTensors
from ..patching import apply_hot
from ..report import CoverageReport
from ..selection import fix_selection
from .tasks import Task, accuracy_of


@dataclass
class Run:
    """The numbers of one run. Times in seconds, sizes in bytes; ``config`` is None for exact training."""

    label: str
    config: dict[str, Any] | None
    seed: int
    steps: int
    held_out_loss: float
    held_out_accuracy: float | None
    losses: list[float]
    largest_grad_norm: float
    kept_bytes: int
    kept_linear_bytes: int
    seconds_first_step: float
    seconds_per_step: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class _Recorder(ProgressCallback):
    """Trainer's progress bars, with the loss beside the bar instead of a printed line per step; times every step."""

    def __init__(self, label: str) -> None:
        super().__init__()
        self.label = label
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.seconds: list[float] = []

    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        if self.training_bar is not None:
            self.training_bar.set_description(self.label)

    def on_step_begin(self, args, state, control, **kwargs):
        self._start = _now()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds.append(_now() - self._start)
        super().on_step_end(args, state, control, **kwargs)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))
            self.grad_norms.append(float(logs["grad_norm"]))
            if self.training_bar is not None:
                self.training_bar.set_postfix(loss=f"{self.losses[-1]:.3f}")


def _now() -> float:
    if torch.accelerator.is_available():  # wait for what the step has queued
        torch.accelerator.synchronize()
    return time.perf_counter()


def _kept(model: nn.Module, task: Task, linears: list[str]) -> tuple[int, int]:
    """Bytes that one training forward keeps for its backward: in all, and by the layers named in ``linears``."""
    rows = [task.train[i] for i in range(task.arguments["per_device_train_batch_size"])]
    device = next(model.parameters()).device
    batch = {name: value.to(device) for name, value in default_data_collator(rows).items()}
    model.train()
    with SavedTensors(model) as saved:
        loss = model(**batch).loss
    kept = saved.total_bytes, saved.bytes_of(linears)
    del loss
    return kept


def coverage(task: Task, config: HOTConfig) -> CoverageReport:
    """What HOT does to the task's model (a copy that is thrown away)."""
    return apply_hot(task.make_model(0), config)


def train(*args, **kwargs) -> Run:
    """``fit`` without the model."""
    return fit(*args, **kwargs)[1]


def fit(
    task: Task, config: HOTConfig | None, label: str, linears: list[str], seed: int = 0, steps: int | None = None
) -> tuple[nn.Module, Run]:
    """Train once from ``task``'s starting point and measure.

    Args:
        config: what HOT does, or None for exact training.
        linears: names of the layers whose kept inputs are added up (those that HOT patches).
        seed: of the model, the order of the data and HOT's rounding.
        steps: instead of the task's own number.

    Returns:
        the trained model and the run's numbers.
    """
    model = task.make_model(seed)
    if config is not None:
        apply_hot(model, config)
    settings = {**task.arguments, **({} if steps is None else {"max_steps": steps})}
    recorder = _Recorder(label)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(
                folder,
                seed=seed,
                data_seed=seed,
                logging_steps=1,
                logging_nan_inf_filter=False,
                save_strategy="no",
                report_to="none",
                prediction_loss_only=not task.accuracy,
                dataloader_pin_memory=False,
                **settings,
            ),
            train_dataset=task.train,
            eval_dataset=task.held_out,
            data_collator=default_data_collator,
            compute_metrics=accuracy_of if task.accuracy else None,
        )
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(recorder)
        trainer.train()
        metrics = trainer.evaluate()
    fix_selection(model)  # a run shorter than lqs_batches would still keep its inputs whole
    kept, kept_linear = _kept(model, task, linears)
    run = Run(
        label,
        None if config is None else config.to_dict(),
        seed,
        settings["max_steps"],
        float(metrics["eval_loss"]),
        metrics.get("eval_accuracy"),
        recorder.losses,
        max(recorder.grad_norms),
        kept,
        kept_linear,
        recorder.seconds[0],
        statistics.median(recorder.seconds[1:] or recorder.seconds),
    )
    return model, run

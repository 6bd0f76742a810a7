"""One training run through transformers.Trainer, with everything the comparison reports about it."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import ProgressCallback, Trainer, TrainerCallback, TrainingArguments, default_data_collator
from transformers.trainer_utils import get_last_checkpoint

from ..callback import HOTCallback
from ..config import HOTConfig
from ..layer_kinds import hot_layers
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


class Unfinished(Exception):
    """A run stopped at its deadline; the same call goes on from where it stopped."""


@dataclass
class Pieces:
    """A run in pieces: what is unfinished stays in ``folder``; it stops at ``deadline`` (``time.monotonic()``)."""

    folder: Path
    deadline: float = float("inf")


class _Deadline(TrainerCallback):
    def __init__(self, deadline: float) -> None:
        self.deadline = deadline

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if time.monotonic() <= self.deadline or state.global_step >= state.max_steps:
            return
        # What a layer has measured so far is not in a checkpoint, what it chose is.
        if all(layer.hot.probe is None for layer in hot_layers(model)):
            control.should_save = control.should_training_stop = True


class _Recorder(ProgressCallback):
    """Trainer's progress bars, with the loss beside the bar instead of a printed line per step; times every step."""

    def __init__(self, label: str) -> None:
        super().__init__()
        self.label = label
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
        if logs and "loss" in logs and self.training_bar is not None:
            self.training_bar.set_postfix(loss=f"{float(logs['loss']):.3f}")


def _now() -> float:
    if torch.accelerator.is_available():  # wait for what the step has queued
        torch.accelerator.synchronize()
    return time.perf_counter()


def _kept(model: nn.Module, task: Task, linears: list[str], context, kind: type[SavedTensors]) -> tuple[int, int]:
    """Bytes that one training forward keeps for its backward: in all, and by the layers named in ``linears``."""
    rows = [task.train[i] for i in range(task.arguments["per_device_train_batch_size"])]
    device = next(model.parameters()).device
    batch = {name: value.to(device) for name, value in default_data_collator(rows).items()}
    model.train()
    with kind(model) as saved, context():
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
    task: Task,
    config: HOTConfig | None,
    label: str,
    linears: list[str],
    seed: int = 0,
    steps: int | None = None,
    prepare: Callable[[nn.Module], Any] | None = None,
    arguments: dict[str, Any] | None = None,
    pieces: Pieces | None = None,
    saved: type[SavedTensors] = SavedTensors,
) -> tuple[nn.Module, Run]:
    """Train once from ``task``'s starting point and measure.

    Args:
        config: what HOT does, or None for exact training.
        linears: names of the layers whose kept inputs are added up (those that HOT patches).
        seed: of the model, the order of the data and HOT's rounding.
        steps: instead of the task's own number.
        prepare: called with the model, once HOT is applied; may return a TrainerCallback.
        arguments: of TrainingArguments, beside the task's own.
        pieces: keep an unfinished run and go on with it, rather than start at step 0.
        saved: what counts the kept bytes.

    Returns:
        the trained model and the run's numbers; times are those of the last piece.

    Raises:
        Unfinished: at the deadline of ``pieces``.
    """
    model = task.make_model(seed)
    if config is not None:
        apply_hot(model, config)
    callback = None if prepare is None else prepare(model)
    settings = {**task.arguments, **(arguments or {}), **({} if steps is None else {"max_steps": steps})}
    recorder = _Recorder(label)
    with tempfile.TemporaryDirectory() if pieces is None else nullcontext(str(pieces.folder)) as folder:
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
        if callback is not None:
            trainer.add_callback(callback)
        checkpoint = None
        if pieces is not None:
            if config is not None:  # what lqs has chosen, and the step that stochastic rounding is at
                trainer.add_callback(HOTCallback(error_every=0, audit_steps=0))
            trainer.add_callback(_Deadline(pieces.deadline))
            checkpoint = get_last_checkpoint(folder) if Path(folder).is_dir() else None
        trainer.train(resume_from_checkpoint=checkpoint)
        if trainer.state.global_step < settings["max_steps"]:
            raise Unfinished(f"{label}: {trainer.state.global_step} of {settings['max_steps']} steps")
        metrics = trainer.evaluate()
    fix_selection(model)  # a run shorter than lqs_batches would still keep its inputs whole
    kept, kept_linear = _kept(model, task, linears, trainer.compute_loss_context_manager, saved)
    history = [entry for entry in trainer.state.log_history if "loss" in entry]  # of earlier pieces too
    run = Run(
        label,
        None if config is None else config.to_dict(),
        seed,
        settings["max_steps"],
        float(metrics["eval_loss"]),
        metrics.get("eval_accuracy"),
        [float(entry["loss"]) for entry in history],
        float(torch.tensor([entry["grad_norm"] for entry in history]).max()),  # NaN, where there was one
        kept,
        kept_linear,
        recorder.seconds[0],
        statistics.median(recorder.seconds[1:] or recorder.seconds),
    )
    return model, run

"""One run and its row."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from bench_page import processor
from fidelity.runs import RESULTS, results_of
from fidelity.store import key_of, settings_of
from torch import Tensor

from hot_hf.demo.tasks import Task
from hot_hf.demo.train import Pieces, coverage, fit
from hot_hf.memory import SavedTensors

from .plan import Run
from .registry import DEFAULT, METHODS
from .tasks import TASKS

KEY = ("task", "method", "seed", "steps", "configuration")
VALUES = (*RESULTS, "seconds_per_step", "minutes", "torch", "machine")


class Inputs(SavedTensors):
    """Without the bfloat16 copies of weights that autocast makes in a forward: they are no activations."""

    def _record(self, tensor: Tensor) -> Tensor:
        node = tensor.grad_fn
        while node is not None and node.name() in ("ToCopyBackward0", "TBackward0", "TransposeBackward0"):
            node = node.next_functions[0][0]
        of_weight = node is not None and node.name().endswith("AccumulateGrad")
        return tensor.detach() if of_weight and not tensor.is_leaf else super()._record(tensor)


@cache
def machine() -> str:
    """The processor or accelerator, and the threads used."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    name, _ = processor()
    return f"{name}, {torch.get_num_threads()} of {os.cpu_count()} cores"


def key(run: Run, steps: int | None) -> dict[str, Any]:
    """The columns that a finished run is found by."""
    entry = TASKS[run.task]
    return {
        "task": run.task,
        "method": run.method,
        "seed": run.seed,
        "steps": steps or entry.steps,
        "configuration": key_of(METHODS[run.method].configuration(run.seed, entry.lora)),
    }


def with_defaults(configuration: dict[str, Any]) -> dict[str, Any]:
    """A stored configuration with the fields that HOTConfig has gained since: a run keeps its meaning, and its key."""
    return {**configuration, "hot": settings_of(configuration["hot"])}


def train(run: Run, task: Task, steps: int | None, unfinished: Path, deadline: float) -> dict[str, Any]:
    """Train, or go on with what an earlier call left in ``unfinished``, and give the row.

    Raises:
        hot_hf.demo.train.Unfinished: at the deadline.
    """
    method, entry, columns = METHODS[run.method], TASKS[run.task], key(run, steps)
    linears = coverage(task, DEFAULT.config(run.seed, entry.lora)).patched
    folder = (
        unfinished / f"{run.task}-{run.method}-{run.seed}-{hashlib.sha256(key_of(columns).encode()).hexdigest()[:8]}"
    )
    folder.mkdir(parents=True, exist_ok=True)
    spent, start = folder / "seconds", time.monotonic()
    before = float(spent.read_text()) if spent.is_file() else 0.0
    try:
        _, result = fit(
            task,
            method.config(run.seed, entry.lora),
            f"{run.task}, {run.method}, seed {run.seed}",
            linears,
            run.seed,
            columns["steps"],
            method.prepare(linears, run.seed),
            {
                **method.arguments,
                "use_cpu": not torch.accelerator.is_available(),
            },  # bfloat16 on a CPU is refused without
            Pieces(folder, deadline),
            Inputs,
        )
    finally:
        seconds = before + time.monotonic() - start
        spent.write_text(f"{seconds}\n")
    shutil.rmtree(folder)
    return {
        **columns,
        **results_of(result),
        "seconds_per_step": f"{result.seconds_per_step:.3f}",
        "minutes": f"{seconds / 60:.2f}",
        "torch": torch.__version__,
        "machine": machine(),
    }

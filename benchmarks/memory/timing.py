"""Seconds of whole training steps under every method of a workload, in interleaved rounds."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import torch
from bench_page import append, interleaved, machine, summary, timed
from torch import nn

from hot_hf import fix_selection

from .page import SECONDS
from .workloads import WORKLOADS, loss_of, prepare


def samplers(workload: str) -> dict[str, Callable[[], float]]:
    """One training step of each method, in seconds: forward, loss, backward, AdamW.

    All methods train the same parameters and, without adapters, the same optimizer, so that memory holds one copy and
    the cost of a step is all that differs.
    """
    torch.manual_seed(0)
    spec = WORKLOADS[workload]
    model, batches, _ = spec.make(1)
    optimizers: dict[frozenset[int], torch.optim.Optimizer] = {}
    steps = {}
    for method in spec.methods:
        shared = {id(p): p for p in model.parameters()}
        instance = prepare(copy.deepcopy(model, shared), method)
        trainable = [p for p in instance.parameters() if p.requires_grad]
        key = frozenset(map(id, trainable))
        optimizer = optimizers.setdefault(key, torch.optim.AdamW(trainable, 1e-6, fused=True))  # fused, as Trainer's
        steps[method] = _sampler(instance, method, batches[0], optimizer)
    return steps


def _sampler(model: nn.Module, method: str, batch: dict, optimizer: torch.optim.Optimizer) -> Callable[[], float]:
    loss = loss_of(method)

    def step() -> None:
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    fix_selection(model)  # lqs chooses after one batch here, so that the steps timed are those that last
    return lambda: timed(step)


def time_workload(workload: str, rounds: int) -> None:
    """Append a row per method to docs/results/memory_seconds.csv."""
    warnings.simplefilter("ignore")
    taken = interleaved(samplers(workload), rounds)
    base = next(iter(taken.values()))
    common = {**machine(), "rounds": str(rounds), "workload": workload}
    append(SECONDS, [common | {"method": m} | summary(seconds, {"base": base}) for m, seconds in taken.items()])

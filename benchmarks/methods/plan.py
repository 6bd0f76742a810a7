"""Which runs, in which order: cheap and most informative first, so that an interrupted sweep has answered the most."""

from __future__ import annotations

from dataclasses import dataclass

from .registry import ABLATED, ALL, CORE

FIRST, OTHERS = (0,), (1, 2)


@dataclass(frozen=True)
class Run:
    task: str
    method: str
    seed: int


# (tasks, methods, seeds)
STAGES = (
    (("digits", "minilm", "llama"), ALL, FIRST),
    (("digits",), ABLATED, FIRST),
    (("code", "prose"), CORE, FIRST),
    (("code-lora", "prose-lora"), CORE, FIRST),
    (("digits", "minilm", "llama"), CORE, OTHERS),
    (("digits",), ABLATED, OTHERS),
    (("code", "prose"), ALL, FIRST),
    (("code-lora", "prose-lora"), ALL, FIRST),
    (("digits", "minilm", "llama"), ALL, OTHERS),
    (("code", "prose"), CORE, OTHERS),
    (("code-lora", "prose-lora"), CORE, OTHERS),
    (("code", "minilm"), ABLATED, FIRST),
    (("code", "prose"), ALL, OTHERS),
    (("code-lora", "prose-lora"), ALL, OTHERS),
)


def runs(tasks: list[str], methods: list[str], seeds: list[int]) -> list[Run]:
    """All runs of STAGES within the three lists, each once."""
    planned = {
        Run(task, method, seed): None  # a dictionary keeps the order
        for stage_tasks, stage_methods, stage_seeds in STAGES
        for task in stage_tasks
        if task in tasks
        for seed in stage_seeds
        if seed in seeds
        for method in stage_methods
        if method in methods
    }
    return list(planned)

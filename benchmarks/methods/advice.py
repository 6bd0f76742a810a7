"""'When not to use HOT', said by the rows: each rule is a condition on them, and its sentence carries their numbers."""

from __future__ import annotations

from .registry import METHODS, PLANS
from .summary import EIGHTH, SCALES, Results, joined
from .tasks import TASKS

LITTLE = 0.25  # of everything that is kept: less saved than this is little
MUCH_NORM = 10  # times exact training's largest gradient norm


def advice(results: Results) -> list[str]:
    """Sentences, those on the accuracy first; a rule whose condition no row meets says nothing."""
    rules = (_inaccurate, _norms, _little_saved, _bfloat16, _beaten)
    return [sentence for rule in rules for sentence in rule(results)]


def _hot(results: Results, task: str) -> list[str]:
    present = results.methods(task)
    return [m.name for m in PLANS if m.name in present]


def _inaccurate(results: Results) -> list[str]:
    said = []
    for method in PLANS:
        tasks = [task for task in results.by if results.within(task, method.name) is False]
        if tasks:
            where = joined([f"{TASKS[t].what} ({results.difference_text(t, method.name)})" for t in tasks])
            said.append(
                f"**`{method.name}`** missed the bound, against exact training, on {where}: not for such tasks."
            )
    return said


def _norms(results: Results) -> list[str]:
    said = []
    for task in results.by:
        ratios = {name: results.ratio(task, name, "largest_grad_norm") for name in _hot(results, task)}
        wild = [f"`{name}` ({ratio:.0f} times)" for name, ratio in ratios.items() if ratio and ratio > MUCH_NORM]
        if wild:
            said.append(
                f"On {TASKS[task].what} the largest gradient norm is far above exact training's with {joined(wild)}: "
                "keep gradient clipping on, or take another plan."
            )
    return said


def _little_saved(results: Results) -> list[str]:
    little = []
    for task in results.by:
        ratio, exact = results.ratio(task, "default", "kept_bytes"), results.values(task, "exact", "kept_bytes")
        if ratio is None or exact is None or 1 - ratio >= LITTLE:
            continue
        share = results.values(task, "exact", "kept_linear_bytes").mean / exact.mean
        little.append(f"{TASKS[task].what} (linear inputs are {share:.0%} of it, {1 - ratio:.0%} is saved)")
    if not little:
        return []
    return [
        f"Where inputs of linear layers are a small part of what the backward keeps there is little to gain: "
        f"{joined(little)}. There `compress='block'` or checkpointing save more ([memory.md](../memory.md))."
    ]


def _bfloat16(results: Results) -> list[str]:
    less = []
    for task in results.by:
        bf16, hot = (results.values(task, name, "kept_bytes") for name in ("bf16", "default"))
        if bf16 and hot and bf16.mean < hot.mean and results.within(task, "bf16"):
            less.append(f"{TASKS[task].what} ({bf16.mean / 2**20:.1f} against {hot.mean / 2**20:.1f} MiB)")
    if not less:
        return []
    return [
        f"In float32 before trying bfloat16: autocast alone keeps less in all than the default does in float32, and "
        f"stays within the bound, on {joined(less)}. HOT comes on top of autocast, not in its place."
    ]


def _beaten(results: Results) -> list[str]:
    said = []
    for task in results.by:
        mine = results.above(task, "default", "held_out_loss")
        kept = results.values(task, "default", "kept_linear_bytes")
        if mine is None or results.within(task, "default"):
            continue  # within the bound there is no loss to be had back
        for name in results.methods(task):
            other, other_kept = (
                results.above(task, name, "held_out_loss"),
                results.values(task, name, "kept_linear_bytes"),
            )
            if METHODS[name].group == "rival" and other.mean < mine.mean and other_kept.mean <= kept.mean:
                said.append(f"On {TASKS[task].what} {METHODS[name].label} lost less and kept no more than the default.")
    return said


def claims(results: Results) -> list[list[str]]:
    """The criterion, a line per task and HOT plan: difference, bytes, seeds, and whether both bounds hold."""
    lines = []
    for task in results.by:
        for name in _hot(results, task):
            good, bytes_ratio = results.within(task, name), results.ratio(task, name, "kept_linear_bytes")
            if good is None or bytes_ratio is None:
                continue
            small = bytes_ratio <= EIGHTH * SCALES
            size = f"{bytes_ratio:.4f}" + (
                " (an eighth, and scales)" if EIGHTH < bytes_ratio <= EIGHTH * SCALES else ""
            )
            seeds = len(results.above(task, name, "held_out_loss").values)
            verdict = (
                "yes"
                if good and small
                else "no: "
                + joined(
                    [
                        *([] if good else ["loss" if TASKS[task].criterion == "held_out_loss" else "accuracy"]),
                        *([] if small else ["bytes"]),
                    ]
                )
            )
            lines.append(
                [TASKS[task].what, f"`{name}`", results.difference_text(task, name), size, str(seeds), verdict]
            )
    return lines

"""The modes of a model's blocks for a budget: a path of plans from the smallest to the fastest, and how far along it
the budget reaches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from ..block import compressed_blocks, set_mode
from ..dry_run import DryRun, StepBytes, optimizer_bytes
from .costs import relative_costs

GIB = 2**30


def size(nbytes: int) -> str:
    """``2.25 GiB``, or MiB where there are few."""
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB / 10 else f"{nbytes / 2**20:.1f} MiB"


@dataclass(frozen=True)
class Fitted:
    """Modes by block, and what was predicted of them. ``states`` (weights, buffers, optimizer state) and ``peak``
    (gradients, activations, temporary tensors) in bytes; ``time`` of the blocks' work, relative to exact training."""

    modes: dict[str, str]
    states: int
    peak: int
    time: float

    @property
    def total(self) -> int:
        return self.states + self.peak

    def __str__(self) -> str:
        counts = Counter(self.modes.values())
        return (
            f"{size(self.total)} at its peak ({size(self.states)} weights and optimizer state, "
            f"{size(self.peak)} gradients and activations): "
            + ", ".join(f"{count} blocks {mode}" for mode, count in counts.items())
        )


@dataclass(frozen=True)
class _Upgrade:
    block: str
    mode: str
    gain: float  # time saved, relative to all blocks' exact work
    slope: float  # gain per byte


class Fitter:
    """Fits a step of ``model``, a patched copy without data, to budgets.

    Args:
        model: on the meta device, in training mode, with compressed blocks (``HOTConfig(memory=...)``).
        args, kwargs: of the model's forward, their tensors on the meta device.
        device: type of the device that it will run on.
        dtype: in which its blocks compute.
        optimizer: one of ``OPTIMIZERS``, whose state counts.
        autocast, accumulating: as for ``DryRun``.
        progress: shows a bar.

    Raises:
        ValueError: for a model that cannot run without values.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple,
        kwargs: Mapping[str, Any],
        *,
        device: str,
        dtype: torch.dtype,
        optimizer: str = "adamw",
        autocast: torch.dtype | None = None,
        accumulating: bool = False,
        progress: bool = False,
    ) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        self.blocks = compressed_blocks(model)
        self.states = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
        self.states += optimizer_bytes(model, optimizer)
        self.run = DryRun(model, device, autocast, self.blocks, accumulating)
        self.costs = relative_costs(device, autocast or dtype)
        self._bar = tqdm(desc="fitting", unit="step", disable=not progress, leave=False)
        self._peaks: dict[int, int] = {}
        sizes = {name: sum(p.numel() for p in block.parameters()) for name, block in self.blocks.items()}
        self.work = {name: size / max(sum(sizes.values()), 1) for name, size in sizes.items()}  # shares of the step

    @cached_property
    def upgrades(self) -> list[_Upgrade]:
        """In the order in which a growing budget affords them: most time saved per byte first, and of equal ones the
        last block's, whose bytes are gone when an earlier block's are made again."""
        modes = list(self.costs)
        left = {mode: self._dry_run(dict.fromkeys(self.blocks, mode)).units for mode in modes}
        found = []
        for place, name in enumerate(self.blocks):
            costs = {m: (left[m].get(name, 0), self.work[name] * self.costs[m]) for m in modes}
            found += [(-u.slope, -place, i, u) for i, u in enumerate(_hull(name, costs))]
        return [u for *_, u in sorted(found, key=lambda entry: entry[:3])]

    def modes(self, count: int) -> dict[str, str]:
        """The plan after ``count`` upgrades of the smallest one."""
        return dict.fromkeys(self.blocks, "checkpoint") | {u.block: u.mode for u in self.upgrades[:count]}

    def peak(self, count: int) -> int:
        """Predicted bytes beside the states of the plan after ``count`` upgrades."""
        if count not in self._peaks:
            self._peaks[count] = self._dry_run(self.modes(count)).peak
        return self._peaks[count]

    def peak_of(self, modes: Mapping[str, str]) -> int:
        """The same of any plan."""
        return self._dry_run(modes).peak

    def peak_at(self, args: tuple, kwargs: Mapping[str, Any]) -> int:
        """That of the smallest plan for another batch."""
        self._set(self.modes(0))
        return self.run(*args, **kwargs).peak

    def at(self, count: int) -> Fitted:
        modes = self.modes(count)
        time = sum(share * self.costs[modes[name]] for name, share in self.work.items())
        return Fitted(modes, self.states, self.peak(count), time)

    def within(self, memory: int) -> Fitted | None:
        """The fastest plan of the path whose total is at most ``memory`` bytes; None where not even the smallest is."""
        room = memory - self.states
        last = len(self.upgrades)
        if self.peak(0) > room:
            return None
        if self.peak(last) <= room:
            return self.at(last)
        return self.at(_search(0, last, self._peaks, room, lambda count: self.peak(count) <= room))

    def _set(self, modes: Mapping[str, str]) -> None:
        for name, block in self.blocks.items():
            set_mode(block, modes[name])

    def _dry_run(self, modes: Mapping[str, str]) -> StepBytes:
        self._set(modes)
        self._bar.update()
        return self.run(*self.args, **self.kwargs)


def _hull(block: str, costs: dict[str, tuple[int, float]]) -> list[_Upgrade]:
    """The upgrades of one block from checkpointing on, of falling gain per byte: the lower convex hull of (bytes,
    time)."""
    mode, upgrades = "checkpoint", []
    while True:
        size, time = costs[mode]
        better = [
            _Upgrade(block, m, time - t, (time - t) / max(b - size, 1)) for m, (b, t) in costs.items() if t < time
        ]
        if not better:
            return upgrades
        best = max(better, key=lambda u: (u.slope, u.gain))
        upgrades.append(best)
        mode = best.mode


def largest_that_fits(total: Callable[[int], int], memory: int, start: int, at_most: int) -> int:
    """The largest size of 1 .. ``at_most`` whose ``total(size)`` bytes, which grow with it, are at most ``memory``; 0
    where not even 1 is. Doubles or halves from ``start``, then searches between."""
    totals: dict[int, int] = {0: 0}

    def fits(size: int) -> bool:
        totals[size] = total(size)
        return totals[size] <= memory

    low, high, size = 0, at_most + 1, start
    while low < size < high:
        if fits(size):
            low, size = size, min(2 * size, at_most)
        else:
            high, size = size, size // 2
    return _search(low, high, totals, memory, fits)


def _search(low: int, high: int, totals: dict[int, int], memory: int, fits: Callable[[int], bool]) -> int:
    """The last number from ``low``, which fits, to below ``high``, which does not, that fits; ``totals`` are filled by
    ``fits``. Bytes grow nearly evenly: guesses by them, an eighth of what is left from its ends at least."""
    while high - low > 1:
        span, edge = high - low, max((high - low) // 8, 1)
        share = (memory - totals[low]) / max(totals[high] - totals[low], 1) if high in totals else 0.5
        middle = min(max(low + round(share * span), low + edge), high - edge)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low

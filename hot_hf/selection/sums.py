"""Errors of candidate gradients, added up so that micro-batches and ranks can be summed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..ops.reference import philox_uniform
from ..selected_plan import Score

# Numbers kept of a matrix, and columns of x in the products that judge g_x. The squared norm of such a sketch is that
# of the matrix with a relative standard deviation of sqrt(2 / 1021) = 4.4%, so a norm is right to about 2%. Primes: the
# entries of one feature, which may be an outlier, spread over all numbers of the sketch.
SKETCH = 1021
COLUMNS = 127


def signs(count: int, key: int, device: torch.device) -> Tensor:
    """(count,) float32 of +-1, the same everywhere for one ``key``."""
    return torch.where(philox_uniform(key, count, device) < 0.5, -1.0, 1.0)


def _fold(values: Tensor, size: int) -> Tensor:
    """Add every ``size``-th entry of the last axis: (..., n) to (..., size)."""
    tail = -values.shape[-1] % size
    values = torch.nn.functional.pad(values, (0, tail))
    return values.view(*values.shape[:-1], -1, size).sum(-2)


def project_features(x: Tensor) -> Tensor:
    """(tokens, features) to (tokens, COLUMNS), signed; narrower ones keep their width."""
    x = x.float() * signs(x.shape[1], 3, x.device)
    return x if x.shape[1] <= COLUMNS else _fold(x, COLUMNS)


class Sketch:
    """Random linear map of a (rows, columns) matrix to SKETCH numbers that keeps norms (a count sketch)."""

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        self.rows, self.columns = signs(rows, 1, device)[:, None], signs(columns, 2, device)
        self.size = SKETCH if columns % SKETCH else SKETCH - 2  # else a column would fall on one number

    def __call__(self, matrix: Tensor) -> Tensor:
        folded = _fold((matrix * self.rows * self.columns).flatten(), self.size).float()
        return torch.nn.functional.pad(folded, (0, SKETCH - self.size))


class ErrorSums:
    """Sums over micro-batches for ``count`` candidates of one gradient; on the CPU."""

    def __init__(self, count: int) -> None:
        # per candidate |e|^2, <e, g> and |sketch of e|^2; last row: |g|^2, unused, |sketch of g|^2
        self.scalars = torch.zeros(count + 1, 3, dtype=torch.float64)
        self.sketches = torch.zeros(count + 1, SKETCH)

    def vector(self) -> Tensor:
        """All of it in one float64 tensor, which ranks add."""
        return torch.cat((self.scalars.flatten(), self.sketches.flatten().double()))

    def set(self, vector: Tensor) -> None:
        """The inverse of ``vector``."""
        split = self.scalars.numel()
        self.scalars = vector[:split].view_as(self.scalars)
        self.sketches = vector[split:].view_as(self.sketches).float()

    @property
    def seen(self) -> bool:
        """Whether any gradient was not zero."""
        return bool(self.scalars[-1, 0] > 0)

    def score(self, index: int, batches: int) -> Score:
        """Of candidate ``index``, after ``batches`` gradients."""
        (squared, inner, sketched), exact = self.scalars[index].tolist(), self.scalars[-1, 0].item()
        total, total_exact = self.sketches[[index, -1]].double().norm(dim=1).tolist()
        return Score(
            math.sqrt(squared / exact),
            total / total_exact if total_exact else math.inf,
            total**2 / (batches * sketched) if sketched else 0.0,
            inner / exact,
        )

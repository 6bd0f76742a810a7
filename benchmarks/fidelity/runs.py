"""The training runs: which configurations, on which data, with which seeds."""

from __future__ import annotations

import json
from dataclasses import dataclass

from hot_hf import HOTConfig
from hot_hf.demo.train import Run

from .store import key_of, settings_of

RESULTS = (
    "held_out_loss",
    "held_out_accuracy",
    "last_losses_mean",
    "largest_grad_norm",
    "kept_bytes",
    "kept_linear_bytes",
)


def results_of(run: Run) -> dict[str, float | int | str]:
    """The columns ``RESULTS`` of a finished run; no accuracy where the task has none."""
    last = run.losses[-10:]
    return {
        "held_out_loss": run.held_out_loss,
        "held_out_accuracy": "" if run.held_out_accuracy is None else run.held_out_accuracy,
        "last_losses_mean": sum(last) / len(last),
        "largest_grad_norm": run.largest_grad_norm,
        "kept_bytes": run.kept_bytes,
        "kept_linear_bytes": run.kept_linear_bytes,
    }


@dataclass(frozen=True)
class Candidate:
    """A configuration to train with; ``config`` is None for exact training."""

    label: str
    config: HOTConfig | None


def _config(bits: int, granularity: str, fmt: str, **changes) -> HOTConfig:
    return HOTConfig(
        grad_input_bits=bits, grad_input_granularity=granularity, activation_format=fmt, **{"rank": 8, **changes}
    )


EXACT = Candidate("exact", None)
PRESETS = (
    Candidate("default: g_x INT8 per token, `ht_int4`", HOTConfig()),
    Candidate("smallest(): g_x INT8 per token, HLA r=8 INT4", HOTConfig.smallest()),
    Candidate("fast(): g_x INT4 per token nearest, HLA r=8 INT8", HOTConfig.fast()),
    Candidate("paper(): g_x INT4 LQS, HLA r=8 INT8 per tensor, pseudo-stochastic", HOTConfig.paper()),
)
OTHERS = (
    Candidate("g_x INT4 per token nearest, `ht_int4`", _config(4, "per_token", "ht_int4")),
    Candidate("g_x INT8 per token, HLA r=8 INT8", _config(8, "per_token", "hla_int8")),
    Candidate(
        "the paper, per-token everywhere, stochastic", _config(4, "per_token", "hla_int8", rounding="stochastic")
    ),
    Candidate(
        "the paper, per-tensor everywhere, stochastic",
        _config(4, "per_tensor", "hla_int8", rounding="stochastic", grad_weight_granularity="per_tensor"),
    ),
)


def with_defaults(configuration: str) -> str:
    """A stored configuration with the fields that HOTConfig has gained since: a run keeps its meaning, and its key."""
    return key_of(settings_of(json.loads(configuration)))


def plan(data: str, seeds: int) -> list[tuple[Candidate, int]]:
    """(candidate, seed) in the order they run: text once each; digits the presets with every seed, the rest once."""
    if data == "text":
        return [(candidate, 0) for candidate in (EXACT, *PRESETS, *OTHERS)]
    return [(c, seed) for seed in range(seeds) for c in (EXACT, *PRESETS)] + [(c, 0) for c in OTHERS]

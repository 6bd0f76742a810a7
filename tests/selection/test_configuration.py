"""The fields of a selection by budget: what is refused, and what to write instead."""

import pytest

from hot_hf import HOTConfig, apply_hot
from hot_hf.config import byte_budget
from tests.models import mlp, tiny_llama


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"selection": "budget"}, "exactly one of max_grad_error and max_bytes, not neither"),
        ({"selection": "budget", "max_grad_error": 0.1, "max_bytes": 10}, "exactly one .* not both"),
        ({"selection": "best", "max_bytes": 10}, r"selection='best' is not known; choose one of \['budget', None\]"),
        ({"selection": "budget", "max_grad_error": 0}, "between 0 and 1"),
        ({"selection": "budget", "max_grad_error": 15}, "between 0 and 1"),
        ({"selection": "budget", "max_grad_error": float("nan")}, "between 0 and 1"),
        ({"selection": "budget", "max_grad_error": True}, "between 0 and 1"),
        ({"selection": "budget", "max_grad_error": "0.1"}, "between 0 and 1"),
        ({"selection": "budget", "max_bytes": "lots"}, r"max_bytes='lots' is no size: .*'24MB'.*'12\.5%'"),
        ({"selection": "budget", "max_bytes": 0}, "is no size"),
        ({"selection": "budget", "max_bytes": -5}, "is no size"),
        ({"selection": "budget", "max_bytes": 1.5}, "is no size"),
        ({"selection": "budget", "max_bytes": True}, "is no size"),
        ({"selection": "budget", "max_bytes": "0%"}, "is no size"),
        ({"selection": "budget", "max_bytes": "5 parsecs"}, "is no size"),
        ({"selection": "budget", "max_bytes": 1, "grad_input_granularity": "lqs"}, "grad_input_granularity='lqs' out"),
    ],
)
def test_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        HOTConfig(**settings)


@pytest.mark.parametrize(
    "value, size",
    [(123, 123), ("123", 123), ("24MB", 24_000_000), ("1.5 GiB", 3 * 2**29), ("2kib", 2048), ("12.5%", 125), ("3B", 3)],
)
def test_sizes(value, size):
    assert byte_budget(value, 1000) == size
    config = HOTConfig(selection="budget", max_bytes=value)
    assert HOTConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("budget", [{"max_grad_error": 0.1}, {"max_bytes": "24MB"}])
def test_a_budget_alone_is_a_selection(budget):
    assert HOTConfig(**budget) == HOTConfig(selection="budget", **budget)


def test_report():
    """The coverage report says who decides; an override is the user's."""
    config = HOTConfig(selection="budget", max_grad_error=0.1, overrides={"*.q_proj": {"activation_format": "int8"}})
    reasons = {row.name: row.reason for row in apply_hot(tiny_llama(), config).rows}
    assert reasons["model.layers.0.self_attn.k_proj"] == "chosen by budget"
    assert reasons["model.layers.0.self_attn.q_proj"] == "INT8 per_token / int8"


def test_paper_preset_with_a_budget():
    """Its rounding and scales of g_w stay; the granularity is the budget's to choose."""
    config = HOTConfig.paper(selection="budget", max_grad_error=0.3, grad_input_granularity="per_token", min_features=1)
    model = mlp(32, 48)
    apply_hot(model, config)
    assert model[0].hot.probe.plan.rounding == "pseudo_stochastic"

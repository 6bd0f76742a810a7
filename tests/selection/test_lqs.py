"""LQS: what is measured, what is chosen, and that measuring is exact (spec.md, section 7)."""

import pytest
import torch
from torch import nn

from hot_hf import HOTConfig, HOTLinear, apply_hot, fix_selection
from hot_hf.plan import Plan
from hot_hf.selection import GranularityProbe
from tests.models import grads, mlp, twin

LQS = {"grad_input_granularity": "lqs", "grad_input_bits": 4, "min_features": 1}


def flat(tokens=32, features=24):
    """Tokens of one size: per-tensor scales lose nothing."""
    return torch.randn(tokens, features).sign() * torch.rand(tokens, features)


def uneven(tokens=32, features=24):
    """Tokens of very different sizes: per-tensor scales round most of them to zero."""
    return flat(tokens, features) * torch.logspace(0, 4, tokens)[:, None]


def errors_by_hand(g: torch.Tensor) -> tuple[float, float]:
    g = g.double()
    tensor_step = g.abs().max() / 7
    token_step = g.abs().amax(1, keepdim=True) / 7
    squared = [((g / step).round() * step - g).square().sum().item() for step in (tensor_step, token_step)]
    return squared[0], squared[1]


def test_measured_errors():
    """Squared Frobenius errors of the untransformed g under 4-bit scales, summed over the batches."""
    probe = GranularityProbe(Plan(), HOTConfig(lqs_batches=2))
    batches = [torch.randn(40, 24), uneven()]
    for g in batches:
        probe.record(g.view(2, -1, 24))
    expected = [sum(e) for e in zip(*(errors_by_hand(g) for g in batches), strict=True)]
    torch.testing.assert_close(float(probe.error_tensor), expected[0], rtol=1e-4, atol=0)
    torch.testing.assert_close(float(probe.error_token), expected[1], rtol=1e-4, atol=0)
    assert probe.recorded == 2


@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.0])
def test_rule(threshold):
    """per_token where e_token < threshold * e_tensor, on the norms."""
    probe = GranularityProbe(Plan(4, "lqs"), HOTConfig(lqs_batches=1, lqs_threshold=threshold))
    for ratio in (0.1, 0.49, 0.51, 0.99, 1.01):
        probe.error_tensor, probe.error_token = 4.0, 4.0 * ratio**2
        assert probe.choose() == Plan(4, "per_token" if ratio < threshold else "per_tensor")


@pytest.mark.parametrize("make, chosen", [(flat, "per_tensor"), (uneven, "per_token")])
def test_layers_choose_by_their_gradients(make, chosen):
    """Exact until enough was measured, then the choice at the next forward, in a single process."""
    exact = mlp(32, 24)
    model = twin(exact)
    apply_hot(model, HOTConfig(**LQS, lqs_batches=2))
    for batch in range(4):
        x, g = torch.randn(32, 32, requires_grad=True), make()
        x_exact = x.detach().clone().requires_grad_()
        model.zero_grad()
        exact.zero_grad()
        model(x).backward(g)
        exact(x_exact).backward(g)
        measuring = batch < 2
        assert torch.equal(x.grad, x_exact.grad) == measuring
        assert torch.equal(model[0].weight.grad, exact[0].weight.grad) == measuring
        assert (model[0].hot.probe is not None) == measuring
    assert model[0].hot.plan.grad_input_granularity == chosen


def test_bad_batches_do_not_count():
    """An overflow step of a GradScaler says nothing about the layer."""
    probe = GranularityProbe(Plan(), HOTConfig(lqs_batches=2))
    g = torch.randn(8, 24)
    g[1, 2] = torch.inf
    probe.record(g)
    probe.record(g * torch.nan)
    assert probe.recorded == 0 and float(probe.error_tensor) == 0


def test_several_forwards_before_a_backward():
    """Two forwards, then their backwards: each is measured once; a forward without backward is not."""
    model = mlp(32, 24)
    apply_hot(model, HOTConfig(**LQS, lqs_batches=3))
    losses = [model(torch.randn(8, 32)).square().sum() for _ in range(2)]
    model(torch.randn(8, 32))
    for loss in losses:
        loss.backward()
    assert model[0].hot.probe.recorded == 2


def test_calls_of_a_shared_layer_are_one_micro_batch():
    """ALBERT's layers are called again and again in each: they choose when the others do, by all their gradients."""
    shared = nn.Linear(24, 24)
    model = nn.Sequential(shared, shared, shared, nn.Linear(24, 24))
    apply_hot(model, HOTConfig(**LQS, lqs_batches=2))
    gradients = []
    for batch in range(2):
        assert shared.hot.probe is not None and model[3].hot.probe is not None
        x = torch.randn(8, 24)
        for layer in model:
            x = layer(x)
            if layer is shared:
                x.register_hook(gradients.append)
        x.square().sum().backward()
        assert shared.hot.probe.recorded == model[3].hot.probe.recorded == batch + 1
    expected = sum(errors_by_hand(g)[0] for g in gradients)
    torch.testing.assert_close(float(shared.hot.probe.error_tensor), expected, rtol=1e-4, atol=0)
    model(torch.randn(8, 24))
    assert shared.hot.probe is None and model[3].hot.probe is None


def test_measuring_uses_no_random_numbers():
    model = mlp(32, 24)
    apply_hot(model, HOTConfig(**LQS))
    x = torch.randn(8, 32)
    state = torch.random.get_rng_state()
    model(x).square().sum().backward()
    assert torch.equal(torch.random.get_rng_state(), state)


def test_fix_selection():
    """Ends measuring now; a layer that recorded nothing gets per_token; exact layers are left out."""
    model = nn.ModuleList([nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 24)])
    apply_hot(model, HOTConfig(**LQS, overrides={"2": {"grad_input_bits": None}}))
    assert fix_selection(mlp(4, 4)) == {}
    model[0](torch.randn(32, 24)).backward(flat())
    chosen = fix_selection(model)
    assert {n: p.grad_input_granularity for n, p in chosen.items()} == {"0": "per_tensor", "1": "per_token"}
    assert all(m.hot.probe is None for m in model.modules() if isinstance(m, HOTLinear))
    assert model[0].hot.plan == chosen["0"]
    assert fix_selection(model) == {}


def test_copies_measure_on_their_own():
    """A deep copy made while measuring goes on by itself."""
    model = mlp(32, 24)
    apply_hot(model, HOTConfig(**LQS, lqs_batches=2))
    model(torch.randn(8, 32)).square().sum().backward()
    other = twin(model)
    other(torch.randn(8, 32)).square().sum().backward()
    assert (model[0].hot.probe.recorded, other[0].hot.probe.recorded) == (1, 2)


def test_paper_preset_trains():
    """The published configuration from the first measured batch to quantized ones: finite, and all layers chosen."""
    model = mlp(64, 96, 64)
    apply_hot(model, HOTConfig.paper(lqs_batches=1))
    for _ in range(3):
        model.zero_grad()
        model(torch.randn(40, 64)).square().sum().backward()
        assert all(g.isfinite().all() for g in grads(model).values())
    granularities = {m.hot.plan.grad_input_granularity for m in model if isinstance(m, HOTLinear)}
    assert granularities <= {"per_token", "per_tensor"}

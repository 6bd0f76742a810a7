"""A budget's measurements: the errors that the layer itself will make, and exact training meanwhile."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hot_hf import HOTConfig, apply_hot, fix_selection
from hot_hf.selection.candidates import GRAD_INPUTS, KEPT_INPUTS
from hot_hf.selection.probe import MAX_TOKENS, sample
from hot_hf.selection.sums import Sketch, project_features
from tests.models import grads, image_batch, mlp, tiny_llama, tiny_vit, token_batch, twin

BUDGET = {"selection": "budget", "max_grad_error": 0.15, "min_features": 1}
# A norm seen through a sketch has a relative standard deviation of sqrt(2 / 1021) / 2 = 2.2%, a ratio of two at most
# 3.2%; five of them.
SKETCHED = 0.16


def measured(layer: nn.Linear, batches, **settings):
    """The probe of a copy of ``layer`` after these (x, g)."""
    layer = twin(layer)
    apply_hot(layer, HOTConfig(**{**BUDGET, "lqs_batches": 100, **settings}))
    for x, g in batches:
        layer(x.clone().requires_grad_()).backward(g)
    return layer.hot.probe


def by_hand(layer: nn.Linear, batches, settings: dict, of_input: bool) -> dict[str, float]:
    """What ``Score`` defines, from the gradients of a layer patched with ``settings`` and exact ones in float64."""
    layer = twin(layer)
    apply_hot(layer, HOTConfig(min_features=1, **settings))
    errors, exact = [], []
    for x, g in batches:
        layer.zero_grad()
        x = x.clone().requires_grad_()
        layer(x).backward(g)
        rows, g = x.detach().reshape(-1, x.shape[-1]).double(), g.reshape(-1, g.shape[-1]).double()
        if of_input:
            exact.append(g @ layer.weight.detach().double())
            errors.append(x.grad.reshape(rows.shape).double() - exact[-1])
        else:
            exact.append(g.t() @ rows)
            errors.append(layer.weight.grad.double() - exact[-1])
    squares = [sum(e.square().sum().item() for e in of) for of in (errors, exact)]
    inner = sum((e * g).sum().item() for e, g in zip(errors, exact, strict=True))
    if of_input:  # what adds up over steps: g_x^T x
        errors, exact = ([e.t() @ x.reshape(-1, x.shape[-1]).double() for e, (x, _) in zip(of, batches, strict=True)]
                         for of in (errors, exact))  # fmt: skip
    total = [sum(of).norm().item() for of in (errors, exact)]
    each = sum(e.square().sum().item() for e in errors)
    return {
        "error": math.sqrt(squares[0] / squares[1]),
        "shrinkage": inner / squares[1],
        "accumulated": total[0] / total[1],
        "repeated": total[0] ** 2 / (len(errors) * each),
    }


@pytest.mark.parametrize("of_input, candidates", [(True, GRAD_INPUTS), (False, KEPT_INPUTS)], ids=["g_x", "g_w"])
def test_scores_are_those_of_the_layer(of_input, candidates):
    """Every candidate, against the gradients that a layer patched so gives, in float64; a batch of 37 tokens."""
    layer = nn.Linear(48, 72)
    mean = torch.randn(2, 37, 72) + torch.linspace(-2, 2, 37)[:, None]
    batches = [(torch.randn(2, 37, 48) + 1, mean + torch.randn(2, 37, 72)) for _ in range(3)]
    probe = measured(layer, batches)
    sums = probe.input_sums if of_input else probe.weight_sums
    assert probe.recorded == 3
    for i, candidate in enumerate(candidates):
        score, want = sums.score(i, 3), by_hand(layer, batches, candidate.settings, of_input)
        assert score.error == pytest.approx(want["error"], rel=1e-4), candidate  # float32 sums
        assert score.shrinkage == pytest.approx(want["shrinkage"], rel=1e-3, abs=1e-5), candidate
        assert score.accumulated == pytest.approx(want["accumulated"], rel=SKETCHED), candidate
        assert score.repeated == pytest.approx(want["repeated"], rel=2 * SKETCHED), candidate  # squares


@pytest.mark.parametrize("shape", [(1021, 1021), (64, 1000), (33, 5000)])
def test_sketches_keep_norms(shape):
    """Also of low rank, and with all of it in one column."""
    sketch = Sketch(*shape, torch.device("cpu"))
    column = torch.zeros(shape)
    column[:, shape[1] // 3] = 10 * torch.randn(shape[0])
    outer = torch.randn(shape[0], 1) @ torch.randn(1, shape[1])
    for matrix in (torch.randn(shape), outer, column, column + torch.randn(shape)):
        assert sketch(matrix).norm().item() == pytest.approx(matrix.norm().item(), rel=SKETCHED)


def test_projected_features_keep_products():
    """|e^T x| through 127 signed sums of x's features: relative deviation at most sqrt(2 / 127) / 2 = 6%."""
    x, e = torch.randn(200, 700), torch.randn(200, 40)
    e = e + x[:, :40]
    want = (e.t() @ x).norm().item()
    assert (e.t() @ project_features(x)).norm().item() == pytest.approx(want, rel=0.3)
    assert project_features(x).shape == (200, 127) and project_features(x[:, :50]).shape == (200, 50)


def test_long_batches_are_sampled_in_whole_blocks():
    rows = torch.arange(5000.0)[:, None]
    kept = sample(rows)[:, 0]
    assert len(kept) <= MAX_TOKENS and torch.equal(sample(rows[:100]), rows[:100])
    blocks = kept.view(-1, 16)
    assert torch.equal(blocks, blocks[:, :1] + torch.arange(16.0)) and not (blocks[:, 0] % 16).any()
    assert blocks[0, 0] == 0 and blocks[-1, 0] > 4800
    assert len(sample(torch.ones(1025, 1))) in (1024, 1009)  # the last block may be the ragged one


@pytest.mark.parametrize("make", [tiny_llama, tiny_vit])
def test_exact_while_measuring(make):
    """Losses and gradients of the first lqs_batches micro-batches are exact training's, bit by bit; the global random
    state is untouched; afterwards they are not."""
    plain = make().train()
    model = twin(plain)
    apply_hot(model, HOTConfig(**BUDGET, lqs_batches=2))
    text = make is tiny_llama
    inputs = [token_batch() if text else image_batch() for _ in range(3)]
    for step, batch in enumerate(inputs):
        state = torch.random.get_rng_state()
        losses = [m(**batch).loss for m in (plain, model)]
        for m, loss in zip((plain, model), losses, strict=True):
            m.zero_grad()
            loss.backward()
        assert torch.equal(torch.random.get_rng_state(), state)
        assert torch.equal(*losses)
        same = all(torch.equal(value, grads(model)[name]) for name, value in grads(plain).items())
        assert same == (step < 2)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant):
    """C37: measured once per backward, the same as without; what is measured stays among what checkpointing drops."""
    plain = mlp(32, 48, 32)
    apply_hot(plain, HOTConfig(**BUDGET, lqs_batches=3))
    model = twin(plain)
    for step in range(3):
        x = torch.randn(20, 32)
        plain(x.clone().requires_grad_()).square().sum().backward()
        checkpoint(model, x.clone().requires_grad_(), use_reentrant=reentrant).square().sum().backward()
        assert model[0].hot.probe.recorded == step + 1
        assert all(torch.equal(value, grads(model)[name]) for name, value in grads(plain).items())
    for a, b in ((plain[0], model[0]), (plain[2], model[2])):
        assert torch.equal(a.hot.probe.weight_sums.vector(), b.hot.probe.weight_sums.vector())
        assert torch.equal(a.hot.probe.input_sums.vector(), b.hot.probe.input_sums.vector())
    assert fix_selection(plain) == fix_selection(model)


def test_what_cannot_be_measured_is_left_alone():
    """An overflow step, an empty batch, torch.func transforms: gradients as they should be, nothing recorded."""
    model = mlp(32, 48)
    plain = twin(model)
    apply_hot(model, HOTConfig(**BUDGET, lqs_batches=9))
    g = torch.randn(8, 48)
    g[1, 2] = torch.inf
    x = torch.randn(8, 32)
    model(x).backward(g)
    model(torch.randn(0, 32)).sum().backward()
    probe = model[0].hot.probe
    assert probe.recorded == 0 and not probe.weight_sums.vector().any()

    def loss(weights, of, x):
        return torch.func.functional_call(of, weights, (x,)).square().sum()

    for m in (model, plain):
        m.zero_grad()
    found, want = (torch.func.vmap(torch.func.grad(loss), in_dims=(None, None, 0))(
        {n: p.detach() for n, p in plain.named_parameters()}, m, x) for m in (model, plain))  # fmt: skip
    assert all(torch.equal(found[n], want[n]) for n in want) and probe.recorded == 0


def test_changes_in_place_after_a_measured_layer():
    """C38."""
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(inplace=True), nn.Linear(48, 8))
    plain, x = twin(model), torch.randn(8, 32)
    apply_hot(model, HOTConfig(**BUDGET))
    for m in (model, plain):
        m(x).add_(1).square().sum().backward()
    assert all(torch.equal(value, grads(model)[name]) for name, value in grads(plain).items())


def test_copies_measure_on_their_own():
    """A deep copy made while measuring goes on by itself, its layers together."""
    model = mlp(32, 24, 24)
    apply_hot(model, HOTConfig(**BUDGET, lqs_batches=2))
    model(torch.randn(8, 32)).square().sum().backward()
    other = copy.deepcopy(model)
    other(torch.randn(8, 32)).square().sum().backward()
    assert (model[0].hot.probe.recorded, other[0].hot.probe.recorded) == (1, 2)
    other(torch.randn(8, 32))
    assert other[0].hot.probe is None and other[2].hot.probe is None and model[0].hot.probe.budget.choices is None


def test_what_is_not_measured(seed):
    """Overrides stay what the user wrote, also exact ones; an exact configuration is measured all the same; a layer
    without gradients keeps the configured plan."""
    model = mlp(32, 48, 48, 48)
    model.append(nn.Linear(5, 64))  # never called
    config = HOTConfig(
        **BUDGET, lqs_batches=1, grad_input_bits=None, activation_format="none",
        overrides={"2": {"activation_format": "int8"}, "4": {"rank": 3}},
    )  # fmt: skip
    report = apply_hot(model, config)
    assert report.skipped["4"] == "configured exact"
    model[:5](torch.randn(64, 32)).square().sum().backward()
    chosen = fix_selection(model)
    assert set(chosen) == {"0", "5"}
    assert chosen["0"].activation_format != "none" and chosen["5"] == config.plan()
    assert model[2].hot.plan.activation_format == "int8"

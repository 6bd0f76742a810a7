"""A patched nn.Linear beside its exact twin: without gradients, with some of them, under autocast and a GradScaler."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from hot_hf import HOTConfig, apply_hot
from hot_hf.memory import SavedTensors
from tests.linear import (
    FLOATS,
    FORMAT_NAMES,
    INT8_AUTOCAST,
    INT8_PRODUCT,
    NEAR,
    assert_near,
    leaf,
    pair,
    same_leaf,
)
from tests.models import grads, mlp, relative_error, twin

# Gradients of 1e-6 in float16, whose steps are 6e-8 below 6e-5: results sit on that grid, a few per cent of their norm.
FLOAT16_GRID = 0.1


def _count_ops(monkeypatch):
    """Names of the quantizing operators that are called."""
    from hot_hf import ops

    calls = []
    both = ("grad_input", "grad_weight")
    for name in ("compress", *both, "grad_both"):
        names = both if name == "grad_both" else (name,)
        if (original := getattr(ops, name, None)) is not None:
            monkeypatch.setattr(ops, name, lambda *a, o=original, n=names, **k: (calls.extend(n), o(*a, **k))[1])
    return calls


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_happens_without_gradients(mode, monkeypatch):
    """C39: bit-exact F.linear, nothing quantized or kept; training afterwards works."""
    calls = _count_ops(monkeypatch)
    model, exact = pair(40, 64, 24)
    x = torch.randn(18, 40)
    for training in (False, True):
        model.train(training)
        with mode(), SavedTensors(model) as saved:
            y = model(x)
        assert torch.equal(y, exact(x)) and not y.requires_grad
        assert saved.total_bytes == 0 and not calls
    for m in (model, exact):
        m.requires_grad_(False)
    assert torch.equal(model(x), exact(x)) and not calls
    for m in (model, exact):
        m.requires_grad_(True)
        m(x).square().sum().backward()
    assert calls.count("compress") == 2 and calls.count("grad_weight") == 2 and calls.count("grad_input") == 1
    assert_near(model, exact)


def test_inference_tensor_as_training_input():
    """C39: a batch made under inference_mode cannot be saved, by nn.Linear either; its packed copy can."""
    model, exact = pair(40, 24)
    with torch.inference_mode():
        x = torch.randn(18, 40)
    model(x).square().sum().backward()
    exact(x.clone()).square().sum().backward()
    assert_near(model, exact)


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3)))
@pytest.mark.parametrize("fmt", [*FORMAT_NAMES, "none"])
def test_needs_grad_combinations(needs, fmt, monkeypatch):
    """C40: None where not needed; a frozen weight keeps nothing of x; a lone bias needs no quantizer."""
    calls = _count_ops(monkeypatch)
    model, _ = pair(64, 48, activation_format=fmt)
    layer = model[0]
    x = torch.randn(96, 64, requires_grad=needs[0])
    layer.weight.requires_grad_(needs[1])
    layer.bias.requires_grad_(needs[2])
    with SavedTensors(model) as saved:
        y = model(x)
    assert y.requires_grad == any(needs)
    if any(needs):
        y.square().sum().backward()
    for tensor, needed in zip((x, layer.weight, layer.bias), needs, strict=True):
        assert (tensor.grad is not None) == needed
        assert not needed or tensor.grad.any()
    if not needs[1]:
        assert saved.hot_bytes == 0 and "compress" not in calls and "grad_weight" not in calls
    elif fmt != "none":
        assert 0 < saved.hot_bytes <= x.nbytes / 4 + 4 * 96
        assert calls.count("compress") == 1
    if not needs[0]:
        assert "grad_input" not in calls


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("fmt", [*FORMAT_NAMES, "none"])
def test_autocast(fmt, dtype, autocast):
    """C34: under CPU autocast the output is nn.Linear's, and every gradient has the dtype of its tensor."""
    exact = mlp(64, 64, 20, dtype=dtype)  # the second layer stays exact: narrower than 64
    for bits in (8, None):
        model = twin(exact)
        apply_hot(model, HOTConfig(activation_format=fmt, grad_input_bits=bits, min_features=64))
        x = leaf(18, 64, dtype=dtype)
        x_exact = same_leaf(x)
        outputs = []
        for m, inner in ((model, x), (exact, x_exact)):
            m.zero_grad()
            with torch.autocast("cpu", autocast):
                outputs.append(m(inner))
                loss = outputs[-1].float().square().sum()
            loss.backward()
        assert torch.equal(*outputs) and outputs[0].dtype == outputs[1].dtype
        assert x.grad.dtype == dtype
        for parameter in model.parameters():
            assert parameter.grad.dtype == parameter.dtype
        assert relative_error(x.grad, x_exact.grad) < INT8_AUTOCAST
        if fmt in NEAR:
            assert relative_error(model[0].weight.grad, exact[0].weight.grad) < max(NEAR[fmt], INT8_AUTOCAST)


def test_backward_inside_autocast():
    """C34: with autocast on in the backward, whether or not it was in the forward, the gradients are the same bits."""
    for forward, settings in itertools.product(
        (False, True), ({"grad_input_bits": None, "activation_format": "int8"}, {"activation_format": "none"}, {})
    ):
        model, _ = pair(64, 48, **settings)
        x, results = leaf(18, 64), []
        for backward in (False, True):
            model.zero_grad()
            x.grad = None
            with torch.autocast("cpu", torch.bfloat16, enabled=forward):
                loss = model(x).float().square().sum()
            with torch.autocast("cpu", torch.bfloat16, enabled=backward):
                loss.backward()
            results.append([x.grad, *grads(model).values()])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_autocast_cache_is_not_poisoned():
    """C34: autocast caches the cast weight. Made inside the layer's Function, where no graph is recorded, that copy
    would be handed to whatever uses the weight next in the same context, whose gradient would be lost."""
    model, exact = pair(64, 64, activation_format="int8")
    x, upstream = torch.randn(18, 64), torch.randn(18, 64)
    for m in (model, exact):
        with torch.autocast("cpu", torch.bfloat16):
            hidden = m(x).detach()  # first, and without a gradient of its own: all of it comes from outside the layer
            loss = ((F.linear(x, m[0].weight) + hidden).float() * upstream).sum()
        loss.backward()
    assert torch.equal(model[0].weight.grad, exact[0].weight.grad) and model[0].weight.grad.any()


@pytest.mark.parametrize("order", [1, -1], ids=["layer first", "layer last"])
def test_a_weight_used_inside_and_outside_its_layer(order):
    """C34: under autocast the gradients of both uses add up, whichever comes first."""
    model, exact = pair(64, 64, activation_format="int8")
    x, upstream = torch.randn(18, 64), torch.randn(18, 64)
    for m in (model, exact):
        uses = [lambda m=m: m(x), lambda m=m: 2 * F.linear(x, m[0].weight)]
        with torch.autocast("cpu", torch.bfloat16):
            first, second = (use() for use in uses[::order])
            loss = ((first + second).float() * upstream).sum()
        loss.backward()
    # The layer's share of the gradient is a third; the other's is exact. Without either the error would be 0.3 or more.
    assert relative_error(model[0].weight.grad, exact[0].weight.grad) < INT8_PRODUCT / 2


def test_float16_gradient_scaling():
    """C11: g times 1e-6 in float16, and activations near 6e4: finite and near."""
    model, exact = pair(64, 48, dtype=torch.float16, activation_format="int8")
    x = leaf(32, 64, dtype=torch.float16)
    upstream = (torch.randn(32, 48) * 1e-6).half()
    x_exact = same_leaf(x)
    model(x).backward(upstream)
    exact(x_exact).backward(upstream)
    assert relative_error(x.grad, x_exact.grad) < FLOAT16_GRID
    assert_near(model, exact, FLOAT16_GRID)
    large = (torch.randn(32, 64).sign() * 6e4).half()
    model.zero_grad()
    (model(large).float() * 1e-6).sum().backward()
    assert model[0].weight.grad.isfinite().all() and model[0].weight.grad.any()


def test_grad_scaler():
    """spec.md, section 6: a float16 GradScaler sees the overflow of its scale, skips the step and recovers."""
    model, _ = pair(64, 48, 24, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    x, before = torch.randn(32, 64), [p.detach().clone() for p in model.parameters()]
    scales = []
    for _ in range(40):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        changed = [not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
        assert any(changed) == (len(scales) > 1 and scales[-1] == scales[-2])
        if any(changed):
            break
    assert all(changed) and all(p.isfinite().all() for p in model.parameters()) and len(scales) > 2

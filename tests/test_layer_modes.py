"""A patched nn.Linear beside its exact twin: without gradients, with some of them, under autocast and a GradScaler."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from hot_hf import HOTConfig, apply_hot
from hot_hf.memory import SavedTensors
from tests.linear import FLOATS, FORMAT_NAMES, NEAR, assert_near, leaf, pair, same_leaf
from tests.models import grads, mlp, relative_error, twin


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
        # Eight bits of mantissa in bfloat16 products: 2^-9 an entry, averaged.
        assert relative_error(x.grad, x_exact.grad) < 0.03
        if fmt in NEAR:
            assert relative_error(model[0].weight.grad, exact[0].weight.grad) < max(NEAR[fmt], 0.02)


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
    """C34: a weight that is also used outside its layer gets its gradient although autocast caches the cast weight."""
    model, exact = pair(64, 64, activation_format="int8")
    x = torch.randn(18, 64)
    for m in (model, exact):
        with torch.autocast("cpu", torch.bfloat16):
            loss = (F.linear(x, m[0].weight) * m(x).detach()).float().sum()
            loss = loss + (m(x) * F.linear(x, m[0].weight)).float().sum()
        loss.backward()
    # Both weight gradients round g to 7 bits.
    assert relative_error(model[0].weight.grad, exact[0].weight.grad) < 0.03


def test_float16_gradient_scaling():
    """C11: g times 1e-6 in float16, and activations near 6e4: finite and near."""
    model, exact = pair(64, 48, dtype=torch.float16, activation_format="int8")
    x = leaf(32, 64, dtype=torch.float16)
    upstream = (torch.randn(32, 48) * 1e-6).half()
    x_exact = same_leaf(x)
    model(x).backward(upstream)
    exact(x_exact).backward(upstream)
    # float16 steps of 6e-8 below 6e-5: both results sit on that grid, whose share of their norm is a few per cent.
    assert relative_error(x.grad, x_exact.grad) < 0.1
    assert_near(model, exact, 0.1)
    large = (torch.randn(32, 64).sign() * 6e4).half()
    model.zero_grad()
    (model(large).float() * 1e-6).sum().backward()
    assert model[0].weight.grad.isfinite().all() and model[0].weight.grad.any()


def test_grad_scaler():
    """SPEC section 6: a float16 GradScaler sees the overflow of its scale, skips the step and recovers."""
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

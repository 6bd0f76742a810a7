"""Mixed precision and numerical modes: CPU autocast, GradScaler, deterministic algorithms, TF32."""

import math

import pytest
import torch
from torch import nn

from hot_hf import HOTConfig, apply_hot
from tests.models import cosine, grads, mlp, tiny_llama, token_batch, twin, whole

PRESETS = ["default", "fast", "smallest"]


def patched_pair(preset: str = "default", model=None, **settings):
    model = tiny_llama(layers=1) if model is None else model
    exact = twin(model)
    apply_hot(model, HOTConfig.from_preset(preset, **settings))
    return model, exact


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(preset, dtype):
    """C34: the forward is bit for bit autocast's own, the backward runs outside the context too, gradients are near."""
    model, exact = patched_pair(preset)
    batch = token_batch(rows=4, length=32)
    losses = []
    for m in (model, exact):
        with torch.autocast("cpu", dtype):
            loss = m(**batch).loss
        loss.backward()
        losses.append(loss)
    assert torch.equal(*losses)
    assert all(grad.dtype == torch.float32 for grad in grads(model).values())
    # Over all weights: INT8 with ht_int4 has 0.976 in its worst layer (spec.md); the low-rank formats drop half
    # of the sequencies and have 0.75 on text, sqrt(1/2) on tokens without any order. A small layer scatters around it.
    assert cosine(whole(grads(model)), whole(grads(exact))) > (0.97 if preset == "default" else 0.6)


@pytest.mark.parametrize("preset", PRESETS)
def test_autocast_left_on_in_the_backward(preset):
    """C34: integer and float products run in the types chosen for them: the same bits with the caller's autocast on."""
    results = []
    model, _ = patched_pair(preset)
    batch = token_batch()
    for inside in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch).loss
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        results.append(grads(model))
    # Autograd's own formulas take the types of their tensors; HOT's must too, or 4-bit roundings would differ.
    for name, value in results[0].items():
        assert torch.equal(results[1][name], value), name


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_grad_scaler_sees_overflow(preset, bad):
    """An overflow skips the step and halves the scale as without HOT; the step after it trains."""
    model = mlp(64, 128, 64)
    model, exact = patched_pair(preset, model)
    for m in (model, exact):
        torch.manual_seed(7)
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
        before = [p.detach().clone() for p in m.parameters()]
        moved, scales = [], []
        for overflow in (True, False):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                y = m(torch.randn(40, 64))
            loss = y.float().square().mean()
            if overflow:
                y.register_hook(lambda g: torch.where(torch.arange(g.numel()).view_as(g) == 5, bad, g))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            moved.append(any(not torch.equal(a, b) for a, b in zip(before, m.parameters(), strict=True)))
        assert moved == [False, True]
        assert scales == [512.0, 512.0]


def test_scaled_gradients_are_the_gradients_scaled():
    """A power of two as loss scale changes no integer: after unscaling the gradients are equal bit for bit."""
    model, _ = patched_pair(model=mlp(64, 128, 64))
    x, results = torch.randn(40, 64), []
    for scale in (1.0, 2.0**12):
        model.zero_grad()
        (model(x).square().mean() * scale).backward()
        results.append({n: g / scale for n, g in grads(model).items()})
    for name, value in results[0].items():
        assert torch.equal(results[1][name], value), name


def test_a_bfloat16_model():
    """bfloat16 weights: gradients in bfloat16, near those of the exact model."""
    model, exact = patched_pair(model=tiny_llama(layers=1).bfloat16())
    batch = token_batch(rows=4, length=32)
    for m in (model, exact):
        m(**batch).loss.backward()
    for name, value in grads(exact).items():
        assert grads(model)[name].dtype == torch.bfloat16
        assert cosine(grads(model)[name], value) > 0.97, name


@pytest.mark.parametrize("preset", [*PRESETS, "paper"])
def test_deterministic_algorithms(preset):
    """The mode raises for operators that have no deterministic form: HOT uses none, and repeats bit for bit."""
    settings = {"grad_input_granularity": "per_tensor"} if preset == "paper" else {}
    model, _ = patched_pair(preset, **settings)
    batch, results = token_batch(), []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            model.zero_grad()
            model(**batch).loss.backward()
            results.append(grads(model))
    finally:
        torch.use_deterministic_algorithms(False)
    for name, value in results[0].items():
        assert torch.equal(results[1][name], value), name


def test_numerical_switches_stay_as_they_were():
    """HOT reads and sets none of the process-wide switches: float32 precision, TF32, determinism, default type."""

    def switches():
        return (
            torch.get_float32_matmul_precision(),
            torch.backends.cuda.matmul.allow_tf32,
            torch.backends.cudnn.allow_tf32,
            torch.are_deterministic_algorithms_enabled(),
            torch.get_default_dtype(),
            torch.is_autocast_enabled("cpu"),
        )

    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "high", "medium"):
            torch.set_float32_matmul_precision(precision)
            state = switches()
            model, exact = patched_pair(model=nn.Sequential(nn.Linear(64, 64)))
            x = torch.randn(17, 64)
            assert torch.equal(model(x), exact(x))  # the forward is the exact one, in whatever precision is set
            model(x).square().sum().backward()
            assert switches() == state
    finally:
        torch.set_float32_matmul_precision(before)

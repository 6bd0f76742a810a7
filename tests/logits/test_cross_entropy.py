"""The chunked cross-entropy against the plain one in float64."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from hot_hf.logits import cross_entropy
from hot_hf.logits.cross_entropy import Projection, chunks, linear_cross_entropy

# Sums over tokens and over the vocabulary in another order, and for low precision one more rounding of a gradient's
# sum per chunk (8 here): a few times the type's own step.
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
TOKENS, VOCABULARY, FEATURES = 61, 130, 24


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks of at most 8 tokens, so that there are several and the last one is shorter."""
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 4 * VOCABULARY * 8)


def sample(dtype=torch.float32, bias=True):
    """Hidden states, head and targets, a third of which is ignored."""
    hidden, weight = torch.randn(TOKENS, FEATURES), torch.randn(VOCABULARY, FEATURES)
    target = torch.where(torch.rand(TOKENS) < 0.33, -100, torch.randint(VOCABULARY, (TOKENS,)))
    parts = (hidden, weight, torch.randn(VOCABULARY) if bias else None)
    return [None if p is None else p.to(dtype).requires_grad_() for p in parts], target


def reference(parts, target, step=lambda t: t, factor=1.0, **options):
    """Loss and gradients in float64 of the values as they are."""
    exact = [None if p is None else p.detach().double().requires_grad_(p.requires_grad) for p in parts]
    loss = F.cross_entropy(step(F.linear(*exact)), target, **options)
    (loss * factor).backward()
    return loss, [None if p is None else p.grad for p in exact]


def close(value, exact, dtype):
    """Relative to the largest entry."""
    if exact is None:
        return value is None
    return (value.double() - exact).abs().max() <= CLOSE[dtype] * exact.abs().max()


def test_chunks_are_even_and_whole():
    for tokens in range(1, 60):
        parts = list(chunks(tokens, VOCABULARY))
        assert [i for p in parts for i in range(p.start, p.stop)] == list(range(tokens))
        sizes = [p.stop - p.start for p in parts]
        assert max(sizes) <= 8 and max(sizes) - min(sizes[:-1], default=max(sizes)) <= 1


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("bias", [True, False])
def test_loss_and_gradients(dtype, reduction, bias):
    parts, target = sample(dtype, bias)
    project = Projection.at(parts[0])
    if dtype.itemsize < 4:
        project = project.then(lambda t: t.float(), torch.float32)
    loss = linear_cross_entropy(*parts, target, project, reduction=reduction)
    loss.backward()
    want, grads = reference(parts, target, reduction=reduction)
    assert close(loss.detach(), want.detach(), dtype)
    for part, grad in zip(parts, grads, strict=True):
        assert part is None or (part.grad.dtype == dtype and close(part.grad, grad, dtype))


@pytest.mark.parametrize("needs", list(itertools.product([True, False], repeat=3))[:-1])
def test_only_what_is_needed(needs):
    """C40: a frozen head, a frozen body: None where nothing is asked for."""
    parts, target = sample()
    for part, need in zip(parts, needs, strict=True):
        part.requires_grad_(need)
    linear_cross_entropy(*parts, target, Projection.at(parts[0])).backward()
    _, grads = reference(parts, target)
    assert all(close(p.grad, g, torch.float32) for p, g in zip(parts, grads, strict=True))


@pytest.mark.parametrize(
    "step", [lambda t: 30 * torch.tanh(t / 30), lambda t: t * 0.25, lambda t: t / 3 + 1], ids=["cap", "scale", "both"]
)
def test_steps_between_head_and_loss(step):
    parts, target = sample()
    project, target = Projection.at(parts[0]).then(step, torch.float32), target.clamp(min=0)
    linear_cross_entropy(*parts, target, project, ignore_index=7).backward()
    _, grads = reference(parts, target, step, ignore_index=7)
    assert all(close(p.grad, g, torch.float32) for p, g in zip(parts, grads, strict=True))


def test_a_target_outside_the_vocabulary_is_refused():
    """As the plain loss does, by the same error; any other value than the ignored one counts."""
    parts, target = sample()
    for bad, ignored in ((target, 7), (torch.full_like(target, VOCABULARY), -100)):
        for loss in (lambda *a, **k: F.cross_entropy(F.linear(*parts), *a, **k), None):
            with pytest.raises(IndexError, match="out of bounds"):
                if loss is None:
                    linear_cross_entropy(*parts, bad, Projection.at(parts[0]), ignore_index=ignored)
                else:
                    loss(bad, ignore_index=ignored)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_token_counts(reduction):
    """C04: the plain loss is NaN (a mean) or 0 (a sum); gradients are zeros, not NaN."""
    parts, target = sample()
    target = torch.full_like(target, -100)
    loss = linear_cross_entropy(*parts, target, Projection.at(parts[0]), reduction=reduction)
    assert loss.isnan() if reduction == "mean" else loss == 0
    loss.backward()
    assert all((p.grad == 0).all() for p in parts)


def test_scaled_and_repeated_backwards():
    """Accumulation and a GradScaler multiply the loss; ``retain_graph`` runs the backward twice; sums come out."""
    parts, target = sample()
    loss = linear_cross_entropy(*parts, target, Projection.at(parts[0]))
    (loss * 7).backward(retain_graph=True)
    (loss * -3).backward()
    _, grads = reference(parts, target, factor=4.0)
    assert all(close(p.grad, g, torch.float32) for p, g in zip(parts, grads, strict=True))


def test_small_gradients_survive_float16():
    """Of a mean over many tokens an entry is far below float16's smallest number; a GradScaler brings it back, as it
    does for the plain loss."""
    hidden = (1e-2 * torch.randn(4096, FEATURES)).half().requires_grad_()
    weight = torch.randn(VOCABULARY, FEATURES).half().requires_grad_()
    target = torch.randint(VOCABULARY, (4096,))
    project = Projection.at(hidden).then(lambda t: t.float(), torch.float32)
    (linear_cross_entropy(hidden, weight, None, target, project) * 2**16).backward()
    _, grads = reference([hidden, weight, None], target, factor=2.0**16)
    assert close(hidden.grad, grads[0], torch.float16) and close(weight.grad, grads[1], torch.float16)


def test_what_is_kept():
    """Hidden states, their gradients, head and targets: what a chunk's own graph saves is nobody's business."""
    parts, target = sample()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.shape), t)[1], lambda t: t):
        linear_cross_entropy(*parts, target, Projection.at(parts[0])).backward()
    assert sorted(map(tuple, kept)) == sorted(map(tuple, [*(p.shape for p in parts), target.shape, (), parts[0].shape]))


def test_nothing_is_tokens_times_vocabulary(monkeypatch):
    """No tensor that the loss makes, or keeps, is larger than a chunk's logits."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else [out]:
                largest = max(largest, t.numel() if isinstance(t, torch.Tensor) else 0)
            return out

    parts, target = sample()
    with Watch():
        linear_cross_entropy(*parts, target, Projection.at(parts[0])).backward()
    assert largest == VOCABULARY * FEATURES < TOKENS * VOCABULARY

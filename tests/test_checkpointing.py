"""Checkpointing as training code uses it: every n-th layer, offloaded, selective, without early stop; what it keeps."""

import pytest
import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from hot_hf import HOTConfig, apply_hot
from hot_hf.memory import SavedTensors
from tests.models import grads, mlp, tiny_llama, token_batch, twin

FORMATS = ["ht_int4", "hla_int8", "none"]


def pair(fmt: str = "ht_int4", layers: int = 4, **settings):
    model = tiny_llama(layers=layers)
    apply_hot(model, HOTConfig(activation_format=fmt, compress="inputs", **settings))
    return model.train(), twin(model).train()


def step(model, batch) -> None:
    model.zero_grad()
    model(**batch).loss.backward()


def assert_equal(found, expected) -> None:
    """Bit for bit: a recompute runs the same operations on the same numbers."""
    assert found.keys() == expected.keys() and expected
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_every_second_layer_and_accumulation(reentrant, rounding):
    """C37, C30: two micro-batches accumulated over two steps, every second layer recomputed."""
    model, plain = pair(rounding=rounding)
    model.activation_checkpointing_enable({"use_reentrant": reentrant}, every_n_layers=2)
    model.enable_input_require_grads()
    assert [layer.gradient_checkpointing for layer in model.model.layers].count(True) == 2
    for _ in range(2):
        batches = [token_batch(length=n) for n in (24, 19)]
        for m in (model, plain):
            m.zero_grad()
            for batch in batches:
                m(**batch).loss.backward()
        assert_equal(grads(model), grads(plain))


@pytest.mark.parametrize("fmt", FORMATS)
def test_offloaded(fmt):
    """Packed tensors travel through saved-tensor hooks like any other; with checkpointing and without."""
    model, plain = pair(fmt, layers=2)
    batch = token_batch()
    step(plain, batch)
    for checkpointed in (False, True):
        if checkpointed:
            model.activation_checkpointing_enable({"use_reentrant": False})
        with save_on_cpu():
            step(model, batch)
        assert_equal(grads(model), grads(plain))


@pytest.mark.parametrize("fmt", FORMATS)
def test_without_early_stop(fmt):
    """The recompute runs to the end and may save what the forward saved, no more."""
    model, plain = pair(fmt, layers=2)
    model.activation_checkpointing_enable({"use_reentrant": False})
    batch = token_batch()
    step(plain, batch)
    with set_checkpoint_early_stop(False):
        step(model, batch)
    assert_equal(grads(model), grads(plain))


def test_selective_checkpointing_can_keep_the_packed_tensors():
    """A policy sees hot_hf::compress as an operator: kept, it runs once; recomputed, twice."""
    runs = {}
    model = mlp(64, 128, 64)
    apply_hot(model, HOTConfig())
    plain = twin(model)
    x = torch.randn(33, 64)
    plain(x.clone().requires_grad_()).square().sum().backward()
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            runs[keep] = runs.get(keep, 0) + (func is torch.ops.hot_hf.compress.default)
            return func(*args, **(kwargs or {}))

    for keep in (True, False):
        saved = [torch.ops.hot_hf.compress.default] if keep else []

        def policy(ctx, op, *args, saved=saved, **kwargs):
            return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

        model.zero_grad()
        with Counting():
            y = checkpoint(
                model,
                x.clone().requires_grad_(),
                use_reentrant=False,
                context_fn=lambda policy=policy: create_selective_checkpoint_contexts(policy),
            )
            y.square().sum().backward()
        assert_equal(grads(model), grads(plain))
    assert runs == {True: 2, False: 4}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_sequential(reentrant):
    model = mlp(64, 128, 128, 64)
    apply_hot(model, HOTConfig())
    plain = twin(model)
    x = torch.randn(33, 64)
    checkpoint_sequential(model, 2, x.clone().requires_grad_(), use_reentrant=reentrant).square().sum().backward()
    plain(x.clone().requires_grad_()).square().sum().backward()
    assert_equal(grads(model), grads(plain))


def test_a_checkpointed_layer_keeps_its_input_alone():
    """Bytes kept by patched layers between forward and backward: none under checkpointing, few without it."""
    model, plain = pair(layers=2)
    model.activation_checkpointing_enable({"use_reentrant": False})
    batch = token_batch()
    kept = []
    for m in (model, plain):
        with SavedTensors(m) as saved:
            m(**batch)
        kept.append((saved.hot_bytes, saved.total_bytes))
    (checkpointed, total), (packed, plain_total) = kept
    assert checkpointed == 0 < packed
    assert total < plain_total

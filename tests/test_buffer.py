"""One packed copy per tensor: when it is shared, when it must not be, and that it dies with its graph."""

import gc
import threading
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from hot_hf import HOTConfig, apply_hot, buffer, gradients
from hot_hf.memory import SavedTensors
from hot_hf.ops import FORMATS
from hot_hf.plan import Plan
from tests.models import grads, relative_error, tiny_llama, token_batch, twin

ROUNDINGS = ["nearest", "stochastic", "pseudo_stochastic"]


class Readers(nn.Module):
    """Layers that read one tensor, each through ``between`` (x, i)."""

    def __init__(self, count: int = 3, between=lambda x, i: x) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 48) for _ in range(count))
        self.between = between

    def forward(self, x):
        return sum((layer(self.between(x, i)) * (i + 1)) for i, layer in enumerate(self.layers))


def siblings(share=True, count=3, between=lambda x, i: x, **settings) -> Readers:
    model = Readers(count, between)
    apply_hot(model, HOTConfig(share=share, min_features=1, **settings))
    return model


def kept_copies(model, x) -> float:
    """Packed copies of x among what is saved, by distinct storage."""
    one = Readers(1)
    apply_hot(one, model.layers[0].hot.config)
    with SavedTensors(one) as saved:
        one(x.detach())
    single = saved.hot_bytes
    with SavedTensors(model) as saved:
        y = model(x)
    y.sum().backward()
    return saved.hot_bytes / single


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("fmt", list(FORMATS))
def test_siblings_keep_one_copy(fmt, rounding):
    """spec.md, section 4: q, k and v keep one packed copy; without sharing three."""
    x = torch.randn(32, 64)
    assert kept_copies(siblings(activation_format=fmt, rounding=rounding), x) == 1
    assert kept_copies(siblings(False, activation_format=fmt, rounding=rounding), x) == 3
    x.requires_grad_()
    assert kept_copies(siblings(activation_format=fmt, rounding=rounding), x) == 1


@pytest.mark.parametrize("fmt", list(FORMATS))
def test_sharing_changes_no_bit(fmt):
    """Gradients with and without sharing are the same bits."""
    model = siblings(activation_format=fmt)
    other = twin(model)
    for layer in other.layers:
        layer.hot.config = replace(layer.hot.config, share=False)
    for x in (torch.randn(32, 64), torch.randn(3, 7, 64, requires_grad=True)):
        for m in (model, other):
            m(x).square().sum().backward()
        for name, value in grads(model).items():
            assert torch.equal(value, grads(other)[name]), name


def test_llama_blocks_keep_four_tensors():
    """q/k/v, o, gate/up and down: 4 packed inputs a block for 7 layers."""
    model = tiny_llama(2)
    apply_hot(model, HOTConfig(activation_format="ht_int4"))
    with SavedTensors(model) as saved:
        model(**token_batch(2, 16))
    tokens, hidden, inner = 32, 64, 128
    assert saved.hot_bytes == 2 * ((3 * hidden + inner) * tokens // 2 + 4 * 4 * tokens)


def test_encoder_output_is_shared_by_all_decoder_layers():
    """Cross attention's keys and values of every layer read one tensor, with six others between."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=97,
        d_model=64,
        d_kv=16,
        num_heads=4,
        d_ff=128,
        num_layers=1,
        num_decoder_layers=3,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config)
    apply_hot(model, HOTConfig(include=["decoder.*EncDecAttention.[kv]"]))
    ids = torch.randint(97, (2, 16))
    with SavedTensors(model) as saved:
        model(input_ids=ids, labels=ids)
    assert saved.hot_bytes == 32 * 64 // 2 + 4 * 32


def _in_place(x, i):
    return x.mul_(1.5) if i else x


@pytest.mark.parametrize(
    "between",
    [_in_place, lambda x, i: x * (i + 1), lambda x, i: x.clone(), lambda x, i: x.flip(0), lambda x, i: x.detach()],
    ids=["in place", "scaled", "cloned", "flipped", "detached"],
)
def test_other_tensors_are_not_confused(between):
    """A tensor changed in place, or another one at the same address, is compressed anew."""
    model = siblings(between=between, activation_format="int8")
    exact = Readers(3, between)
    exact.load_state_dict(model.state_dict())
    x = torch.randn(32, 64)
    for m in (model, exact):
        # nn.Linear itself refuses an input that was changed after it was saved: its inputs are cloned.
        m.between = (lambda t, i, m=m: between(t, i)) if m is model else (lambda t, i: between(t, i).clone())
        m(x.clone()).square().sum().backward()
    for name, value in grads(exact).items():
        assert relative_error(grads(model)[name], value) < 0.03, name


def test_no_grad_changes_bump_the_version():
    """A static input buffer that is refilled between two readers gives each its own values."""
    model = siblings(count=2, activation_format="int8")
    x, first, second = torch.empty(32, 64), torch.randn(32, 64), torch.randn(32, 64)
    x.copy_(first)
    loss = model.layers[0](x).sum()
    x.copy_(second)
    (loss + model.layers[1](x).sum()).backward()
    for layer, value in zip(model.layers, (first, second), strict=True):
        assert relative_error(layer.weight.grad, torch.ones(48, 32) @ value) < 0.03


def test_other_settings_do_not_share():
    """Two plans for one tensor: two packed forms, each right."""
    model = Readers(2)
    apply_hot(model, HOTConfig(min_features=1, overrides={"layers.1": {"activation_format": "int8"}}))
    x = torch.randn(32, 64)
    with SavedTensors(model) as saved:
        y = model(x)
    assert saved.hot_bytes == 32 * 64 // 2 + 32 * 64 + 2 * 4 * 32
    y.sum().backward()


def _plan_and_input():
    return Plan(), torch.randn(32, 64)


def test_dies_with_its_graph():
    """Nothing holds a packed tensor but the graph: freed at once, and compressed anew afterwards."""
    plan, x = _plan_and_input()
    first = gradients.keep(x, plan, 0, True)
    assert gradients.keep(x, plan, 0, True)[0] is first[0]
    addresses = {id(t) for t in first}
    del first
    gc.collect()
    alive = [
        o
        for o in gc.get_objects()
        if issubclass(type(o), torch.Tensor) and id(o) in addresses and o.dtype == torch.uint8
    ]
    assert not alive
    assert len(buffer._recent.entries) <= buffer.REMEMBERED


def test_packed_tensors_outlive_their_python_objects():
    """The graph alone keeps them: found again through the weak reference, usable after the graph is gone."""
    model = siblings(count=2)
    x = torch.randn(32, 64)
    loss = model.layers[0](x).sum()
    gc.collect()
    packed, scale = gradients.keep(x, model.layers[0].hot.plan, 0, True)
    copies = packed.clone(), scale.clone()
    loss.backward()
    del loss
    gc.collect()
    junk = [torch.full((32, 32), 255, dtype=torch.uint8) for _ in range(50)]
    assert torch.equal(packed, copies[0]) and torch.equal(scale, copies[1]), len(junk)


def test_views_and_reused_addresses():
    """A view is another tensor; an id given out again after its owner died finds nothing."""
    plan, x = _plan_and_input()
    first = gradients.keep(x, plan, 0, True)
    view = gradients.keep(x.view(4, 8, 64), plan, 0, True)
    assert view[0] is not first[0] and torch.equal(view[0], first[0])
    kept = []
    for _ in range(50):  # the allocator hands the same object address out again
        t = torch.randn(32, 64)
        packed, _ = gradients.keep(t, plan, 0, True)
        kept.append(packed)
        assert torch.equal(packed, gradients.keep(t, plan, 0, False)[0])
        del t


def test_threads_do_not_share():
    """Each thread remembers its own: no other thread's tensors are found."""
    plan, x = _plan_and_input()
    first = gradients.keep(x, plan, 0, True)
    others = []
    thread = threading.Thread(target=lambda: others.append(gradients.keep(x, plan, 0, True)))
    thread.start()
    thread.join()
    assert others[0][0] is not first[0] and torch.equal(others[0][0], first[0])


def test_threads_train_side_by_side():
    """Four threads over one model: every thread's gradients are those of a lone run."""
    model = siblings()
    inputs = [torch.randn(32, 64) for _ in range(4)]
    parameters = list(model.parameters())
    expected = [torch.autograd.grad(model(x).square().sum(), parameters) for x in inputs]
    results: dict[int, list] = {}

    def work(i: int) -> None:
        for _ in range(10):
            results[i] = torch.autograd.grad(model(inputs[i]).square().sum(), parameters)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for i in range(4):
        assert all(torch.equal(a, b) for a, b in zip(results[i], expected[i], strict=True))


@pytest.mark.parametrize(
    "hooks",
    [save_on_cpu, lambda: saved_tensors_hooks(lambda t: t.clone(), lambda t: t), lambda: save_on_cpu(pin_memory=False)],
    ids=["save_on_cpu", "cloned", "unpinned"],
)
def test_offloading_hooks(hooks):
    """spec.md, section 4: saved-tensor hooks see the packed tensors; gradients are the same bits under them."""
    model = siblings()
    other = twin(model)
    x = torch.randn(32, 64, requires_grad=True)
    with hooks():
        loss = model(x).square().sum()
    loss.backward()
    other(x.detach().requires_grad_()).square().sum().backward()
    for name, value in grads(model).items():
        assert torch.equal(value, grads(other)[name]), name


def test_forward_without_backward():
    """C54: graphs that are dropped leave nothing behind."""
    model = siblings()

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    model(torch.randn(32, 64))
    before = tensors()
    for n in range(1, 60):
        model(torch.randn(n, 64))
    assert tensors() <= before  # fewer where an earlier test left something behind

"""Block compression: what is held, in what, and that the gradient is right with it."""

import copy
import gc
import io
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hot_hf import HOTConfig, apply_hot, remove_hot
from hot_hf.block import HOTBlockMixin, find_blocks, hold
from hot_hf.block import context as context_module
from hot_hf.block.context import BlockContext
from hot_hf.block.hold import Exact, Groups, Layout, Recipe, View
from hot_hf.block.kinds import CODECS, Codec
from hot_hf.memory import measure
from tests.models import relative_error, tiny_bert, tiny_llama, tiny_vit, token_batch

INT8 = Codec("int8", 32)
BLOCK, INPUTS = HOTConfig(compress="block"), HOTConfig(compress="inputs")


def step(model, batch, seed=0):
    """Loss and flat gradient of one step, every random number from ``seed``."""
    torch.manual_seed(seed)
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def patched(model, config, **checkpointing):
    model = copy.deepcopy(model)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    return model, apply_hot(model, config)


def llama(**settings):
    return tiny_llama(num_key_value_heads=2, **settings).train(), token_batch(4, 64)


def vit():
    batch = {"pixel_values": torch.randn(16, 1, 8, 8), "labels": torch.randint(10, (16,))}
    return tiny_vit(hidden_dropout_prob=0.1).train(), batch


def bert(**settings):
    ids = torch.randint(97, (4, 64))
    mask = torch.ones_like(ids)
    mask[1, 40:] = 0  # padded: scores get -inf
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(2, (4,))}
    return tiny_bert(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, **settings).train(), batch


MODELS = {
    "llama": llama,
    "llama eager": partial(llama, attn_implementation="eager"),
    "vit": vit,
    "bert": bert,
    "bert eager": partial(bert, attn_implementation="eager"),
}


@pytest.mark.parametrize("name", MODELS)
def test_loss_is_exact_and_gradient_near(name):
    """The forward is bit for bit that of the model, padding, dropout and all; block adds little to HOT's own error."""
    model, batch = MODELS[name]()
    exact, _ = step(model, batch)
    inputs, before = step(patched(model, INPUTS)[0], batch)
    block, after = step(patched(model, BLOCK)[0], batch)
    assert torch.equal(exact, block) and torch.equal(inputs, block)
    # int8 in groups of 32 is 0.5% off per tensor (normal values), and a few layers add theirs
    assert 0 < relative_error(after, before) < 0.06
    kept = [measure(m, batch).total_bytes for m in (model, patched(model, INPUTS)[0], patched(model, BLOCK)[0])]
    assert kept[2] < 0.72 * kept[1] < 0.72 * kept[0]


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_under_autocast(name):
    """C34: bfloat16 autocast around the forward only; attention is run again under the forward's autocast."""
    model, batch = MODELS[name]()
    results = []
    for m in (model, patched(model, INPUTS)[0], patched(model, BLOCK)[0]):
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = m(**batch).loss
        loss.backward()
        grads = [p.grad for p in m.parameters() if p.grad is not None]
        assert all(g.dtype == torch.float32 for g in grads)
        results.append((loss.detach(), torch.cat([g.flatten() for g in grads])))
    assert torch.equal(results[0][0], results[2][0])
    assert relative_error(results[2][1], results[1][1]) < 0.06  # as without autocast


class Probe(BlockContext):
    """A BlockContext that writes down how each tensor was held, and for which function."""

    def __init__(self):
        super().__init__()
        self.log = []

    def pack(self, tensor):
        held = super().pack(tensor)
        self.log.append((tensor, held))
        return held

    def held_as(self, tensor):
        return [h for t, h in self.log if t.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()]


def test_one_copy_however_many_nodes_keep_it():
    """RMSNorm written out saves x twice and x_hat; SiLU's output is saved by the product after it."""
    x, up = torch.randn(32, 256, requires_grad=True), torch.randn(32, 256, requires_grad=True)
    weight = nn.Parameter(torch.randn(256))
    with Probe() as probe:
        h = x * 1.0
        normed = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        scaled = weight * normed.to(torch.float32)
        y = F.silu(scaled) * up.mul(1.0)
    assert len({id(held) for held in probe.held_as(h)}) == 1 and len(probe.held_as(h)) == 2
    assert isinstance(probe.held_as(normed)[0], Recipe) and isinstance(probe.held_as(weight)[0], Exact)
    held = [h for _, h in probe.log]
    packed = {id(h) for h in held if isinstance(h, Groups)}
    assert len(packed) == 3  # h, up, and weight * normed, whose factor differs from column to column
    y.sum().backward()
    exact_x = x.detach().clone().requires_grad_()
    e = exact_x * 1.0
    twin = weight.detach() * (e * torch.rsqrt(e.pow(2).mean(-1, keepdim=True) + 1e-6))
    (F.silu(twin) * up.detach()).sum().backward()
    assert relative_error(x.grad, exact_x.grad) < 0.02  # int8 in groups of 32: half a step is 0.4% of the largest


def test_unpacked_once_and_gone_after_the_backward(monkeypatch):
    """The backward of an RMSNorm asks for x three times in a row; nothing stays when it is over."""
    calls = []
    unpack = Layout.unpack
    monkeypatch.setattr(Layout, "unpack", lambda *args: calls.append(args[0]) or unpack(*args))
    x, weight = torch.randn(32, 256, requires_grad=True), nn.Parameter(torch.randn(256))
    for _ in range(2):
        with BlockContext():
            h = x * 1.0
            y = weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))
        y.sum().backward()
    assert len(calls) == 2 and hold._unpacked.entries == []


def test_contiguous_views_share_their_copy():
    x = torch.randn(8, 4, 256, requires_grad=True)
    with Probe() as probe:
        h = x * 1.0
        (h.pow(2).sum() + h.view(32, 256).pow(3).sum()).backward()
    first, second = probe.held_as(h)
    assert isinstance(first, Groups) and isinstance(second, View) and second.held is first
    assert relative_error(x.grad, (2 * x + 3 * x**2).detach()) < 0.02


def test_what_needs_no_gradient_is_never_packed():
    """Masks with -inf, rotary tables, parameters, statistics: as they are. A packed mask once trained to NaN."""
    x = torch.randn(64, 128, requires_grad=True)
    weight, table = nn.Parameter(torch.randn(64, 128)), torch.randn(64, 128)
    mask = torch.zeros(64, 64).masked_fill(torch.rand(64, 64) < 0.5, float("-inf"))
    with Probe() as probe:
        h = x * table
        h = h * weight
        q = h.view(1, 1, 64, 128)
        F.scaled_dot_product_attention(q, q, q, attn_mask=mask).sum().backward()
    assert all(isinstance(h, Exact) for t in (table, weight, mask) for h in probe.held_as(t))
    assert probe.held_as(table) and probe.held_as(weight) and probe.held_as(mask)
    assert x.grad.isfinite().all()


def test_changed_in_place_is_noticed_and_packed_copies_do_not_care():
    """C38: what is held as it is keeps autograd's version check."""
    x = torch.randn(64, 128, requires_grad=True)
    with BlockContext():
        h = x * 1.0
        y = torch.exp(h)  # no kind: exp's output is held exactly
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    with BlockContext():
        h = x * 1.0
        y = h.pow(2).sum()
        with torch.no_grad():
            h.add_(100)
    y.backward()
    assert relative_error(x.grad, 2 * x.detach()) < 0.02  # the values of the time when they were saved


def test_swap_is_undone_and_adds_nothing():
    """C57, C46, C52: no parameter, no buffer, same class name, same state; remove_hot gives the classes back."""
    model, batch = llama()
    calls = []
    layer = model.model.layers[0]
    cls, names = type(layer), [n for n, _ in (*model.named_parameters(), *model.named_buffers())]
    layer.register_forward_hook(lambda m, a, out: calls.append(m))
    report = apply_hot(model, BLOCK)
    assert isinstance(layer, HOTBlockMixin) and isinstance(layer, cls) and type(layer).__name__ == cls.__name__
    assert "compress='block': 2 blocks (LlamaDecoderLayer)" in str(report)
    assert [n for n, _ in (*model.named_parameters(), *model.named_buffers())] == names
    step(model, batch)
    assert calls == [layer]
    apply_hot(model, BLOCK)  # again: replaced, not wrapped twice
    assert type(layer).__mro__.count(HOTBlockMixin) == 1
    remove_hot(model)
    assert type(layer) is cls and not hasattr(layer, "hot_block")


def test_copy_and_pickle():
    model, batch = llama()
    apply_hot(model, BLOCK)
    _, expected = step(model, batch)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert isinstance(other.model.layers[0], HOTBlockMixin)
        assert torch.equal(step(other, batch)[1], expected)


def test_memory_stays_flat():
    """C54: varying lengths, forwards without backward; nothing of a forward outlives its graph."""
    model, _ = llama()
    apply_hot(model, BLOCK)
    counts = []
    for i in range(60):
        batch = token_batch(2, 33 + 7 * (i % 9))
        loss = model(**batch).loss
        if i % 3:
            loss.backward()
        del loss
        if i % 20 == 19:
            model.zero_grad()
            gc.collect()
            counts.append(sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()))
    assert counts[2] <= counts[1] <= counts[0]  # less where an earlier test left something behind


def test_other_hooks_see_the_packed_tensors():
    """save_on_cpu around the model keeps int8, not what it was made from; the gradient is the same."""
    model, batch = llama()
    apply_hot(model, BLOCK)
    _, expected = step(model, batch)
    seen = []

    def pack(t):
        seen.append(t.dtype)
        return t.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        _, found = step(model, batch)
    assert torch.equal(found, expected) and seen.count(torch.int8) > 10
    with torch.autograd.graph.save_on_cpu():
        assert torch.equal(step(model, batch)[1], expected)


def test_stands_aside_in_functional_transforms_and_without_gradients():
    """C16, C39."""
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.GELU()), nn.Sequential(nn.Linear(64, 64), nn.GELU()))
    apply_hot(model, BLOCK)
    assert sum(isinstance(m, HOTBlockMixin) for m in model) == 2
    x = torch.randn(128, 64)
    parameters = dict(model.named_parameters())
    found = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).square().sum())(parameters)
    remove_hot(model)
    exact = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    for a, b in zip(found.values(), exact, strict=True):
        assert relative_error(a, b) < 0.14  # HOT's own error: spec.md, section 8
    apply_hot(model, BLOCK)
    with torch.inference_mode():
        assert not model(x).requires_grad


def test_compiled_model_is_that_of_inputs():
    """Inside torch.compile the partitioner decides what is saved: block is a documented no-op there."""
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.GELU()), nn.Sequential(nn.Linear(64, 64), nn.GELU()))
    x = torch.randn(128, 64)
    gradients = []
    for config in (INPUTS, BLOCK):
        copied, _ = patched(model, config)
        compiled = torch.compile(copied, backend="aot_eager", fullgraph=True)
        compiled(x).square().sum().backward()
        gradients.append([p.grad for p in copied.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    torch._dynamo.reset()


def test_every_kind_has_a_codec():
    assert {*context_module.KINDS.values(), "attention"} == set(CODECS)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch 2.13 and later")
def test_beside_a_fused_loss():
    """torch's chunked loss reads lm_head.weight and keeps no logits: same gradient, beside compressed blocks."""
    model, batch = llama()
    apply_hot(model, BLOCK)
    expected, gradient = step(model, batch)
    model.zero_grad()
    hidden = model.model(batch["input_ids"]).last_hidden_state[:, :-1].flatten(0, 1)
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=64)
    loss = F.linear_cross_entropy(hidden, model.lm_head.weight, batch["labels"][:, 1:].flatten(), options=options)
    loss.backward()
    found = torch.cat([p.grad.double().flatten() for p in model.parameters()])
    torch.testing.assert_close(loss.detach(), expected)
    assert (
        relative_error(found, gradient) < 1e-3
    )  # float32 sums in another order, then an int8 rounding that may differ


def test_blocks_are_found():
    model, _ = llama()
    assert list(find_blocks(model)) == ["model.layers.0", "model.layers.1"]
    layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4) for _ in range(2))
    assert list(find_blocks(nn.ModuleDict({"layers": layers}))) == ["layers.0", "layers.1"]
    assert find_blocks(nn.Linear(4, 4)) == {}


def test_a_forward_of_its_own_is_left_out():
    model, _ = llama()
    layer = model.model.layers[1]
    layer.forward = lambda *args, **kwargs: type(layer).forward(layer, *args, **kwargs)
    report = apply_hot(model, BLOCK)
    assert not isinstance(layer, HOTBlockMixin) and isinstance(model.model.layers[0], HOTBlockMixin)
    assert any("leaves out model.layers.1" in note for note in report.notes)


def test_config():
    assert HOTConfig.from_dict(BLOCK.to_dict()).compress == "block" and HOTConfig().compress == "auto"
    with pytest.raises(ValueError, match="compress='everything'"):
        HOTConfig(compress="everything")

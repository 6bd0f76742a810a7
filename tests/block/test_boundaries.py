"""Packed inputs of checkpointed blocks: what is kept, and that the gradient is that of a block at the rounded input."""

import copy
from functools import partial

import peft
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from hot_hf import HOTConfig, apply_hot, remove_hot, report_of
from hot_hf.block import HOTBlockMixin, boundaries, find_blocks
from hot_hf.memory import SavedTensors
from tests.architectures import batch, build
from tests.models import grads, image_batch, tiny_llama, tiny_vit, token_batch, twin, whole_error

EXACT = {"grad_input_bits": None, "activation_format": "none"}  # nothing but boundaries is rounded
# Float32 through four blocks, the order of additions aside: the same rounded inputs.
CLOSE = 1e-5
MODES = ["auto", "block", "checkpoint"]


@pytest.fixture(autouse=True)
def small_inputs(monkeypatch):
    """Of any size."""
    monkeypatch.setattr(boundaries, "SMALLEST", 1)


def llama(**settings):
    return tiny_llama(layers=4, **settings).train(), token_batch(3, 21)


def vit(**settings):
    return tiny_vit(layers=4, **settings).train(), image_batch()


def checkpointed(model, mode="auto", reentrant=False, plan=EXACT, **more):
    """A patched twin under transformers' checkpointing."""
    hot = twin(model)
    apply_hot(hot, HOTConfig(compress=mode, **plan, **more))
    hot.activation_checkpointing_enable({"use_reentrant": reentrant})
    return hot


def step(model, inputs):
    model.zero_grad()
    torch.manual_seed(0)  # dropout
    model(**inputs).loss.backward()
    return grads(model)


def rounded(x):
    """Int8 in groups of 32 along memory, scales of bfloat16: by a loop, integers decided in float32 as spec.md says."""
    flat = x.detach().float().flatten()
    flat = torch.cat((flat, flat.new_zeros(-len(flat) % 32)))
    out = []
    for group in flat.view(-1, 32):
        top = group.abs().max()
        q = (group * (127 / top)).round().clamp(-127, 127) if top > 0 else group * 0
        out.append(q * (top / 127).bfloat16().float())
    return torch.cat(out)[: x.numel()].view(x.shape).to(x.dtype)


class _AtRounded(torch.autograd.Function):
    """``block(x)``; its gradients are those of the block at ``rounded(x)``."""

    @staticmethod
    def forward(ctx, block, arguments, x, *parameters):
        ctx.block, ctx.arguments, ctx.rounded = block, arguments, rounded(x)
        ctx.parameters = parameters
        return block(x, **arguments)

    @staticmethod
    def backward(ctx, g):
        with torch.enable_grad():
            x = ctx.rounded.requires_grad_()
            y = ctx.block(x, **ctx.arguments)
            found = torch.autograd.grad(y, (x, *ctx.parameters), g)
        return None, None, *found


def at_rounded_inputs(model):
    """The oracle: every block's gradient by ``_AtRounded``."""
    model = twin(model)
    for block in find_blocks(model).values():
        plain = block.forward
        block.forward = lambda x, *a, plain=plain, block=block, **k: _AtRounded.apply(plain, k, x, *block.parameters())
    return model


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("family", [llama, vit])
def test_the_gradient_is_that_at_the_rounded_inputs(family, reentrant, mode):
    model, inputs = family()
    hot = checkpointed(model, mode, reentrant)
    if reentrant:
        hot.enable_input_require_grads() if family is llama else inputs["pixel_values"].requires_grad_()
    found, expected = step(hot, inputs), step(at_rounded_inputs(model), inputs)
    assert whole_error(found, expected) < CLOSE
    # Half a step of 1/127 of a group's largest entry: 0.4% of that, some 1% of an entry.
    assert 1e-4 < whole_error(found, step(model, inputs)) < 0.05


@pytest.mark.parametrize("family", [llama, vit])
def test_without_checkpointing_blocks_recompute_by_themselves(family):
    """compress="checkpoint" needs nothing switched on; "auto" then leaves blocks as they are."""
    model, inputs = family()
    hot, plain = twin(model), twin(model)
    apply_hot(hot, HOTConfig(compress="checkpoint", **EXACT))
    apply_hot(plain, HOTConfig(**EXACT))
    assert whole_error(step(hot, inputs), step(at_rounded_inputs(model), inputs)) < CLOSE
    expected = step(model, inputs)
    assert all(torch.equal(value, expected[name]) for name, value in step(plain, inputs).items())


@pytest.mark.parametrize("name", ["T5", "BART", "Whisper", "GPT-2", "BERT", "Swin", "Mixtral", "OPT", "Falcon"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_architectures(name, reentrant):
    """Encoder-decoders, experts, windows: every gradient is there and near the one without packing."""
    torch.manual_seed(0)
    model, inputs = build(name).train(), batch(name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    plain = checkpointed(model, "inputs", reentrant, {})
    hot = checkpointed(model, "auto", reentrant, {})
    if reentrant:
        for m in (plain, hot):
            if m.main_input_name == "input_ids":
                m.enable_input_require_grads()
    assert any(isinstance(m, HOTBlockMixin) for m in hot.modules())
    expected = step(plain, inputs)
    found = step(hot, inputs)
    assert found.keys() == expected.keys() and whole_error(found, expected) < 0.1


def kept(model, inputs):
    with SavedTensors(model) as saved:
        loss = model(**inputs).loss
    return saved, loss


@pytest.mark.parametrize("reentrant", [True, False])
def test_kept_bytes(reentrant):
    """34 bytes for 32 values and block, beside what the model keeps outside its blocks."""
    model, inputs = llama()
    plain = twin(model)
    plain.activation_checkpointing_enable({"use_reentrant": reentrant})
    for m in (plain, hot := checkpointed(model, reentrant=reentrant)):
        m.enable_input_require_grads()
    before, after = (kept(m, inputs)[0].total_bytes for m in (plain, hot))
    # The last block's output is kept by the norm after it, that of all others by the next block alone.
    assert before - after == 4 * (3 * 21 * 64) * (4 - 34 / 32)


def test_an_input_that_several_blocks_read_is_kept_once():
    """The encoder's output under a decoder of three blocks."""
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=97, d_model=64, encoder_layers=1, decoder_layers=3, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=128, decoder_ffn_dim=128, max_position_embeddings=64, dropout=0.0,
    )  # fmt: skip
    hot = checkpointed(BartForConditionalGeneration(config).train())
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(t), t)[1], lambda t: t):
        hot(**{"input_ids": torch.randint(97, (2, 16)), "labels": torch.randint(97, (2, 8))})
    storages = {t.untyped_storage()._cdata: t.shape for t in packed if t.dtype == torch.int8}
    encoder = [shape for shape in storages.values() if shape == (2 * 16 * 64 // 32, 32)]
    assert len(encoder) == 2  # the encoder block's own input, and the output for all three


@pytest.mark.parametrize("every", [2, 3])
def test_every_nth_block(every):
    model, inputs = llama()
    hot = twin(model)
    apply_hot(hot, HOTConfig(**EXACT))
    hot.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=every)
    assert 0 < whole_error(step(hot, inputs), step(model, inputs)) < 0.05
    apply_hot(hot)
    assert f"{-(-4 // every)} blocks keep their inputs alone" in str(report_of(hot))


def test_packed_bytes_are_what_moves():
    """A checkpoint function that moves what it saves, as transformers' offload does, moves integers."""
    model, inputs = llama()
    hot, moved = checkpointed(model), []

    def moving(function, *args, **kwargs):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (moved.append(t.dtype), t.clone())[1], lambda t: t):
            return checkpoint(function, *args, **kwargs)

    for block in hot.model.layers:
        block._gradient_checkpointing_func = partial(moving, use_reentrant=False)
    assert whole_error(step(hot, inputs), step(at_rounded_inputs(model), inputs)) < CLOSE
    assert set(moved) == {torch.int8, torch.bfloat16}


@pytest.mark.parametrize("reentrant", [True, False])
def test_adapters_on_a_frozen_base(reentrant):
    """PEFT's ``enable_input_require_grads``: the first block's input is a leaf."""
    model, inputs = llama()
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    plain, hot = twin(adapted), twin(adapted)
    apply_hot(hot, HOTConfig(compress="auto", min_features=1))
    apply_hot(plain, HOTConfig(compress="inputs", min_features=1))
    for m in (plain, hot):
        m.enable_input_require_grads()
        m.get_base_model().activation_checkpointing_enable({"use_reentrant": reentrant})
    found, expected = step(hot, inputs), step(plain, inputs)
    assert found and 0 < whole_error(found, expected) < 0.1


def test_the_forward_of_a_checkpoint_packs_no_linear_input():
    """What it saves is thrown away: each tensor is packed once in a step, in the recompute, with equal results."""
    runs, plan = 0, {"activation_format": "ht_int4"}

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal runs
            runs += func is torch.ops.hot_hf.compress.default and args[1] == "ht_int4"
            return func(*args, **(kwargs or {}))

    model, inputs = llama()
    hot = checkpointed(model, "inputs", plan=plan)
    plain = twin(model)
    apply_hot(plain, HOTConfig(compress="inputs", **plan))
    expected, found = step(plain, inputs), step(hot, inputs)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    loss = hot(**inputs).loss  # no dispatch mode here: with one around, what is saved may be kept
    with Counting():
        loss.backward()
    assert runs == 4 * 4


def test_dropout_and_stochastic_rounding_repeat_themselves():
    model, inputs = llama(attention_dropout=0.2)
    plan = {"rounding": "stochastic"}
    first, second = (step(checkpointed(model, plan=plan), inputs) for _ in range(2))
    assert all(torch.equal(first[name], value) for name, value in second.items())
    assert whole_error(first, step(checkpointed(model, "inputs", plan=plan), inputs)) < 0.2


@pytest.mark.parametrize("reentrant", [True, False])
def test_two_backwards(reentrant):
    """retain_graph: the packed input is unpacked again."""
    model, inputs = llama()
    hot = checkpointed(model, reentrant=reentrant)
    hot.enable_input_require_grads()
    loss = hot(**inputs).loss
    loss.backward(retain_graph=not reentrant)
    if reentrant:  # torch allows one
        return
    once = grads(hot)
    loss.backward()
    assert all(torch.allclose(value, 2 * once[name]) for name, value in grads(hot).items())


def test_nothing_is_packed_without_a_backward():
    model, inputs = llama()
    hot = checkpointed(model)
    with torch.no_grad():
        assert torch.equal(hot(**inputs).logits, model(**inputs).logits)
    hot.eval()
    saved, _ = kept(hot, inputs)
    assert not any(t == torch.int8 for s in saved.storages.values() for t in s.dtypes)


def test_compiled_blocks_checkpoint_as_they_do():
    model, inputs = llama()
    hot = checkpointed(model)
    torch.compile(hot, backend="aot_eager")(**inputs).loss.backward()
    assert whole_error(grads(hot), step(model, inputs)) < CLOSE


def test_switched_on_before_and_taken_off():
    """The order of patching and switching on does not matter; remove_hot gives transformers' function back."""
    model, inputs = llama()
    before = twin(model)
    before.activation_checkpointing_enable({"use_reentrant": False})
    run = before.model.layers[0]._gradient_checkpointing_func
    apply_hot(before, HOTConfig(**EXACT))
    found, expected = step(before, inputs), step(checkpointed(model), inputs)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    copied = copy.deepcopy(before)
    assert all(torch.equal(step(copied, inputs)[name], value) for name, value in expected.items())
    remove_hot(before)
    assert before.model.layers[0]._gradient_checkpointing_func is run
    assert whole_error(step(before, inputs), step(model, inputs)) < CLOSE
    before.activation_checkpointing_disable()
    assert not before.model.layers[0].gradient_checkpointing


def test_plain_torch_modules():
    """Blocks of a ModuleList: compress="checkpoint" recomputes them, keyword arguments and all."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x, *, scale):
            return x + torch.tanh(self.linear(x)) * scale

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = block(x=x, scale=2.0) if block is self.blocks[1] else block(x, scale=2.0)
            return x

    model, x = Model(), torch.randn(5, 64)
    hot = twin(model)
    report = apply_hot(hot, HOTConfig(compress="checkpoint", **EXACT))
    assert "compress='checkpoint': 3 blocks (Block)" in str(report)
    with SavedTensors(hot) as saved:
        loss = hot(x).square().sum()
    assert sum(torch.int8 in s.dtypes for s in saved.storages.values()) == 2  # the first input needs no gradient
    loss.backward()
    model(x).square().sum().backward()
    assert 0 < whole_error(grads(hot), grads(model)) < 0.05

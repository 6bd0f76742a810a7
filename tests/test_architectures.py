"""Every architecture of tests/architectures.py: patch, one training step, save, load without HOT, unpatch."""

import pytest
import torch
import transformers
from torch import nn

from hot_hf import apply_hot, remove_hot
from hot_hf.layers import HOTMixin
from hot_hf.monitor import never_called

from .architectures import ARCHITECTURES, batch, build
from .models import grads, relative_error, twin, whole_error

# Layers whose weight the model reads itself; the audit has to name them and nothing else.
BYPASSED = {"WavLM": {f"wavlm.encoder.layers.0.attention.{p}_proj" for p in ("q", "k", "v", "out")}}


def _step(model, inputs, seed):
    torch.manual_seed(seed)  # dropout: HOT draws nothing from the global generator, so both models drop alike
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture(name, seed, tmp_path):
    """C18, C23, C24, C47: one step near the exact one, a checkpoint that the plain class loads, classes given back."""
    exact = build(name).train()
    model = twin(exact)
    classes = {n: type(m) for n, m in model.named_modules()}
    report = apply_hot(model)
    inputs = batch(name)
    loss, exact_loss = _step(model, inputs, seed), _step(exact, inputs, seed)
    assert torch.equal(loss, exact_loss), "the forward must be bit-identical"

    got, want = grads(model), grads(exact)
    assert got.keys() == want.keys()
    # spec.md, section 8 measures 0.014 for g_x and 0.14 for g_w; the embeddings and norms in between are exact.
    assert 0 < whole_error(got, want) < 0.25
    assert {n: p.grad.stride() for n, p in model.named_parameters() if n in got} == {
        n: p.grad.stride() for n, p in exact.named_parameters() if n in got
    }
    assert set(never_called(model)) == BYPASSED.get(name, set())
    assert report.patched and report.multiply_add_share > 0

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    model.save_pretrained(tmp_path)
    plain, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(isinstance(m, HOTMixin) for m in plain.modules())
    assert not info["missing_keys"] and not info["unexpected_keys"]
    state = model.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in plain.state_dict().items())

    remove_hot(model)
    assert {n: type(m) for n, m in model.named_modules()} == classes


def test_multihead_attention_is_left_alone(seed):
    """C19: out_proj of nn.MultiheadAttention is never called; the rest of the encoder layer is patched."""
    exact = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    model = twin(exact)
    report = apply_hot(model)
    assert "never calls it" in report.skipped["self_attn.out_proj"]
    assert report.patched == ["linear1", "linear2"]
    x = torch.randn(2, 10, 64)
    for mode in (True, False):
        model.train(mode), exact.train(mode)
        assert torch.equal(model(x), exact(x))
    model.train()(x).square().sum().backward()
    exact.train()(x).square().sum().backward()
    assert torch.equal(exact.linear2.bias.grad, model.linear2.bias.grad)
    error = relative_error(model.self_attn.out_proj.weight.grad, exact.self_attn.out_proj.weight.grad)
    assert error < 0.1  # its own product is exact; what arrives went through two INT8 grad_inputs of 0.02 each


def test_table_covers_the_same_architectures():
    """The coverage table in the documents lists what is tested here, in the same classes."""
    from benchmarks.coverage_table import MODELS

    assert {name: row[0] for name, row in ARCHITECTURES.items()} == MODELS
    assert all(hasattr(transformers, cls) for cls in MODELS.values())

"""Layers whose product is nn.Linear's and whose forward is their own: Conv1D (GPT-2) and FalconLinear."""

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

from hot_hf import HOTConfig, HOTPatchError, apply_hot, remove_hot
from hot_hf.layers import HOTMixin

from .architectures import batch, build
from .models import cosine, relative_error, twin


def _conv1d(out_features: int, in_features: int) -> Conv1D:
    layer = Conv1D(out_features, in_features)
    nn.init.normal_(layer.bias)
    return layer


def _as_linear(layer: Conv1D) -> nn.Linear:
    linear = nn.Linear(layer.nx, layer.nf)
    linear.weight.data = layer.weight.data.t().clone()
    linear.bias.data = layer.bias.data.clone()
    return linear


@pytest.mark.parametrize("preset", ["default", "fast", "smallest"])
@pytest.mark.parametrize("shape", [(5, 7), (23,), (2, 3, 4)])
def test_conv1d_computes_what_a_linear_layer_does(preset, shape):
    """C20, C36, C56: forward bit-identical to Conv1D's, gradients those of the transposed HOTLinear, strides kept."""
    layer = _conv1d(96, 80)
    plain, linear = copy.deepcopy(layer), _as_linear(layer)
    apply_hot(layer, preset), apply_hot(linear, preset)
    x = torch.randn(*shape, 80, requires_grad=True)
    x2 = x.detach().clone().requires_grad_()
    g = torch.randn(*shape, 96)
    y = layer(x)
    assert torch.equal(y, plain(x))
    y.backward(g), linear(x2).backward(g)
    # The same integers and scales; only the order of float additions of the two layouts may differ.
    torch.testing.assert_close(x.grad, x2.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.weight.grad, linear.weight.grad.t(), rtol=1e-5, atol=1e-4)
    assert torch.equal(layer.bias.grad, linear.bias.grad)
    assert layer.weight.grad.stride() == layer.weight.stride()


def test_conv1d_kept_in_half_precision_and_strided():
    """bf16 weights and a non-contiguous input, which Conv1D itself refuses to view."""
    layer = _conv1d(64, 64).bfloat16()
    plain = copy.deepcopy(layer)
    apply_hot(layer)
    x = torch.randn(3, 64, 5).bfloat16().transpose(1, 2).requires_grad_()
    assert torch.equal(layer(x), plain(x.contiguous()))
    layer(x).sum().backward()
    assert x.grad.dtype == layer.weight.grad.dtype == torch.bfloat16


def test_gpt2_counts():
    """C20: 4 Conv1D per block are patched, the head is not; names, state and repr are right."""
    model = build("GPT-2")
    keys = list(model.state_dict())
    report = apply_hot(model)
    kinds = [row.kind for row in report.rows if row.action == "patched"]
    assert kinds == ["Conv1D"] * 4 and report.skipped.keys() == {"lm_head"}
    assert list(model.state_dict()) == keys
    assert "hot=INT8 per_token / ht_int4" in repr(model.transformer.h[0].attn.c_attn)
    assert remove_hot(model) and not any(isinstance(m, HOTMixin) for m in model.modules())


def test_patched_conv1d_copies_and_pickles():
    """A deep copy and a pickled copy compute on; they hold weights of their own."""
    model = build("GPT-2").eval()
    apply_hot(model)
    inputs = batch("GPT-2")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(**inputs).logits, model(**inputs).logits)
        other(**inputs).loss.backward()
        assert all(p.grad is None for p in model.parameters())
        assert any(isinstance(m, HOTMixin) for m in other.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_falcon_linear_keeps_its_own_rounding(dtype):
    """FalconLinear adds its bias to the rounded product: in bf16 that is not F.linear, and stays bit-identical."""
    layer = FalconLinear(80, 96).to(dtype)
    nn.init.normal_(layer.bias)
    plain = twin(layer)
    report = apply_hot(layer)
    assert report.patched == ["(root)"]
    x = torch.randn(4, 9, 80, dtype=dtype, requires_grad=True)
    y = layer(x)
    assert torch.equal(y, plain(x))
    g = torch.randn_like(y)
    got = torch.autograd.grad(y, [x, layer.weight, layer.bias], g)
    want = torch.autograd.grad(plain(x), [x, plain.weight, plain.bias], g)
    assert relative_error(got[0], want[0]) < 0.03 and cosine(got[1], want[1]) > 0.95  # spec.md, section 8
    assert torch.equal(got[2], want[2])


def test_subclass_with_its_own_forward_is_refused():
    """C22: a subclass is left exact with a note, and refused when opted in although its forward is its own."""

    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(Scaled(64, 64), nn.Linear(64, 64))
    assert "subclass Scaled" in apply_hot(model).skipped["0"]
    with pytest.raises(HOTPatchError, match="Scaled"):
        apply_hot(nn.Sequential(Scaled(64, 64)), HOTConfig(linear_classes=["Scaled"]))

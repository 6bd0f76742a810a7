"""Graphs taken down from a patched model are those of the plain one; transforms that HOT has no rule for are exact."""

import copy
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vmap

from hot_hf import HOTConfig, apply_hot, remove_hot
from tests.models import relative_error, tiny_vit

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of what is tried here


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def pair(compress="auto"):
    model = nn.Sequential(Block(), Block())
    exact = copy.deepcopy(model)
    apply_hot(model, HOTConfig(compress=compress))
    return model, exact


@pytest.mark.parametrize("compress", ["auto", "block", "checkpoint"])
def test_export_holds_nothing_of_hot(compress, tmp_path):
    model, exact = pair(compress)
    x = torch.randn(4, 16, 64)
    program = torch.export.export(model, (x,))
    assert not [n for n in program.graph.nodes if "hot_hf" in str(n.target)]
    file = tmp_path / "model.pt2"
    torch.export.save(program, file)
    # As on a machine without hot_hf.
    code = "import sys, torch; sys.modules['hot_hf'] = None; p, x, y = sys.argv[1:]; "
    code += "torch.save(torch.export.load(p).module()(torch.load(x)), y)"
    torch.save(x, tmp_path / "x.pt")
    subprocess.run([sys.executable, "-c", code, file, tmp_path / "x.pt", tmp_path / "y.pt"], check=True)
    torch.testing.assert_close(torch.load(tmp_path / "y.pt"), exact(x), rtol=0, atol=0)
    assert any("hot_hf" in str(type(m).__mro__) for m in model.modules())  # the model itself is patched on


@pytest.mark.parametrize("compress", ["auto", "block", "checkpoint"])
def test_jit_trace(compress):
    model, exact = pair(compress)
    traced = torch.jit.trace(model, torch.randn(4, 16, 64))
    assert "hot_hf::" not in str(traced.inlined_graph) and "PythonOp" not in str(traced.inlined_graph)
    x = torch.randn(2, 16, 64)
    torch.testing.assert_close(traced(x), exact(x), rtol=0, atol=0)


def test_fx():
    model, exact = pair()
    graph = torch.fx.symbolic_trace(model)
    assert not [n for n in graph.graph.nodes if "hot" in str(n.target)]
    x = torch.randn(2, 16, 64)
    torch.testing.assert_close(graph(x), exact(x), rtol=0, atol=0)


def test_a_whole_model_of_transformers():
    model = tiny_vit()
    apply_hot(model, HOTConfig(compress="block"))
    x = torch.randn(2, 1, 8, 8)
    program = torch.export.export(model, (), {"pixel_values": x})
    assert not [n for n in program.graph.nodes if "hot_hf" in str(n.target)]
    torch.testing.assert_close(program.module()(pixel_values=x).logits, model(pixel_values=x).logits)


def test_what_looks_at_the_class_needs_remove_hot():
    """The page says so of these; after remove_hot they work, and before they do as it says."""
    model, _ = pair()
    quantize = torch.ao.quantization.quantize_dynamic
    assert type(quantize(model, {nn.Linear}, dtype=torch.qint8)[0].up).__module__.startswith("hot_hf")
    with pytest.raises(Exception, match="HOTState"):
        torch.jit.script(model)
    remove_hot(model)
    assert "quantized" in type(quantize(model, {nn.Linear}, dtype=torch.qint8)[0].up).__module__
    torch.jit.script(model)


@pytest.mark.parametrize("compress", ["auto", "block", "checkpoint"])
def test_forward_mode_is_exact(compress):
    model, exact = pair(compress)
    x, tangent = torch.randn(4, 16, 64), torch.randn(4, 16, 64)
    params = dict(model.named_parameters())
    directions = {name: torch.randn_like(p) for name, p in params.items()}
    results = [
        jvp(lambda p, v, m=m: functional_call(m, p, (v,)), (params, x), (directions, tangent)) for m in (model, exact)
    ]
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=0)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-5, atol=1e-5)


def test_per_sample_gradients_without_a_warning():
    """vmap(grad): each sample's gradient is the one that it has alone, bit for bit."""
    layer = nn.Linear(64, 48)
    apply_hot(layer, HOTConfig(min_features=1))
    params = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(p, x):
        return functional_call(layer, p, (x,)).square().sum()

    x = torch.randn(5, 16, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = vmap(grad(loss), in_dims=(None, 0))(params, x)
    for i in range(5):
        alone = grad(loss)(params, x[i])
        for name in params:
            torch.testing.assert_close(found[name][i], alone[name], rtol=1e-6, atol=1e-6)
    exact = vmap(grad(lambda p, v: torch.nn.functional.linear(v, p["weight"], p["bias"]).square().sum()), (None, 0))
    assert relative_error(found["weight"], exact(params, x)["weight"]) < 0.3  # ht_int4 of 16 tokens


def test_vmap_over_the_operators():
    """All of their arguments mapped or not, over any dimension, as the calls one by one."""
    from hot_hf.ops import operators as ops

    x = torch.randn(32, 3, 48)
    packed, scale = vmap(lambda v: ops.compress(v, "int8", 8, 16, False, "nearest", 0), in_dims=1)(x)
    for i in range(3):
        one = ops.compress(x[:, i].contiguous(), "int8", 8, 16, False, "nearest", 0)
        assert torch.equal(packed[i], one[0]) and torch.equal(scale[i], one[1])

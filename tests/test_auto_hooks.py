"""from_pretrained(..., hot_config=...) beside what else takes hold of a model: devices, hooks, ties, remote code."""

import json

import pytest
import torch
import transformers
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module

import hot_hf
from hot_hf import HOTConfig, HOTPatchError, apply_hot, remove_hot
from hot_hf.layers import HOTMixin

from .architectures import batch, build
from .models import equal_states, grads, patched_names, relative_error, tiny_llama, token_batch, twin

REMOTE = """
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

class OwnConfig(PreTrainedConfig):
    model_type = "own"
    def __init__(self, width=64, **kwargs):
        self.width = width
        super().__init__(**kwargs)

class OwnModel(PreTrainedModel):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        self.up, self.down = nn.Linear(config.width, 128), nn.Linear(128, config.width)
        self.post_init()
    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)
    def forward(self, x):
        return self.down(torch.relu(self.up(x)))
"""


def test_remote_code(installed, tmp_path):
    """C18: a custom PreTrainedModel whose code lies beside its weights."""
    (tmp_path / "own.py").write_text(REMOTE)
    scope = {"__name__": "own"}
    exec(REMOTE, scope)
    source = scope["OwnModel"](scope["OwnConfig"]())
    source.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for auto in (hot_hf.AutoModel, transformers.AutoModel):
        model = auto.from_pretrained(tmp_path, trust_remote_code=True, hot_config=HOTConfig())
        assert patched_names(model) == ["up", "down"] and equal_states(model, source)
        model(torch.randn(3, 64)).sum().backward()


def test_device_map_and_offload(auto, llama_dir, tmp_path):
    """C50: a device map leaves nothing on meta; with weights on disk both the hooks and HOT work."""
    exact = transformers.AutoModelForCausalLM.from_pretrained(llama_dir)
    inputs = token_batch()
    exact(**inputs).loss.backward()
    for device_map in ("cpu", "auto"):
        model = auto.AutoModelForCausalLM.from_pretrained(llama_dir, hot_config="default", device_map=device_map)
        assert len(patched_names(model)) == 14 and not any(p.is_meta for p in model.parameters())
        model(**inputs).loss.backward()
        assert 0 < relative_error(*(g["model.embed_tokens.weight"] for g in (grads(model), grads(exact)))) < 0.02  # g_x

    device_map = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    device_map |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    model = auto.AutoModelForCausalLM.from_pretrained(
        llama_dir, hot_config="default", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    assert len(patched_names(model)) == 14 and model.model.layers[1].mlp.up_proj.weight.is_meta
    for parameter in model.model.layers[1].parameters():
        parameter.requires_grad_(False)  # weights on disk cannot be trained, here as without HOT
    out = model(**inputs)
    assert torch.equal(out.logits, exact(**inputs).logits)
    out.loss.backward()
    assert all(m.hot.called for m in model.modules() if isinstance(m, HOTMixin))
    assert 0 < relative_error(*(g["model.embed_tokens.weight"] for g in (grads(model), grads(exact)))) < 0.02  # g_x


def test_meta_device_then_weights(seed):
    """C50: patched on the meta device, filled later: no meta tensor is left and the numbers are those of the source."""
    source = tiny_llama()
    for fill in ("assign", "to_empty"):
        with torch.device("meta"):
            model = type(source)(source.config)
        apply_hot(model)
        if fill == "to_empty":
            model.to_empty(device="cpu")
        model.load_state_dict(source.state_dict(), assign=fill == "assign")
        model.model.rotary_emb = twin(source.model.rotary_emb)
        assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
        inputs = token_batch()
        out = model(**inputs)
        assert torch.equal(out.logits, source(**inputs).logits)
        out.loss.backward()


@pytest.mark.parametrize("order", ["hooks first", "HOT first"])
def test_accelerate_hooks(order):
    """C51: hooks added before or after patching both run with HOT's backward, and unpatching gives the layer back."""
    exact = torch.nn.Linear(64, 64)
    layer = twin(exact)
    seen = []

    class Noting(AlignDevicesHook):
        def pre_forward(self, module, *args, **kwargs):
            seen.append(type(module).__name__)
            return super().pre_forward(module, *args, **kwargs)

    def hook():
        add_hook_to_module(layer, Noting("cpu"))

    for action in (hook, lambda: apply_hot(layer)) if order == "hooks first" else (lambda: apply_hot(layer), hook):
        action()
    apply_hot(layer)  # once more
    x = torch.randn(8, 64)
    layer(x).square().sum().backward()
    exact(x).square().sum().backward()
    assert seen == ["HOTLinear"] and layer.hot.called
    assert 0 < relative_error(layer.weight.grad, exact.weight.grad) < 0.18  # 8 tokens: 0.09 to 0.12
    remove_hot(layer)
    layer.weight.grad = None
    layer(x).square().sum().backward()
    assert seen == ["HOTLinear", "Linear"] and torch.equal(layer.weight.grad, exact.weight.grad)
    remove_hook_from_module(layer)  # leaves a bound forward behind
    apply_hot(layer)
    layer.weight.grad = None
    layer(x).square().sum().backward()
    assert len(seen) == 2 and not torch.equal(layer.weight.grad, exact.weight.grad)
    assert apply_hot(layer).patched == ["(root)"]


def test_foreign_forward_is_refused():
    """C51: a forward of somebody else's, in the instance, is refused by name and nothing is changed."""
    model = tiny_llama()
    layer = model.model.layers[0].mlp.up_proj
    layer.forward = lambda x: torch.nn.functional.linear(x, layer.weight)
    with pytest.raises(HOTPatchError, match=r"model\.layers\.0\.mlp\.up_proj carries a forward"):
        apply_hot(model)
    assert not patched_names(model)


def test_tied_embeddings(tmp_path):
    """C23, C47: one Parameter, a summed gradient, kept through resizing, saving and loading, with HOT on the head."""
    model = tiny_llama(tie=True)
    apart = tiny_llama(tie=False)
    apart.load_state_dict(model.state_dict())
    for each in (model, apart):
        apply_hot(each, HOTConfig(skip_heads=False))
    assert "lm_head" in patched_names(model) and model.lm_head.weight is model.model.embed_tokens.weight
    inputs = token_batch()
    model(**inputs).loss.backward(), apart(**inputs).loss.backward()
    both = apart.lm_head.weight.grad + apart.model.embed_tokens.weight.grad
    # a float32 sum of the same two parts, in another order where a token occurs several times
    torch.testing.assert_close(model.lm_head.weight.grad, both, rtol=1e-6, atol=1e-7)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()
    model.resize_token_embeddings(104)
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.lm_head.weight.shape[0] == 104
    model(**inputs).loss.backward()
    model.save_pretrained(tmp_path)
    again = hot_hf.AutoModelForCausalLM.from_pretrained(tmp_path, hot_config=HOTConfig(skip_heads=False))
    assert again.lm_head.weight is again.model.embed_tokens.weight and equal_states(again, model)


def test_weight_read_outside_of_forward(seed):
    """C24: T5 asks its layers for weight.dtype in bf16, and a sliced weight gets its exact gradient."""
    model = build("T5").bfloat16()
    apply_hot(model)
    assert torch.isfinite(model(**batch("T5")).loss)
    layer = torch.nn.Linear(64, 64)
    apply_hot(layer)
    x = torch.randn(5, 64)
    torch.nn.functional.linear(x, layer.weight[:8]).sum().backward()
    want = torch.zeros(64, 64)
    want[:8] = x.sum(0)
    torch.testing.assert_close(layer.weight.grad, want)

"""hot_config= in from_pretrained and from_config: our Auto classes, and install() for transformers' own."""

import json
import warnings

import pytest
import torch
import transformers
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from transformers import PreTrainedModel

import hot_hf
from hot_hf import HOTConfig, HOTPatchError, apply_hot, remove_hot
from hot_hf.layers import HOTMixin
from hot_hf.patching import config_of

from .architectures import batch, build
from .models import grads, relative_error, tiny_llama, token_batch, twin

AUTO = {
    "AutoModelForCausalLM": "Llama",
    "AutoModelForSeq2SeqLM": "T5",
    "AutoModelForSequenceClassification": "BERT",
    "AutoModelForTokenClassification": "BERT",
    "AutoModelForQuestionAnswering": "RoBERTa",
    "AutoModelForMaskedLM": "BERT",
    "AutoModelForImageClassification": "ViT",
    "AutoModelForSemanticSegmentation": "SegFormer",
    "AutoModelForObjectDetection": "DETR",
    "AutoModelForSpeechSeq2Seq": "Whisper",
    "AutoModelForCTC": "Wav2Vec2",
    "AutoModelForZeroShotImageClassification": "CLIP",
    "AutoModel": "Mistral",
}


def patched(model) -> list[str]:
    return [n for n, m in model.named_modules() if isinstance(m, HOTMixin)]


def equal_states(a, b) -> bool:
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.fixture
def installed():
    hot_hf.install()
    yield
    hot_hf.uninstall()


@pytest.fixture(params=["hot_hf", "transformers"])
def auto(request):
    """Both ways to ``hot_config=``: hot_hf's Auto classes, and transformers' own after install()."""
    if request.param == "hot_hf":
        return hot_hf
    request.getfixturevalue("installed")
    return transformers


@pytest.fixture
def llama_dir(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.mark.parametrize("name", AUTO)
def test_auto_class(name, tmp_path, seed):
    """C18: the same class and bit-identical weights as transformers' own, patched; plain without hot_config."""
    build(AUTO[name]).save_pretrained(tmp_path)
    torch.manual_seed(seed)  # heads that the checkpoint lacks
    plain = getattr(transformers, name).from_pretrained(tmp_path)
    torch.manual_seed(seed)
    auto = getattr(hot_hf, name)
    model = auto.from_pretrained(tmp_path, hot_config=HOTConfig.fast())
    assert type(model) is type(plain) and equal_states(model, plain)
    assert patched(model) and config_of(model) == HOTConfig.fast()
    assert not patched(auto.from_pretrained(tmp_path))
    assert patched(auto.from_config(plain.config, hot_config="smallest"))
    assert not patched(auto.from_config(plain.config))


def test_every_auto_model_class_is_there():
    """Whatever Auto model class transformers has, hot_hf has; other names are refused."""
    names = [n for n in dir(transformers) if n.startswith("AutoModel")]
    assert len(names) > 20
    for name in names:
        cls = getattr(hot_hf, name)
        assert issubclass(cls, getattr(transformers, name)) and cls.__name__ == name
    for name in ("AutoModelForNothing", "Trainer"):
        with pytest.raises(AttributeError, match=name):
            getattr(hot_hf, name)


@pytest.mark.parametrize("given", [HOTConfig(rank=4), {"rank": 4}, "paper"])
def test_forms_of_hot_config(llama_dir, given):
    """A HOTConfig, a dict or a preset name; loading info passes through."""
    model, info = hot_hf.AutoModelForCausalLM.from_pretrained(llama_dir, hot_config=given, output_loading_info=True)
    assert config_of(model) == HOTConfig.coerce(given) and not info["missing_keys"]


def test_errors_name_the_remedy(llama_dir):
    """Wrong values are refused before weights are read."""
    load = hot_hf.AutoModelForCausalLM.from_pretrained
    with pytest.raises(ValueError, match=r"papr.*paper"):
        load(llama_dir, hot_config="papr")
    with pytest.raises(TypeError, match="not int"):
        load(llama_dir, hot_config=8)
    with pytest.raises(FileNotFoundError, match=r"hot_config\.json"):
        load(llama_dir, hot_config="saved")
    with pytest.raises(ValueError, match="from_config has none"):
        hot_hf.AutoModelForCausalLM.from_config(tiny_llama().config, hot_config="saved")
    with pytest.raises(HOTPatchError, match="no_such_layer"):
        load(llama_dir, hot_config=HOTConfig(include=["no_such_layer"]))


def test_installed_classes_take_hot_config(installed, llama_dir):
    """install() reaches concrete classes, Auto classes, from_config, and leaves calls without hot_config alone."""
    for cls in (transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM):
        model, info = cls.from_pretrained(llama_dir, hot_config="fast", output_loading_info=True)
        assert config_of(model) == HOTConfig.fast() and not info["missing_keys"]
        assert not patched(cls.from_pretrained(llama_dir))
        assert not patched(cls.from_pretrained(llama_dir, hot_config=None))
    config = tiny_llama().config
    assert patched(transformers.AutoModelForCausalLM.from_config(config, hot_config="fast"))
    assert patched(transformers.LlamaForCausalLM._from_config(config, hot_config="fast"))
    assert not hasattr(config, "hot_config")


def test_saved_configuration_is_picked_up_on_request(installed, tmp_path):
    """C46, C48: hot_config.json lies beside the weights, is used on request only, and config.json knows nothing."""
    model = tiny_llama(tie=True)
    exact = twin(model)
    apply_hot(model, HOTConfig(rank=3, overrides={"*.q_proj": {"block_size": 32}}))
    for m in (model, exact):
        m(**token_batch()).loss.backward()
    model.save_pretrained(tmp_path / "hot"), exact.save_pretrained(tmp_path / "exact")
    files = {p.name for p in (tmp_path / "exact").iterdir()}
    assert {p.name for p in (tmp_path / "hot").iterdir()} == files | {"hot_config.json"}
    assert (tmp_path / "hot/config.json").read_text() == (tmp_path / "exact/config.json").read_text()
    weights = [(tmp_path / d / "model.safetensors").read_bytes() for d in ("hot", "exact")]
    assert weights[0] == weights[1]
    assert not patched(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hot"))
    for auto in (transformers.AutoModelForCausalLM, hot_hf.AutoModelForCausalLM):
        again = auto.from_pretrained(tmp_path / "hot", hot_config="saved")
        assert config_of(again) == config_of(model) and equal_states(again, model)
    hot_hf.uninstall()
    model.save_pretrained(tmp_path / "later")
    assert not (tmp_path / "later/hot_config.json").exists()


def test_install_twice_and_uninstall(llama_dir):
    """Idempotent both ways; afterwards PreTrainedModel has the very methods it had."""
    names = ("from_pretrained", "_from_config", "save_pretrained")
    before = {n: PreTrainedModel.__dict__[n] for n in names}
    hot_hf.install(), hot_hf.install()
    assert all(PreTrainedModel.__dict__[n] is not before[n] for n in names)
    hot_hf.uninstall(), hot_hf.uninstall()
    assert {n: PreTrainedModel.__dict__[n] for n in names} == before
    with pytest.raises(TypeError, match="hot_config"):
        transformers.LlamaForCausalLM.from_pretrained(llama_dir, hot_config="fast")


def test_another_wrapper_on_top(llama_dir):
    """A wrapper put on top of ours keeps working when we leave; we say so, do nothing more, and can come back."""
    original = PreTrainedModel.__dict__["from_pretrained"]
    hot_hf.install()
    ours, calls = PreTrainedModel.__dict__["from_pretrained"], []
    theirs = classmethod(lambda cls, *a, **k: calls.append(cls) or ours.__func__(cls, *a, **k))
    try:
        PreTrainedModel.from_pretrained = theirs
        assert patched(transformers.LlamaForCausalLM.from_pretrained(llama_dir, hot_config="fast"))
        with pytest.warns(UserWarning, match="from_pretrained was wrapped again"):
            hot_hf.uninstall()
        assert not patched(transformers.LlamaForCausalLM.from_pretrained(llama_dir))
        with pytest.raises(TypeError, match="hot_config"):
            transformers.LlamaForCausalLM.from_pretrained(llama_dir, hot_config="fast")
        hot_hf.install()
        assert PreTrainedModel.__dict__["from_pretrained"] is theirs
        assert patched(transformers.LlamaForCausalLM.from_pretrained(llama_dir, hot_config="fast"))
        assert len(calls) == 4
    finally:
        PreTrainedModel.from_pretrained = ours
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            hot_hf.uninstall()
    assert PreTrainedModel.__dict__["from_pretrained"] is original


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
        assert patched(model) == ["up", "down"] and equal_states(model, source)
        model(torch.randn(3, 64)).sum().backward()


def test_device_map_and_offload(auto, llama_dir, tmp_path):
    """C50: a device map leaves nothing on meta; with weights on disk both the hooks and HOT work."""
    exact = transformers.AutoModelForCausalLM.from_pretrained(llama_dir)
    inputs = token_batch()
    exact(**inputs).loss.backward()
    for device_map in ("cpu", "auto"):
        model = auto.AutoModelForCausalLM.from_pretrained(llama_dir, hot_config="default", device_map=device_map)
        assert len(patched(model)) == 14 and not any(p.is_meta for p in model.parameters())
        model(**inputs).loss.backward()
        assert 0 < relative_error(*(g["model.embed_tokens.weight"] for g in (grads(model), grads(exact)))) < 0.1

    device_map = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    device_map |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    model = auto.AutoModelForCausalLM.from_pretrained(
        llama_dir, hot_config="default", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    assert len(patched(model)) == 14 and model.model.layers[1].mlp.up_proj.weight.is_meta
    for parameter in model.model.layers[1].parameters():
        parameter.requires_grad_(False)  # weights on disk cannot be trained, here as without HOT
    out = model(**inputs)
    assert torch.equal(out.logits, exact(**inputs).logits)
    out.loss.backward()
    assert all(m.hot.called for m in model.modules() if isinstance(m, HOTMixin))
    assert 0 < relative_error(*(g["model.embed_tokens.weight"] for g in (grads(model), grads(exact)))) < 0.1


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
    assert 0 < relative_error(layer.weight.grad, exact.weight.grad) < 0.3
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
    assert not patched(model)


def test_tied_embeddings(tmp_path):
    """C23, C47: one Parameter, a summed gradient, kept through resizing, saving and loading, with HOT on the head."""
    model = tiny_llama(tie=True)
    apart = tiny_llama(tie=False)
    apart.load_state_dict(model.state_dict())
    for each in (model, apart):
        apply_hot(each, HOTConfig(skip_heads=False))
    assert "lm_head" in patched(model) and model.lm_head.weight is model.model.embed_tokens.weight
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


def test_states_load_into_each_other(tmp_path):
    """C46, C52: strict both ways; patching one of two models leaves the other and torch's F.linear alone."""
    linear = torch.nn.functional.linear
    a, b = tiny_llama(), tiny_llama()
    apply_hot(a)
    assert not patched(b) and torch.nn.functional.linear is linear
    b.load_state_dict(a.state_dict(), strict=True)
    assert equal_states(a, b)
    c = tiny_llama()
    a.load_state_dict(c.state_dict(), strict=True)
    assert equal_states(a, c)


def test_configuration_leaves_no_trace(tmp_path):
    """C48: the model's configuration prints, serializes and compares as without HOT."""
    model = tiny_llama()
    before = model.config.to_json_string()
    apply_hot(model, HOTConfig.paper())
    assert model.config.to_json_string() == before and "hot" not in str(model.config)
    assert json.loads(json.dumps(HOTConfig.paper().to_dict())) == HOTConfig.paper().to_dict()


def test_adapters_loaded_inside(auto, llama_dir, tmp_path):
    """A directory with LoRA adapters: base and adapters are loaded, then patched; lora_A on request. The configuration
    beside the adapters is the one meant by "saved", not the base model's."""
    peft = pytest.importorskip("peft")
    base = transformers.AutoModelForCausalLM.from_pretrained(llama_dir)
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False)
    adapted = peft.get_peft_model(base, lora)
    adapted.save_pretrained(tmp_path / "adapter")
    HOTConfig(lora=True, rank=3).save_pretrained(tmp_path / "adapter")
    HOTConfig.fast().save_pretrained(llama_dir)
    inputs = token_batch()
    for hot_config in (HOTConfig(lora=True, rank=3), "saved"):
        model = auto.AutoModelForCausalLM.from_pretrained(tmp_path / "adapter", hot_config=hot_config)
        names = patched(model)
        assert sum("lora_A" in n for n in names) == 4 and sum(n.endswith("base_layer") for n in names) == 4
        assert config_of(model) == HOTConfig(lora=True, rank=3)
        assert torch.equal(model(**inputs).logits, adapted(**inputs).logits)


def test_gguf_file(auto, tmp_path):
    """A GGUF file is dequantized by transformers; its layers are patched, trained and saved as any others."""
    gguf = pytest.importorskip("gguf")
    source = tiny_llama(layers=1)
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_context_length(128), writer.add_embedding_length(64), writer.add_block_count(1)
    writer.add_feed_forward_length(128), writer.add_head_count(4), writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-6), writer.add_rope_freq_base(10000.0), writer.add_vocab_size(97)
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
    names |= {"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
    names |= {"mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    layer = source.model.layers[0]
    tensors = {f"blk.0.{there}": layer.get_submodule(here).weight for here, there in names.items()}
    tensors |= {"token_embd": source.model.embed_tokens.weight, "output_norm": source.model.norm.weight}
    tensors["output"] = source.lm_head.weight
    for name, tensor in tensors.items():
        writer.add_tensor(f"{name}.weight", tensor.detach().numpy())
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    model = auto.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", hot_config="default")
    assert len(patched(model)) == 7
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, layer.mlp.up_proj.weight)
    args = transformers.TrainingArguments(tmp_path / "out", max_steps=1, report_to="none", use_cpu=True)
    data = [{k: v[0] for k, v in token_batch().items()}]
    transformers.Trainer(model, args, train_dataset=data).train()  # C49: not refused as a quantized model
    model.save_pretrained(tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())
    assert equal_states(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain"), model)

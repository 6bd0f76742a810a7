"""hot_config= in from_pretrained and from_config: our Auto classes, and install() for transformers' own."""

import json
import warnings

import pytest
import torch
import transformers
from transformers import PreTrainedModel

import hot_hf
from hot_hf import HOTConfig, HOTPatchError, apply_hot, config_of

from .architectures import build
from .models import equal_states, patched_names, tiny_llama, token_batch, twin

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
    assert patched_names(model) and config_of(model) == HOTConfig.fast()
    assert not patched_names(auto.from_pretrained(tmp_path))
    assert patched_names(auto.from_config(plain.config, hot_config="smallest"))
    assert not patched_names(auto.from_config(plain.config))


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
        assert not patched_names(cls.from_pretrained(llama_dir))
        assert not patched_names(cls.from_pretrained(llama_dir, hot_config=None))
    config = tiny_llama().config
    assert patched_names(transformers.AutoModelForCausalLM.from_config(config, hot_config="fast"))
    assert patched_names(transformers.LlamaForCausalLM._from_config(config, hot_config="fast"))
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
    assert not patched_names(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hot"))
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
        assert patched_names(transformers.LlamaForCausalLM.from_pretrained(llama_dir, hot_config="fast"))
        with pytest.warns(UserWarning, match="from_pretrained was wrapped again"):
            hot_hf.uninstall()
        assert not patched_names(transformers.LlamaForCausalLM.from_pretrained(llama_dir))
        with pytest.raises(TypeError, match="hot_config"):
            transformers.LlamaForCausalLM.from_pretrained(llama_dir, hot_config="fast")
        hot_hf.install()
        assert PreTrainedModel.__dict__["from_pretrained"] is theirs
        assert patched_names(transformers.LlamaForCausalLM.from_pretrained(llama_dir, hot_config="fast"))
        assert len(calls) == 4
    finally:
        PreTrainedModel.from_pretrained = ours
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            hot_hf.uninstall()
    assert PreTrainedModel.__dict__["from_pretrained"] is original


def test_states_load_into_each_other(tmp_path):
    """C46, C52: strict both ways; patching one of two models leaves the other and torch's F.linear alone."""
    linear = torch.nn.functional.linear
    a, b = tiny_llama(), tiny_llama()
    apply_hot(a)
    assert not patched_names(b) and torch.nn.functional.linear is linear
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
        names = patched_names(model)
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
    assert len(patched_names(model)) == 7
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, layer.mlp.up_proj.weight)
    args = transformers.TrainingArguments(tmp_path / "out", max_steps=1, report_to="none", use_cpu=True)
    data = [{k: v[0] for k, v in token_batch().items()}]
    transformers.Trainer(model, args, train_dataset=data).train()  # C49: not refused as a quantized model
    model.save_pretrained(tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())
    assert equal_states(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain"), model)

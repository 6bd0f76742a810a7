"""What a selection has chosen, when training starts again, at another batch size, under adapters, after unfreezing."""

import copy
import gc
import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import TrainerCallback

from hot_hf import HOTCallback, HOTConfig, apply_hot, fix_selection, report_of
from hot_hf.layers import HOTMixin
from hot_hf.monitor import never_called
from tests.models import patched, tiny_bert, tiny_llama, token_batch
from tests.training import layers, rows, trainer

CONFIGS = {
    "lqs": HOTConfig.paper(lqs_batches=2),
    "budget": HOTConfig(max_grad_error=0.3, lqs_batches=2),
    "bytes": HOTConfig(max_bytes="12.5%", lqs_batches=2),
}


def plans(model):
    return {name: layer.hot.plan for name, layer in layers(model).items()}


def saved(folder):
    state = json.loads((folder / "trainer_state.json").read_text())
    return state["stateful_callbacks"]["HOTCallback"]["attributes"]["selection"]


class OutOfMemory(TrainerCallback):
    """Raises once, in the forward after ``after`` steps, where the batch has more than ``rows`` rows."""

    def __init__(self, model, rows, after):
        self.rows, self.after, self.steps, self.raised = rows, after, 0, 0
        model.register_forward_pre_hook(self.check, with_kwargs=True)

    def check(self, model, args, kwargs):
        if model.training and len(kwargs["input_ids"]) > self.rows and self.steps >= self.after:
            self.raised += 1
            raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB")

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1


@pytest.mark.parametrize("config", CONFIGS)
def test_a_second_train_keeps_its_choices_and_saves_them(config, tmp_path):
    model, data = tiny_llama(), rows(24)
    run = trainer(model, data, tmp_path, [HOTCallback(CONFIGS[config])], save_strategy="steps", save_steps=3)
    run.train()
    chosen = plans(model)
    assert all(layer.hot.chosen for layer in layers(model).values())
    assert len(saved(tmp_path / "checkpoint-6")) == 14
    run.train()
    assert plans(model) == chosen
    for step in (3, 6):
        assert len(saved(tmp_path / f"checkpoint-{step}")) == 14
    fresh = tiny_llama()
    resumed = trainer(fresh, data, tmp_path, [HOTCallback(CONFIGS[config])], max_steps=7)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert plans(fresh) == chosen and all(layer.hot.probe is None for layer in layers(fresh).values())


@pytest.mark.parametrize("after", [1, 4], ids=["while it measures", "once it has chosen"])
@pytest.mark.parametrize("config", CONFIGS)
def test_a_smaller_batch_after_an_out_of_memory_error(config, after, tmp_path):
    """The retry measures at its own batch size, comes to choices and saves them."""
    model, data = tiny_llama(), rows(64)
    oom = OutOfMemory(model, 4, after)
    run = trainer(
        model, data, tmp_path, [HOTCallback(CONFIGS[config]), oom], per_device_train_batch_size=8,
        auto_find_batch_size=True, save_strategy="steps", save_steps=6,
    )  # fmt: skip
    run.train()
    assert oom.raised >= 1 and run.state.train_batch_size <= 4
    found = layers(model)
    assert all(layer.hot.chosen and layer.hot.probe is None for layer in found.values())
    assert len(saved(tmp_path / "checkpoint-6")) == 14
    if config != "lqs":  # measured of the smaller micro-batch: bytes of 4 rows of 12 tokens at most
        exact = [layer.hot.choice.exact_bytes for layer in found.values()]
        assert max(exact) <= run.state.train_batch_size * 12 * 128 * 4


def test_a_plan_for_a_memory_budget_is_made_anew_after_an_out_of_memory_error(tmp_path):
    model, data = tiny_llama(), rows(64)
    oom = OutOfMemory(model, 4, 1)
    run = trainer(
        model, data, tmp_path, [HOTCallback(HOTConfig(memory="1GiB")), oom], per_device_train_batch_size=8,
        auto_find_batch_size=True,
    )  # fmt: skip
    run.train()
    assert oom.raised and "predicted" in str(report_of(model))
    (fit,) = [h for h in model._forward_pre_hooks.values() if type(h).__name__ == "MemoryFit"]
    assert [shapes[0][0] for shapes in fit.fits] == [run.state.train_batch_size]


def lora(model, **settings):
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "query"], **settings))


def test_copies_of_one_module_have_names_and_choices_of_their_own(tmp_path):
    """modules_to_save keeps the original, and a copy for each adapter: only the active one is measured."""
    model = lora(tiny_llama(), modules_to_save=["down_proj"])
    model.add_adapter("other", LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["down_proj"]))
    apply_hot(model, HOTConfig.paper(lqs_batches=1))
    names = [m.hot.name for m in model.modules() if isinstance(m, HOTMixin)]
    assert len(names) == len(set(names))
    down = {name for name in names if "layers.0.mlp.down_proj" in name}
    assert "model.layers.0.mlp.down_proj" in down and len(down) == 3
    trained = model.base_model.model.model.layers[0].mlp.down_proj.modules_to_save["default"]
    assert trained.hot.name == "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize("old_file", [False, True])
def test_a_resumed_run_gives_the_trained_copy_its_choice(old_file, tmp_path):
    config = HOTConfig.paper(lqs_batches=1, lora=False)
    data = rows(8)
    model = lora(tiny_llama(), modules_to_save=["down_proj"])
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    trainer(model, data, tmp_path, [HOTCallback(config)], **settings).train()
    path = tmp_path / "checkpoint-2" / "trainer_state.json"
    state = json.loads(path.read_text())
    attributes = state["stateful_callbacks"]["HOTCallback"]["attributes"]
    name = "model.layers.0.mlp.down_proj"
    other = {"per_token": "per_tensor", "per_tensor": "per_token"}[attributes["selection"][name]]
    attributes["selection"][name] = other  # so that it can be told from what would be measured
    if old_file:  # as before: canonical names alone, and fewer fields
        attributes["selection"] = {n: g for n, g in attributes["selection"].items() if "original_module" not in n}
        del attributes["batch_size"]
        first = json.loads(attributes["measured_with"])
        for field in ("memory", "chunked_loss"):
            del first[0][field]
        attributes["measured_with"] = json.dumps(first)
    path.write_text(json.dumps(state))
    again = lora(tiny_llama(), modules_to_save=["down_proj"])
    trainer(again, data, tmp_path, [HOTCallback(config)], max_steps=3).train(resume_from_checkpoint=str(path.parent))
    wrapper = again.base_model.model.model.layers[0].mlp.down_proj
    assert wrapper.modules_to_save["default"].hot.plan.grad_input_granularity == other
    assert wrapper.modules_to_save["default"].hot.chosen


def test_the_audit_leaves_out_what_peft_has_switched_off():
    model = lora(tiny_llama(), modules_to_save=["down_proj"])
    apply_hot(model, HOTConfig())
    model(**token_batch()).loss.backward()
    assert never_called(model) == []


def bert_for_masked(settings):
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, tie_word_embeddings=settings,
    )  # fmt: skip
    return BertForMaskedLM(config), "decoder", token_batch(), ["word_embeddings"]


def whisper(tie):
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=97, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, pad_token_id=0,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, num_mel_bins=16, max_source_positions=20,
        max_target_positions=40, decoder_start_token_id=1, bos_token_id=1, eos_token_id=2, suppress_tokens=[],
        begin_suppress_tokens=[], tie_word_embeddings=tie,
    )  # fmt: skip
    batch = {"input_features": torch.randn(2, 16, 40), "labels": torch.randint(3, 97, (2, 12))}
    return WhisperForConditionalGeneration(config), "proj_out", batch, ["embed_tokens"]


def gpt2(tie):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=97, n_embd=64, n_layer=1, n_head=4, n_positions=64, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
        tie_word_embeddings=tie,
    )  # fmt: skip
    return GPT2LMHeadModel(config), "lm_head", token_batch(), ["wte"]


def llama(tie):
    return tiny_llama(layers=1, tie=tie), "lm_head", token_batch(), ["embed_tokens"]


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("wrapping", ["bare", "modules_to_save", "tokens", "adapter on the head"])
@pytest.mark.parametrize("family", [bert_for_masked, whisper, gpt2, llama], ids=lambda f: f.__name__)
def test_a_head_is_a_head_under_any_wrapper(family, wrapping, tie):
    """The head stays exact, and nothing of it is patched but what an adapter adds."""
    model, head, batch, embeddings = family(tie)
    targets = {"gpt2": ["c_attn"], "bert_for_masked": ["query"]}.get(family.__name__, ["q_proj"])
    settings = {
        "bare": None,
        "modules_to_save": {"modules_to_save": [head]},
        "tokens": {"trainable_token_indices": {name: [3, 5] for name in (*embeddings, *([] if tie else [head]))}},
        "adapter on the head": {"target_modules": [*targets, head]},
    }[wrapping]
    if settings is not None:
        model = get_peft_model(model, LoraConfig(r=4, **{"target_modules": targets, **settings}))
    report = apply_hot(model, HOTConfig())
    model.train()(**batch).loss.backward()
    heads = [row for row in report.rows if f".{head}." in f".{row.name}."]
    assert heads and all(row.action == "exact" or ".lora_A." in row.name for row in heads), heads
    assert all("output head" in row.reason for row in heads if "lora_" not in row.name)


def test_layers_that_start_to_train_after_a_choice_are_exact_there():
    """Frozen while a budget measured: what was not measured is exact once it is asked for, and the report shows it."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    for p in model[1].parameters():
        p.requires_grad_(False)
    apply_hot(model, HOTConfig(max_grad_error=0.5, lqs_batches=1))
    x = torch.randn(32, 64)
    model(x).square().sum().backward()
    fix_selection(model)
    assert model[1].hot.plan.activation_format == "none" and model[0].hot.plan.grad_input_bits is None
    model.requires_grad_(True)
    exact = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    exact.load_state_dict(model.state_dict())
    for layer in (model[0], model[2]):
        layer.hot.paused = True  # so that only the layer in the middle could differ
    model.zero_grad()
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for m, i in zip((model, exact), inputs, strict=True):
        m(i).square().sum().backward()
    torch.testing.assert_close(model[1].weight.grad, exact[1].weight.grad, rtol=1e-5, atol=1e-5)
    assert " / none" in str(report_of(model))


def test_choices_survive_a_copy():
    model = patched(tiny_bert(layers=1), HOTConfig.paper(lqs_batches=1))
    batch = {**token_batch(), "labels": torch.zeros(2, dtype=torch.long)}
    for _ in range(2):
        model(**batch).loss.backward()
    fix_selection(model)
    twin = copy.deepcopy(model)
    assert plans(twin) == plans(model) and all(layer.hot.chosen for layer in layers(twin).values())


def test_the_callback_tells_choices_when_the_model_is_gone(tmp_path):
    callback = HOTCallback(CONFIGS["lqs"])
    trainer(tiny_llama(), rows(12), tmp_path, [callback], max_steps=3).train()
    gc.collect()
    assert len(callback.selection) == 14 and set(callback.selection.values()) <= {"per_token", "per_tensor"}

"""Checkpointed blocks of models that fill a cache of keys and values, in training as in generation."""

import copy

import pytest
import torch
from peft import PrefixTuningConfig, get_peft_model

from hot_hf import HOTConfig, apply_hot
from hot_hf.block import boundaries
from tests.models import grads, tiny_llama, token_batch, whole_error
from tests.test_restarts import gpt2, whisper

EXACT_LAYERS = {"grad_input_bits": None, "activation_format": "none"}


@pytest.fixture(autouse=True)
def small_inputs(monkeypatch):
    monkeypatch.setattr(boundaries, "SMALLEST", 1)


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=97, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0,
        dropout_rate=0.0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config), token_batch(2, 12)


def llama():
    return tiny_llama(use_cache=True), token_batch()


MODELS = {
    "t5": t5,
    "llama": llama,
    "whisper": lambda: whisper(True)[0::2],
    "gpt2": lambda: gpt2(True)[0::2],
}


@pytest.mark.parametrize("config", [{"compress": "checkpoint"}, {"memory": "1GiB"}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_with_caches_on(name, config):
    """use_cache is on by default in these; losses and gradients are those of the plain model."""
    model, batch = MODELS[name]()
    model.train()
    exact = copy.deepcopy(model)
    apply_hot(model, HOTConfig(**config, **EXACT_LAYERS))
    losses = []
    for m in (model, exact):
        losses.append(m(**batch).loss)
        losses[-1].backward()
    assert torch.equal(*losses)
    # int8 of a few boundaries: 0.003 to 0.02, and 0.06 through the unscaled attention of T5.
    assert whole_error(grads(model), grads(exact)) < 0.15


def test_generation_fills_its_cache():
    model, batch = llama()
    apply_hot(model, HOTConfig(compress="checkpoint"))
    out = model.eval()(input_ids=batch["input_ids"], use_cache=True)
    assert out.past_key_values.get_seq_length() == batch["input_ids"].shape[1]


def test_prefix_tuning_is_not_run_twice():
    """Its prompts come as a cache with keys: such blocks run once, and a warning says so."""
    base, batch = llama()
    model = get_peft_model(base, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).train()
    exact = copy.deepcopy(model)
    apply_hot(model, HOTConfig(compress="checkpoint", **EXACT_LAYERS))
    with pytest.warns(UserWarning, match="is not checkpointed"):
        model(**batch).loss.backward()
    exact(**batch).loss.backward()
    assert grads(model) and whole_error(grads(model), grads(exact)) < 1e-5

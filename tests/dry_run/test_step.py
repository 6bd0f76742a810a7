"""A dry run's peak is that of a real step, tensor by tensor; LiveBytes counts what it should."""

import gc

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from hot_hf import HOTConfig, apply_hot
from hot_hf.dry_run import DryRun, LiveBytes, batch_without_data, without_data
from hot_hf.logits import heads
from tests.models import image_batch, tiny_bert, tiny_llama, tiny_vit, token_batch

# What the CPU's own attention and products take inside one operator is seen in neither; the rest is the same operators.
SAME = 0.02
PLANS = {
    "exact": None,
    "inputs": HOTConfig(compress="inputs"),
    "block": HOTConfig(compress="block"),
    "checkpoint": HOTConfig(compress="checkpoint"),
    "mixed": HOTConfig(compress={"*.0": "block", "*.1": "checkpoint", "*.2": "exact"}),
}
FAMILIES = {
    "llama": lambda: (tiny_llama(layers=4, hidden=128, vocab_size=999), token_batch(4, 96)),
    "vit": lambda: (tiny_vit(layers=4), image_batch(32)),
    "bert": lambda: (tiny_bert(layers=4), {**token_batch(4, 96), "labels": torch.zeros(4, dtype=torch.long)}),
}


@pytest.fixture(autouse=True)
def any_loss(monkeypatch):
    """In chunks at any size."""
    monkeypatch.setattr(heads, "SMALLEST_BYTES", 1)


def real_peak(model: nn.Module, batch: dict, autocast: torch.dtype | None = None) -> int:
    """The most bytes alive in a real step, counted by the same mode over real tensors."""
    model.zero_grad()
    gc.collect()
    with LiveBytes([*model.parameters(), *model.buffers(), *batch.values()]) as live:
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            loss = model(**batch).loss
        loss.backward()
    return live.peak


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("family", FAMILIES)
def test_peak_is_that_of_a_real_step(family, plan):
    model, batch = FAMILIES[family]()
    model.train()
    if PLANS[plan] is not None:
        apply_hot(model, PLANS[plan])
    real_peak(model, batch)  # rotary tables and other things that are made once
    found = DryRun(without_data(model), "cpu")(**batch_without_data(batch))
    assert found.peak == pytest.approx(real_peak(model, batch), rel=SAME)
    assert 0 < found.kept <= found.peak


@pytest.mark.parametrize("plan", ["exact", "inputs", "checkpoint"])
def test_under_autocast(plan):
    model, batch = FAMILIES["llama"]()
    model.train()
    if PLANS[plan] is not None:
        apply_hot(model, PLANS[plan])
    real_peak(model, batch, torch.bfloat16)
    found = DryRun(without_data(model), "cpu", torch.bfloat16)(**batch_without_data(batch))
    assert found.peak == pytest.approx(real_peak(model, batch, torch.bfloat16), rel=SAME)


def test_accumulated_gradients_are_there_from_the_start():
    model, batch = FAMILIES["llama"]()
    grads = sum(p.numel() * p.element_size() for p in model.parameters())
    once = DryRun(without_data(model.train()), "cpu")(**batch_without_data(batch))
    again = DryRun(without_data(model), "cpu", accumulating=True)(**batch_without_data(batch))
    model(**batch).loss.backward()
    with LiveBytes(
        [*model.parameters(), *model.buffers(), *batch.values(), *(p.grad for p in model.parameters())]
    ) as live:
        model(**batch).loss.backward()
    assert again.peak == pytest.approx(live.peak + grads, rel=SAME)
    assert once.peak < again.peak <= once.peak + grads


def test_live_bytes_of_views_and_deaths():
    with LiveBytes([]) as live:
        x = torch.zeros(1000)
        y = x[:10].view(2, 5)  # no bytes of its own
        assert live.now == 4000
        z = x + 1
        del x
        assert live.now == 8000 and y.numel() == 10
        del y, z
    assert live.now == 0 and live.peak == 8000


def test_a_copy_without_data_has_nothing_of_the_original():
    model, _ = FAMILIES["llama"]()
    apply_hot(model, HOTConfig(compress="block"))
    copy = without_data(model)
    assert all(t.is_meta for t in (*copy.parameters(), *copy.buffers()))
    assert [n for n, _ in copy.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert copy.training == model.training and copy.model.layers[0].hot_block is not model.model.layers[0].hot_block
    tied = without_data(tiny_llama(tie=True))
    assert tied.lm_head.weight is tied.model.embed_tokens.weight


def test_a_model_that_asks_for_values_is_named():
    config = MixtralConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=97, num_local_experts=2, experts_implementation="eager",
    )  # fmt: skip
    with pytest.raises(ValueError, match="MixtralForCausalLM cannot run on meta tensors"):
        DryRun(without_data(MixtralForCausalLM(config).train()), "cpu")(**batch_without_data(token_batch(2, 8)))

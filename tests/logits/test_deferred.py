"""Deferred logits in whole models: the plain loss and gradients, and logits only for those who look at them."""

import copy

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig, BertForMaskedLM, Gemma2Config, Gemma2ForCausalLM, RobertaConfig, RobertaForMaskedLM

from hot_hf import HOTConfig, apply_hot, remove_hot, report_of
from hot_hf.logits.deferred import DeferredLogits
from tests.architectures import ARCHITECTURES, batch, build
from tests.models import grads, relative_error, tiny_bert, tiny_llama, tiny_vit, token_batch, twin, whole_error

# Float32 sums of a few dozen terms in another order, through a model of one or two layers.
CLOSE = 2e-5
# Nothing but the head: every other layer stays exact.
HEAD_ALONE = HOTConfig(grad_input_bits=None, activation_format="none")
_SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 128,
}
MASKED = {
    "BERT": lambda: BertForMaskedLM(BertConfig(**_SMALL)),
    "RoBERTa": lambda: RobertaForMaskedLM(RobertaConfig(**_SMALL, max_position_embeddings=64)),
}
WITH_HEAD = [
    name for name, row in ARCHITECTURES.items() if row[0].endswith(("ForCausalLM", "LMHeadModel", "Generation"))
]


def models(name):
    if name in MASKED:
        return MASKED[name](), token_batch(length=16)
    return build(name), batch(name)


def pair(model, config=HEAD_ALONE):
    """The model with a head that defers, and its exact twin, both in training."""
    exact = model.train()
    hot = twin(exact)
    apply_hot(hot, config)
    return hot, exact


def step(model, inputs, seed=0):
    torch.manual_seed(seed)  # dropout
    model.zero_grad()
    out = model(**inputs)
    out.loss.backward()
    return out


@pytest.mark.parametrize("name", [*WITH_HEAD, *MASKED])
def test_every_model_with_a_head(name, deferring):
    """Causal, masked and encoder-decoder models: the plain loss and gradients, and no logits made."""
    model, inputs = models(name)
    hot, exact = pair(model)
    got, want = step(hot, inputs), step(exact, inputs)
    assert isinstance(got.logits, DeferredLogits) and deferring == []
    assert got.loss.item() == pytest.approx(want.loss.item(), rel=CLOSE)
    assert grads(hot).keys() == grads(exact).keys() and whole_error(grads(hot), grads(exact)) < CLOSE
    assert got.logits.shape == want.logits.shape and got.logits.dtype == want.logits.dtype
    assert torch.equal(got.logits + 0, want.logits) and len(deferring) == 1


def test_heads_without_a_token_wise_loss_are_as_before(deferring):
    """Classifiers, and models whose loss reads their features: nothing is deferred."""
    for model, inputs in ((tiny_vit(), None), (tiny_bert(), None)):
        assert not any("loss" in note for note in apply_hot(model, HEAD_ALONE).notes), inputs


def settings(**more):
    """A Gemma 2: capped logits, tied head."""
    return Gemma2Config(**_SMALL, num_key_value_heads=2, head_dim=32, pad_token_id=0, **more)


@pytest.mark.parametrize("cap", [0.5, None])
def test_capped_logits(cap, deferring):
    """A cap that bends every logit is applied chunk by chunk."""
    hot, exact = pair(Gemma2ForCausalLM(settings(final_logit_softcapping=cap)))
    inputs = token_batch(length=16)
    assert step(hot, inputs).loss.item() == pytest.approx(step(exact, inputs).loss.item(), rel=CLOSE)
    assert deferring == [] and whole_error(grads(hot), grads(exact)) < CLOSE


@pytest.mark.parametrize("count", [5, torch.tensor(37), None])
def test_num_items_and_ignored_labels(count, deferring):
    """``num_items_in_batch`` as Trainer hands it on, and prompts that do not count."""
    hot, exact = pair(tiny_llama())
    inputs = token_batch()
    inputs["labels"][:, :10] = -100
    more = {} if count is None else {"num_items_in_batch": count}
    assert step(hot, {**inputs, **more}).loss.item() == pytest.approx(
        step(exact, {**inputs, **more}).loss.item(), rel=CLOSE
    )
    assert deferring == [] and whole_error(grads(hot), grads(exact)) < CLOSE


def test_accumulation_and_tied_heads(deferring):
    """Two micro-batches add up, in the embedding that is the head too."""
    hot, exact = pair(tiny_llama(tie=True))
    for inputs in (token_batch(), token_batch()):
        for model in (hot, exact):
            (model(**inputs).loss / 2).backward()
    assert deferring == [] and whole_error(grads(hot), grads(exact)) < CLOSE


LOOKS = {
    "a copy": lambda logits: logits.clone(),
    "a metric": lambda logits: logits.softmax(-1).max(-1).values,
    "a slice of the vocabulary": lambda logits: logits[..., :7],
    "a product": lambda logits: logits @ torch.ones(97, 2),
    "numpy": lambda logits: torch.from_numpy(logits.detach().numpy()),
    "a list": lambda logits: torch.tensor(logits.tolist()),
    "printed": lambda logits: torch.tensor(len(repr(logits))),
    "in place": lambda logits: logits.mul_(2.0),
    "per example": lambda logits: torch.stack([torch.logsumexp(row, -1) for row in logits]),
    "double": lambda logits: logits.double().sum(),
    "out": lambda logits: torch.exp(logits, out=torch.empty(0)) if not logits.requires_grad else logits.exp(),
}


@pytest.mark.parametrize("look", LOOKS)
def test_whoever_looks_sees_the_logits(look, deferring):
    hot, exact = pair(tiny_llama())
    inputs = token_batch()
    got, want = (LOOKS[look](model(**inputs).logits) for model in (hot, exact))
    assert not isinstance(got, DeferredLogits) and len(deferring) == 1
    assert torch.equal(got, want) if look != "printed" else True


LOSSES = {
    "label smoothing": lambda logits, labels: F.cross_entropy(
        logits.view(-1, 97), labels.view(-1), label_smoothing=0.1
    ),
    "per token": lambda logits, labels: F.cross_entropy(logits.view(-1, 97), labels.view(-1), reduction="none").mean(),
    "class weights": lambda logits, labels: F.cross_entropy(logits.view(-1, 97), labels.view(-1), torch.arange(97.0)),
    "channels second": lambda logits, labels: F.cross_entropy(logits.transpose(1, 2), labels),
    "negative likelihood": lambda logits, labels: F.nll_loss(logits.log_softmax(-1).flatten(0, 1), labels.flatten()),
    "gathered": lambda logits, labels: (
        -(logits.gather(-1, labels[..., None]).squeeze(-1) - logits.logsumexp(-1)).mean()
    ),
    "distillation": lambda logits, labels: F.kl_div(
        logits.log_softmax(-1), torch.full_like(logits, 1 / 97), reduction="batchmean"
    ),
    "one's own function": lambda logits, labels: _Own.apply(logits, labels),
}


class _Own(torch.autograd.Function):
    """A cross-entropy that works on tensors as they are, below ``__torch_function__``."""

    @staticmethod
    def forward(ctx, logits, labels):
        p = torch.ops.aten.softmax(logits, -1)
        one_hot = F.one_hot(labels, logits.shape[-1])
        ctx.save_for_backward(p - one_hot)
        return -(p * one_hot).sum(-1).log().mean()

    @staticmethod
    def backward(ctx, g):
        (d,) = ctx.saved_tensors
        return g * d / (d.numel() // d.shape[-1]), None


@pytest.mark.parametrize("loss", LOSSES)
def test_other_losses_are_as_before(loss, deferring):
    """A loss that is not the plain one reads real logits, and its gradients reach head and body."""
    hot, exact = pair(tiny_llama())
    inputs = token_batch()
    values = []
    for model in (hot, exact):
        value = LOSSES[loss](model(inputs["input_ids"]).logits, inputs["labels"])
        value.backward()
        values.append(value.item())
    assert values[0] == pytest.approx(values[1], rel=CLOSE) and whole_error(grads(hot), grads(exact)) < CLOSE


def test_a_users_plain_loss_is_in_chunks_too(deferring):
    """The shift by hand, as older scripts have it."""
    hot, exact = pair(tiny_llama())
    inputs = token_batch()
    for model in (hot, exact):
        logits = model(inputs["input_ids"]).logits
        shifted = logits[..., :-1, :].contiguous().view(-1, logits.size(-1))
        nn.CrossEntropyLoss()(shifted, inputs["labels"][..., 1:].reshape(-1)).backward()
    assert deferring == [] and whole_error(grads(hot), grads(exact)) < CLOSE


def test_accuracy_does_not_bring_the_logits_back(deferring):
    """The accuracy that trainers log: argmax in chunks, on a shifted and a detached view as well."""
    hot, exact = pair(tiny_llama())
    inputs = token_batch()
    got, want = hot(**inputs).logits, exact(**inputs).logits
    for view in (lambda t: t, lambda t: t[..., :-1, :].contiguous(), lambda t: t.detach(), lambda t: t.view(-1, 97)):
        assert torch.equal(view(got).argmax(-1), view(want).argmax(dim=-1))
        assert torch.equal(view(got).argmax(-1, keepdim=True), view(want).argmax(-1, keepdim=True))
    assert deferring == []
    assert torch.equal(got.argmax(), want.argmax()) and len(deferring) == 1


INDICES = [
    (slice(None), slice(1, None)),
    (Ellipsis, slice(None, -1), slice(None)),
    (0,),
    (slice(None), -1),
    (Ellipsis, slice(None)),
    (torch.tensor([1, 0]),),
    (slice(None), slice(None), slice(3, 7)),
    (slice(None), slice(None), 5),
    (None, 0),
    (Ellipsis, 2),
    (torch.rand(2, 24) > 0.5,),
    (torch.rand(2, 24) > 0.5, slice(None, 3)),
]


@pytest.mark.parametrize("index", INDICES, ids=range(len(INDICES)))
def test_indices(index, deferring):
    """Whatever is picked is what the plain logits have there."""
    hot, exact = pair(tiny_llama())
    inputs = token_batch()
    got, want = hot(**inputs).logits[index], exact(**inputs).logits[index]
    assert got.shape == want.shape and torch.allclose(got + 0, want, atol=1e-6)


def test_logits_of_a_step_that_is_over(deferring):
    """After the optimizer step the head is another one: an error, not other logits."""
    hot, _ = pair(tiny_llama())
    out = step(hot, token_batch())
    torch.optim.SGD(hot.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match="after the head's weight had changed"):
        out.logits.softmax(-1)
    out = step(hot, token_batch())
    seen = out.logits.clone()
    torch.optim.SGD(hot.parameters(), lr=0.1).step()
    assert torch.equal(out.logits, seen)  # made in time


def test_evaluation_and_generation(deferring):
    """Without gradients, in evaluation and in generation the head is nn.Linear, in training mode too."""
    hot, exact = pair(tiny_llama())
    inputs = token_batch()
    with torch.no_grad():
        assert type(hot(**inputs).logits) is torch.Tensor
    hot.eval(), exact.eval()
    assert type(hot(**inputs).logits) is torch.Tensor
    ids = inputs["input_ids"][:, :4]
    assert torch.equal(hot.generate(ids, max_new_tokens=5), exact.generate(ids, max_new_tokens=5))


def test_left_alone_and_said(deferring):
    """A head that is patched itself, one under LoRA, and the choice not to."""
    assert not any("loss" in n for n in apply_hot(tiny_llama(), HOTConfig(chunked_loss=False)).notes)
    report = apply_hot(tiny_llama(), HOTConfig(skip_heads=False))
    assert any("patched itself" in note for note in report.notes)
    adapted = peft.get_peft_model(tiny_llama(), peft.LoraConfig(target_modules=["q_proj", "lm_head"]))
    assert any("an adapter adds to" in note for note in apply_hot(adapted).notes)
    model = tiny_llama()
    apply_hot(model)
    assert any("loss: in chunks" in note for note in report_of(model).notes)
    remove_hot(model)
    assert type(model.lm_head) is nn.Linear


def test_copies_and_state_dicts(deferring):
    """A copy defers as well; nothing is added to the state."""
    hot, exact = pair(tiny_llama())
    assert hot.state_dict().keys() == exact.state_dict().keys()
    other = copy.deepcopy(hot)
    step(other, token_batch())
    assert deferring == [] and type(other.lm_head) is type(hot.lm_head)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype, deferring):
    """Products of the head in autocast's type, the loss in float32, gradients in the weights' own: near what plain
    autocast gives, and nearer to float32's than twice its distance."""
    hot, exact = pair(tiny_llama())
    inputs, wide = token_batch(), twin(exact)
    step(wide, inputs)
    for model in (hot, exact):
        with torch.autocast("cpu", dtype):
            out = model(**inputs)
        out.loss.backward()
    assert deferring == [] and all(p.grad.dtype == torch.float32 for p in hot.parameters())
    assert whole_error(grads(hot), grads(wide)) < 2 * whole_error(grads(exact), grads(wide))
    assert relative_error(hot.lm_head.weight.grad, wide.lm_head.weight.grad) < 0.02  # 2^-8 an entry, not summed up


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant, deferring):
    hot, exact = pair(tiny_llama())
    inputs = token_batch()
    hot.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    step(hot, inputs), step(exact, inputs)
    assert deferring == [] and whole_error(grads(hot), grads(exact)) < CLOSE


def test_compiled_models_make_their_logits(deferring):
    """Inside a graph the compiler decides what is kept."""
    hot, exact = pair(tiny_llama())
    inputs = token_batch()
    out = torch.compile(hot, backend="aot_eager", fullgraph=True)(**inputs)
    out.loss.backward()
    step(exact, inputs)
    assert type(out.logits) is torch.Tensor and whole_error(grads(hot), grads(exact)) < CLOSE

"""What is kept for the backward, measured through autograd's own hooks; and that it does not grow."""

import gc

import pytest
import torch
from torch import nn

from hot_hf import HOTConfig, HOTLinear, apply_hot
from hot_hf.memory import SavedTensors
from hot_hf.ops import FORMATS
from tests.models import image_batch, mlp, tiny_llama, tiny_vit, token_batch, twin


def test_saved_tensors_counts_storages_once():
    """Views and repeated saves of one storage count once, with the whole storage; parameters not at all."""
    model = nn.Linear(64, 32)
    x = torch.randn(10, 64, requires_grad=True)
    with SavedTensors(model) as saved:
        y = model(x)
        assert saved.total_bytes == x.nbytes  # x for the weight; the weight itself is a parameter
        z = (y[:5] * y[5:]).sum() + y.exp().sum()
    # exp keeps its result; the product keeps two views of y.
    assert saved.total_bytes == x.nbytes + 2 * y.nbytes
    assert saved.bytes_of([""]) == saved.total_bytes and saved.bytes_of(["no such module"]) == 0
    z.backward()
    assert x.grad.any()


def test_saved_tensors_names_owners():
    model = mlp(64, 64, 64)
    x = torch.randn(10, 64)
    with SavedTensors(model) as saved:
        model(x)
    # Each linear layer its input, GELU the first one's output; the last one's input is GELU's output.
    assert saved.bytes_of(["0"]) == saved.bytes_of(["1"]) == saved.bytes_of(["2"]) == x.nbytes
    assert saved.total_bytes == 3 * x.nbytes and saved.hot_bytes == 0
    with SavedTensors(model) as saved, torch.no_grad():
        model(x)
    assert saved.total_bytes == 0
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_saved_tensors_leaves_the_model_as_it_was_on_errors():
    model = mlp(64, 64)
    with pytest.raises(RuntimeError), SavedTensors(model):
        model(torch.randn(2, 3))
    assert not model[0]._forward_hooks and not model[0]._forward_pre_hooks
    model(torch.randn(2, 64)).sum().backward()


def _inputs_of(model, names, batch) -> int:
    """Bytes of the distinct inputs of the named layers in float32."""
    seen: dict[int, torch.Tensor] = {}
    handles = [
        model.get_submodule(n).register_forward_pre_hook(lambda m, args: seen.update({id(args[0]): args[0]}))
        for n in names
    ]
    model(**batch)
    for handle in handles:
        handle.remove()
    return sum(4 * t.numel() for t in seen.values())


@pytest.mark.parametrize("fmt", list(FORMATS))
@pytest.mark.parametrize("family", [(tiny_llama, token_batch), (tiny_vit, image_batch)], ids=["llama", "vit"])
def test_kept_share_of_float32(family, fmt):
    """At most 1/8 of float32 plus scales for the 4-bit formats and hla_int8; measured on whole models."""
    model, batch = family[0](), family[1](rows=8)
    names = apply_hot(model, HOTConfig(activation_format=fmt, rank=8)).patched
    full = _inputs_of(model, names, batch)
    with SavedTensors(model) as saved:
        loss = model(**batch).loss
    share = {"ht_int4": 1 / 8, "hla_int8": 1 / 8, "hla_int4": 1 / 16, "int8": 1 / 4}[fmt]
    tokens = 8 * (24 if family[0] is tiny_llama else 17)
    distinct = 2 * 4  # two blocks of q/k/v, o, first and last MLP input
    if fmt.startswith("hla"):
        features = 2 * (3 * 64 + 128)
        padding = 16 * 2 * (3 * 64 + 128) * 4 * share  # up to one block of tokens
        assert saved.hot_bytes <= full * share + 4 * features + padding
    else:
        assert saved.hot_bytes == full * share + 4 * tokens * distinct
    loss.backward()


@pytest.mark.parametrize("fmt", [*FORMATS, "none"])
def test_frozen_weights_keep_nothing(fmt):
    """spec.md, section 4: a layer whose weight needs no gradient keeps nothing of x; its neighbours do."""
    model = mlp(64, 64, 64, 64)
    model[2].weight.requires_grad_(False)
    apply_hot(model, HOTConfig(activation_format=fmt))
    with SavedTensors(model) as saved:
        model(torch.randn(96, 64))
    assert saved.bytes_of(["2"]) == 0
    assert saved.bytes_of(["0"]) > 0 and saved.bytes_of(["4"]) > 0


def test_frozen_base_under_lora_keeps_nothing():
    """A frozen Llama under LoRA: the patched base layers keep nothing of their inputs."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_llama(2), LoraConfig(r=4, target_modules="all-linear"))
    report = apply_hot(model, HOTConfig(lora=False))
    assert len(report.patched) == 14
    with SavedTensors(model) as saved:
        loss = model(**token_batch()).loss
    assert saved.hot_bytes == 0
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_keeps_nothing(mode):
    """Must show: no_grad and inference_mode keep and quantize nothing, on a whole model, with the exact output."""
    model = tiny_llama(1)
    exact = twin(model)
    apply_hot(model)
    batch = token_batch()
    with mode(), SavedTensors(model) as saved:
        logits = model(**batch).logits
    assert saved.total_bytes == 0
    with torch.no_grad():
        assert torch.equal(logits, exact(**batch).logits)


def test_less_is_kept_than_by_the_exact_model():
    """The whole model's bytes, not only those of patched layers."""
    exact = tiny_llama(2)
    model = twin(exact)
    apply_hot(model)
    batch, totals = token_batch(4, 64), []
    for m in (exact, model):
        with SavedTensors(m) as saved:
            m(**batch)
        totals.append(saved.total_bytes)
    assert totals[1] < 0.9 * totals[0]


def _tensors() -> tuple[int, int]:
    gc.collect()
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    return len(tensors), sum(t.untyped_storage().nbytes() for t in tensors)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_memory_stays_flat(rounding):
    """C54: 200 steps of varying lengths, every fourth forward without a backward: no tensor more, no byte more."""
    model = mlp(64, 96, 64)
    apply_hot(model, HOTConfig(rounding=rounding, grad_input_granularity="lqs", lqs_batches=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(i: int) -> None:
        loss = model(torch.randn(1 + i % 37, 64)).square().sum()
        if i % 4 != 3:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    for i in range(10):
        step(i)
    before = _tensors()
    for i in range(200):
        step(i)
    count, nbytes = _tensors()
    assert count <= before[0] and nbytes <= before[1]  # less where an earlier test left something behind
    assert not any(isinstance(v, torch.Tensor) for m in model if isinstance(m, HOTLinear) for v in vars(m.hot).values())

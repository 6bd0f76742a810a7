"""Plans for a budget: they fit, more memory is never slower, and a budget that is too small says what would do."""

import copy
import json

import pytest
import torch
from torch import nn

from hot_hf import HOTConfig, apply_hot, remove_hot, report_of
from hot_hf.block import compressed_blocks
from hot_hf.cli import main
from hot_hf.dry_run import LiveBytes, batch_without_data, optimizer_bytes, without_data
from hot_hf.fit import Fitter, forget_fit, largest_that_fits, relative_costs
from hot_hf.fit.fitter import _hull
from hot_hf.patching import HOTPatchError
from tests.models import grads, tiny_llama, tiny_vit, token_batch, whole_error

ORDER = ["checkpoint", "block", "inputs"]  # of falling time in float32 on a CPU


def llama(layers=6, **settings):
    return tiny_llama(layers=layers, hidden=128, **settings).train(), token_batch(8, 96)


def fitter(model, batch, **settings):
    apply_hot(model, HOTConfig(memory=2**40))
    copy = without_data(model)
    forget_fit(copy)
    return Fitter(copy, (), batch_without_data(batch), **{"device": "cpu", "dtype": torch.float32, **settings})


def real_total(model, batch):
    """The peak of a real step and what is there before it, AdamW's state included."""
    model.zero_grad()
    with LiveBytes([*model.parameters(), *model.buffers(), *batch.values()]) as live:
        model(**batch).loss.backward()
    states = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    return live.peak + states + optimizer_bytes(model, "adamw")


def ends(model, batch):
    """(least, most) bytes that plans for this step take, by prediction."""
    found = fitter(copy.deepcopy(model), batch)
    return found.at(0).total, found.at(len(found.upgrades)).total


def test_more_memory_is_never_slower_and_always_fits():
    model, batch = llama()
    found = fitter(model, batch)
    least, most = found.at(0).total, found.at(len(found.upgrades)).total
    assert found.within(least - 1) is None
    plans = [found.within(int(least + share * (most - least))) for share in (0, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9, 1, 2)]
    times = [plan.time for plan in plans]
    assert times == sorted(times, reverse=True) and len(set(times)) > 4
    assert all(
        plan.total <= least + share * (most - least) + 1
        for plan, share in zip(plans[:8], (0, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9, 1), strict=True)
    )
    assert set(plans[-1].modes.values()) == {"inputs"} and set(plans[0].modes.values()) <= {"checkpoint", "block"}


def test_the_real_step_stays_within_the_budget():
    """Trained with memory= the bytes alive never exceed it, and use most of it."""
    model, batch = llama()
    least, most = ends(model, batch)
    budget = (least + most) // 2
    apply_hot(model, HOTConfig(memory=budget))
    model(**batch).loss.backward()  # chooses; and makes what is made once
    modes = [block.hot_block.mode for block in compressed_blocks(model).values()]
    assert len(set(modes)) > 1
    assert 0.85 * budget < real_total(model, batch) <= budget * 1.01
    assert "predicted" in str(report_of(model)) and "memory=" in str(report_of(model))


def test_gradients_are_those_of_the_same_modes_by_hand():
    model, batch = llama()
    by_hand = copy.deepcopy(model)
    least, most = ends(model, batch)
    apply_hot(model, HOTConfig(memory=(least + most) // 2))
    model(**batch).loss.backward()
    modes = {name: block.hot_block.mode for name, block in compressed_blocks(model).items()}
    apply_hot(by_hand, HOTConfig(compress=modes))
    by_hand(**batch).loss.backward()
    assert all(torch.equal(g, grads(by_hand)[n]) for n, g in grads(model).items())


def test_a_larger_batch_is_fitted_anew_and_a_smaller_one_is_not(monkeypatch):
    model, batch = llama()
    _, most = ends(model, batch)
    apply_hot(model, HOTConfig(memory=most))
    runs = []
    original = Fitter.__init__
    monkeypatch.setattr(Fitter, "__init__", lambda self, *a, **k: (runs.append(1), original(self, *a, **k))[1])
    model(**batch).loss.backward()
    blocks = compressed_blocks(model).values()
    assert {b.hot_block.mode for b in blocks} == {"inputs"} and len(runs) == 1
    model(**token_batch(4, 50)).loss.backward()
    assert len(runs) == 1
    larger = token_batch(12, 96)
    model(**larger).loss.backward()
    assert len(runs) == 2 and {b.hot_block.mode for b in blocks} != {"inputs"}
    assert real_total(model, larger) <= most * 1.01
    with torch.no_grad():
        model(**token_batch(32, 100))
    model.eval()(**token_batch(32, 100))
    assert len(runs) == 2


def test_too_little_is_refused_with_the_sum():
    model, batch = llama()
    least, _ = ends(model, batch)
    apply_hot(model, HOTConfig(memory=least - 1000))
    with pytest.raises(
        ValueError, match=r"is too little for this step.*is the least that would do.*Of this batch of 8, [1-7] rows"
    ):
        model(**batch)
    states = sum(p.numel() * 4 for p in model.parameters())
    model = remove_and_patch(model, HOTConfig(memory=states))
    with pytest.raises(ValueError, match="not even one row of this length fits"):
        model(**batch)


def remove_and_patch(model, config):
    remove_hot(model)
    apply_hot(model, config)
    return model


def test_what_cannot_be_predicted_is_checkpointed_and_said(said):
    class ByValue(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                x = block(x) * x.abs().max().item()
            return x.mean()

    model = ByValue().train()
    exact = copy.deepcopy(model)
    apply_hot(model, HOTConfig(memory="1GiB"))
    x = torch.randn(128, 64)
    for m in (model, exact):
        m(x).backward()
    assert {b.hot_block.mode for b in compressed_blocks(model).values()} == {"checkpoint"}
    assert "nothing can be predicted" in str(report_of(model))
    assert whole_error(grads(model), grads(exact)) < 0.3


@pytest.fixture
def said(caplog):
    return caplog


def test_copies_pickles_and_removal(tmp_path):
    model, batch = llama(2)
    apply_hot(model, HOTConfig(memory="1GiB"))
    twin = copy.deepcopy(model)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for m in (model, twin, loaded):
        m(**batch).loss.backward()
        assert {b.hot_block.mode for b in compressed_blocks(m).values()} == {"inputs"}
    remove_hot(model)
    assert not model._forward_pre_hooks and not model._forward_pre_hooks_with_kwargs
    apply_hot(twin, HOTConfig())  # patched anew: nothing of the old fit stays
    assert not twin._forward_pre_hooks


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_that_is_switched_on_gives_way(reentrant):
    """TRL's trainers switch it on: where memory allows, blocks are not run twice all the same."""
    model, batch = llama(3)
    runs = []
    model.model.layers[0].mlp.register_forward_hook(lambda *_: runs.append(1))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    apply_hot(model, HOTConfig(memory="4GiB"))
    model(**batch).loss.backward()
    assert {b.hot_block.mode for b in compressed_blocks(model).values()} == {"inputs"}
    assert len(runs) == 1  # dry runs are of a copy, without the user's hooks


def test_modes_by_pattern():
    model, batch = llama(4)
    exact = copy.deepcopy(model)
    config = HOTConfig(compress={"model.layers.*": "block", "*.0": "checkpoint", "*.3": "exact", "*.2": "inputs"})
    report = apply_hot(model, config)
    modes = {name: block.hot_block.mode for name, block in compressed_blocks(model).items()}
    assert modes == {"model.layers.0": "checkpoint", "model.layers.1": "block", "model.layers.3": "exact"}
    assert "compress='exact': 1 blocks (LlamaDecoderLayer): as without HOT" in str(report)
    for m in (model, exact):
        m(**batch).loss.backward()
    found, wanted = grads(model), grads(exact)
    last = {n: g for n, g in found.items() if n.startswith(("model.layers.3", "model.norm", "lm_head"))}
    assert all(torch.equal(g, wanted[n]) for n, g in last.items())
    assert whole_error(found, wanted) < 0.3
    assert HOTConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"compress": {"*": "blocks"}}, "must map patterns on names of blocks to modes"),
        ({"compress": {}}, "must map patterns"),
        ({"compress": {1: "block"}}, "must map patterns"),
        ({"compress": "exact"}, "compress"),
        ({"memory": "20%"}, "HOTConfig.memory='20%' is no size"),
        ({"memory": 0}, "is no size"),
        ({"memory": "lots"}, "is no size"),
        ({"memory": "1GiB", "compress": "block"}, "chooses compress for each block itself"),
        ({"compress": {"*": "exact"}, "max_bytes": "10%"}, "exclude their layers instead"),
        ({"memory": "1GiB", "max_bytes": "10%"}, "while a selection measures"),
        ({"memory": "1GiB", "grad_input_bits": 4, "grad_input_granularity": "lqs"}, "while a selection measures"),
    ],
)
def test_bad_settings(settings, said):
    with pytest.raises(ValueError, match=said):
        HOTConfig(**settings)


def test_a_pattern_without_a_block():
    model, _ = llama(2)
    with pytest.raises(HOTPatchError, match=r"'encoder.\*' matches no block"):
        apply_hot(model, HOTConfig(compress={"encoder.*": "block"}))
    assert type(model.lm_head) is nn.Linear and not compressed_blocks(model)


def test_the_hull_leaves_out_what_is_slower_and_larger():
    costs = {"checkpoint": (10, 1.1), "block": (20, 0.9), "exact": (90, 1.0), "inputs": (60, 0.75)}
    assert [u.mode for u in _hull("b", costs)] == ["block", "inputs"]
    costs["block"] = (59, 1.09)  # no gain worth its bytes
    assert [u.mode for u in _hull("b", costs)] == ["inputs"]
    native = relative_costs("cuda", torch.bfloat16)
    assert native["exact"] < native["inputs"] < native["block"] < native["checkpoint"]


@pytest.mark.parametrize("start", [1, 3, 50, 1000])
def test_largest_that_fits(start):
    def line(n):
        return 1000 + max(7 * n, 300)  # flat at first, as where the loss rules

    for memory, wanted in ((999, 0), (1299, 0), (1300, 42), (2000, 142), (8000, 1000), (10**9, 1000)):
        assert largest_that_fits(line, memory, start, 1000) == wanted


def test_vit_and_accumulated_gradients():
    model = tiny_vit(layers=4).train()
    batch = {"pixel_values": torch.randn(64, 1, 8, 8), "labels": torch.randint(10, (64,))}
    once = fitter(copy.deepcopy(model), batch)
    more = fitter(model, batch, accumulating=True)
    gradients = sum(p.numel() * 4 for p in model.parameters())
    assert once.peak(0) < more.peak(0) <= once.peak(0) + gradients


def test_command(tmp_path, capsys):
    model, _ = llama(4)
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(tmp_path)
    size = ["--batch", "8", "--length", "96"]
    parameters = sum(p.numel() for p in model.parameters())
    budget = (3 * 4 * parameters + 2**24) / 2**30
    assert main(["fit", str(tmp_path), "--memory-gb", f"{budget}", *size, "--save", str(tmp_path / "plan")]) == 0
    printed = capsys.readouterr().out
    assert "largest batch that fits" in printed and "model.layers.0" in printed
    config = HOTConfig.from_pretrained(tmp_path / "plan")
    assert set(config.compress) == {f"model.layers.{i}" for i in range(4)}
    apply_hot(model, config)
    assert main(["fit", str(tmp_path), "--memory-gb", "0.001", *size]) == 2
    assert "too little" in capsys.readouterr().err


def test_sharded_weights_are_refused():
    """ZeRO-3 marks its parameters so; FSDP2's are DTensors."""
    model, batch = llama(1)
    apply_hot(model, HOTConfig(memory="1GiB"))
    next(model.parameters()).ds_id = 7
    with pytest.raises(ValueError, match="are sharded"):
        model(**batch)


def test_under_the_trainer_with_autocast(tmp_path):
    """accelerate puts autocast into the model's own forward; the plan is for that type all the same."""
    from hot_hf import HOTCallback
    from tests.training import rows, trainer

    model = tiny_llama(layers=2)
    run = trainer(model, rows(8, 40), tmp_path, [HOTCallback(HOTConfig(memory="1GiB"))], max_steps=2, bf16=True)
    run.train()
    # Where the type is multiplied natively exact blocks are the fastest, and there is room for them.
    assert {block.hot_block.mode for block in compressed_blocks(model).values()} == {"exact"}
    assert "2 blocks exact" in str(report_of(model))

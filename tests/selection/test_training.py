"""Selection by budget in training: the callback, LoRA, accumulation, resuming, torch.compile."""

import pytest
import torch

from hot_hf import HOTCallback, HOTConfig, SelectedPlan, apply_hot, fix_selection
from hot_hf.memory import SavedTensors
from tests.models import grads, relative_error, tiny_llama, token_batch, twin
from tests.training import layers, losses, rows, same, trainer

peft = pytest.importorskip("peft")
BUDGET = {"selection": "budget", "max_grad_error": 0.12, "lqs_batches": 2}
EXACT = {"grad_input_bits": None, "activation_format": "none"}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_callback(accumulation, tmp_path):
    """Exact, bit by bit, for as many steps as lqs_batches fill; then every layer has its plan, which the checkpoint's
    hot_plan.json repeats; the loss stays near that of exact training."""
    model, data = tiny_llama(), rows(24, 32)
    plain = twin(model)
    callback = HOTCallback(HOTConfig(**BUDGET))
    settings = {"save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": accumulation}
    run = trainer(model, data, tmp_path / "hot", [callback], **settings)
    run.train()
    exact = trainer(plain, data, tmp_path / "plain", [HOTCallback(EXACT)], **settings)
    exact.train()
    measuring = -(-2 // accumulation)
    assert losses(run)[:measuring] == losses(exact)[:measuring]
    assert losses(run)[-1] == pytest.approx(losses(exact)[-1], rel=0.05) and not same(model, plain)
    assert len(callback.selection) == 14 and all(layer.hot.probe is None for layer in layers(model).values())
    saved = SelectedPlan.load(tmp_path / "hot" / "checkpoint-3" / "hot_plan.json")
    assert {n: choice.plan for n, choice in saved.layers.items()} == {n: m.hot.plan for n, m in layers(model).items()}
    assert all(choice.batches == 2 for choice in saved.layers.values())


def test_resume_equals_the_uninterrupted_run(tmp_path):
    """C46: the plan survives a checkpoint; the resumed run measures nothing and is bit-identical."""
    first, data = tiny_llama(), rows(24)
    start = twin(first)
    settings = {"save_strategy": "steps", "save_steps": 3}
    whole = trainer(first, data, tmp_path, [HOTCallback(HOTConfig(**BUDGET), error_every=0)], **settings)
    whole.train()
    callback = HOTCallback(HOTConfig(**BUDGET), error_every=0)
    resumed = trainer(start, data, tmp_path, [callback], **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert same(first, start) and losses(whole) == losses(resumed)
    assert {n: m.hot.plan for n, m in layers(first).items()} == {n: m.hot.plan for n, m in layers(start).items()}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora(checkpointing, tmp_path):
    """A frozen base keeps nothing, so only its g_x is chosen; lora_A's inputs are kept once, like those that q, k and
    v share. With the Trainer and checkpointing."""
    model = peft.get_peft_model(
        tiny_llama(), peft.LoraConfig(r=8, target_modules="all-linear", lora_alpha=16, init_lora_weights=False)
    )
    callback = HOTCallback(HOTConfig(**BUDGET))
    trainer(model, rows(8, 32), tmp_path, [callback], max_steps=3, gradient_checkpointing=checkpointing).train()
    plan = SelectedPlan.of(model)
    base = {n: choice for n, choice in plan.layers.items() if ".lora_A" not in n}
    adapters = {n: choice for n, choice in plan.layers.items() if ".lora_A" in n}
    assert len(base) == len(adapters) == 14
    assert all(c.grad_weight is None and c.bytes == 0 for c in base.values())
    # Nothing before the first block needs a gradient, unless checkpointing asks for it.
    assert sum(c.grad_input is not None for c in base.values()) == (14 if checkpointing else 11)
    assert all(c.grad_weight is not None for c in adapters.values())
    model.gradient_checkpointing_disable()
    with SavedTensors(model) as saved:
        model(**token_batch(2, 32)).loss.backward()
    kept = saved.bytes_of(n for n, m in model.named_modules() if hasattr(m, "hot") and ".lora_A" in n)
    assert kept == plan.bytes


def test_without_a_callback():
    """A single process decides by itself, for all layers at once, also within bytes."""
    for budget in ({"max_grad_error": 0.12}, {"max_bytes": "15%"}):
        model = tiny_llama()
        apply_hot(model, HOTConfig(selection="budget", lqs_batches=2, **budget))
        for step in range(3):
            model(**token_batch()).loss.backward()
            assert all((m.hot.probe is not None) == (step < 2) for m in layers(model).values())
        assert SelectedPlan.of(model).bytes <= 0.15 * SelectedPlan.of(model).exact_bytes or "max_bytes" not in budget


def test_compiled_while_measuring():
    """C12: outside the graph meanwhile, with the measurements and choices of eager mode; afterwards near it."""
    torch.compiler.reset()
    model = tiny_llama(layers=1)
    apply_hot(model, HOTConfig(**BUDGET))
    eager = twin(model)
    compiled = torch.compile(model, backend="aot_eager")
    for step in range(4):
        batch = token_batch(2, 40)
        for m in (compiled, eager):
            m.zero_grad()
            m(**batch).loss.backward()
        if step == 1:
            fix_selection(model), fix_selection(eager)
            assert {n: m.hot.plan for n, m in layers(model).items()} == {
                n: m.hot.plan for n, m in layers(eager).items()
            }
        for name, value in grads(eager).items():
            # float products; afterwards another order of float sums moves single integers by one
            assert relative_error(grads(model)[name], value) < (1e-5 if step < 2 else 0.02), name
    torch.compiler.reset()

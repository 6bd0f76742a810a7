"""HOTCallback in a real Trainer, and what it measures."""

import json

import pytest
import torch
from transformers import EarlyStoppingCallback, TrainerCallback

from hot_hf import HOTCallback, HOTConfig, apply_hot, config_of, torch_compile

from .models import grads, patched, tiny_llama, twin
from .training import layers, losses, rows, same, trainer

EXACT = HOTConfig(grad_input_bits=None, activation_format="none")


@pytest.mark.parametrize("config", [EXACT, HOTConfig.paper(lqs_batches=12)], ids=["exact", "still measuring"])
def test_exact_configuration_changes_no_bit(config, tmp_path):
    """Training with the callback and exact gradients, also while lqs measures, equals training without it, bit by bit;
    with reporters on, gradient accumulation and evaluation in between."""
    plain, data = tiny_llama(), rows(24)
    model = twin(plain)
    settings = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "report_to": "tensorboard"}
    runs = [
        trainer(m, data, tmp_path / name, callbacks, data[:4], **settings)
        for m, name, callbacks in ((plain, "a", []), (model, "b", [HOTCallback(config, error_every=1)]))
    ]
    for run in runs:
        run.train()
    assert losses(runs[0]) == losses(runs[1]) and same(plain, model)


def test_patches_at_the_start_and_keeps_identities(tmp_path):
    """C32, C49: parameters stay the objects the optimizer was given; full fine-tuning is not refused; it learns."""
    model = tiny_llama()
    before = dict(model.named_parameters())
    run = trainer(model, rows(4), tmp_path, [HOTCallback()], max_steps=12)
    run.create_optimizer()
    run.train()
    assert len(layers(model)) == 14 and config_of(model) == HOTConfig()
    assert all(dict(model.named_parameters())[n] is p for n, p in before.items())
    held = {id(p) for group in run.optimizer.param_groups for p in group["params"]}
    assert held >= {id(p) for p in before.values()}
    assert losses(run)[-1] < 0.8 * losses(run)[0]


def test_a_patched_model_keeps_its_configuration(tmp_path, said):
    """Patched by hand or by from_pretrained: the callback leaves it, and warns where it was told otherwise."""
    model = tiny_llama()
    apply_hot(model, HOTConfig.fast())
    trainer(model, rows(4), tmp_path, [HOTCallback("smallest")], max_steps=1).train()
    assert config_of(model) == HOTConfig.fast()
    assert len(said) == 1 and "keeps its configuration" in said[0]


def test_data_parallel_threads_are_warned_of(tmp_path, said):
    run = trainer(tiny_llama(), rows(4), tmp_path, [])
    for gpus in (1, 4):
        run.args._n_gpu = gpus
        HOTCallback().on_train_begin(run.args, run.state, run.control, model=run.model)
    assert len(said) == 1 and "4 GPUs" in said[0] and "torchrun" in said[0]


@pytest.mark.parametrize("restore", [False, True])
def test_resume_equals_the_uninterrupted_run(restore, tmp_path):
    """C30, C46: choices and the rounding's steps survive a checkpoint; the resumed run is bit-identical."""
    config = HOTConfig.paper(rounding="stochastic", lqs_batches=2)
    first, data = tiny_llama(), rows(24)
    start = twin(first)
    settings = {"save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2}
    settings["restore_callback_states_from_checkpoint"] = restore
    whole = trainer(first, data, tmp_path, [HOTCallback(config, error_every=0)], **settings)
    whole.train()
    assert HOTConfig.from_pretrained(tmp_path / "checkpoint-3") == config
    callback = HOTCallback(config, error_every=0)
    resumed = trainer(start, data, tmp_path, [callback], **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert same(first, start)
    assert losses(whole) == losses(resumed)
    kept = [c for c in resumed.callback_handler.callbacks if isinstance(c, HOTCallback)]
    assert len(kept) == 1 and len(kept[0].selection) == 14
    assert (kept[0] is callback) != restore


@pytest.mark.parametrize("hot_first", [True, False])
def test_resume_with_and_without_the_callback(hot_first, tmp_path):
    """C46: a HOT checkpoint resumes in a plain Trainer, and a plain one with the callback, which can save again."""
    data = rows()
    settings = {"save_strategy": "steps", "save_steps": 2}
    callbacks = [[HOTCallback()], []] if hot_first else [[], [HOTCallback()]]
    trainer(tiny_llama(), data, tmp_path, callbacks[0], max_steps=2, **settings).train()
    model = tiny_llama()
    run = trainer(model, data, tmp_path, callbacks[1], max_steps=4, **settings)
    run.train(resume_from_checkpoint=True)
    assert run.state.global_step == 4 and bool(layers(model)) != hot_first
    state = json.loads((tmp_path / "checkpoint-4/trainer_state.json").read_text())
    assert hot_first or "HOTCallback" in state["stateful_callbacks"]


def test_two_trainers_and_early_stopping(tmp_path):
    """One callback object in two trainers in turn: each model gets its own choices; early stopping stops."""
    callback, data = HOTCallback(HOTConfig.paper(lqs_batches=1)), rows()
    a, b = tiny_llama(layers=1), tiny_llama(layers=2)
    trainer(a, data, tmp_path / "a", [callback], max_steps=2).train()
    assert len(callback.selection) == 7
    stop = EarlyStoppingCallback(1, 1e9)
    run = trainer(
        b, data, tmp_path / "b", [callback, stop], data[:4], max_steps=9, eval_strategy="steps", eval_steps=1,
        save_strategy="steps", save_steps=1, load_best_model_at_end=True, metric_for_best_model="loss",
    )  # fmt: skip
    run.train()
    assert run.state.global_step == 2 and len(callback.selection) == 14
    assert all(layer.hot.meter is None for layer in layers(b).values())


def test_layers_made_since_arepatched(tmp_path, said):
    """A head that resizing has replaced: patched when training starts, and said, as nobody has asked for it."""
    model = patched(tiny_llama(layers=1), HOTConfig(skip_heads=False))
    model.resize_token_embeddings(104)
    trainer(model, rows(2), tmp_path, [HOTCallback()], max_steps=1).train()
    assert "lm_head" in layers(model) and len(layers(model)) == 8
    assert len(said) == 1 and "made since apply_hot: lm_head." in said[0]


def test_budget_after_a_resume_is_kept(tmp_path, said):
    """Choices that another configuration has measured do not stand in for this one's: measured anew, and said."""
    data, settings = rows(12), {"save_strategy": "steps", "save_steps": 2}
    lqs = HOTConfig.paper(lqs_batches=1)
    budget = HOTConfig(selection="budget", max_grad_error=0.05, lqs_batches=1)
    trainer(tiny_llama(layers=1), data, tmp_path, [HOTCallback(lqs)], max_steps=2, **settings).train()
    model = tiny_llama(layers=1)
    callback = HOTCallback(budget)
    run = trainer(model, data, tmp_path, [callback], max_steps=4, **settings)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert len(said) == 1 and "another configuration" in said[0]
    for layer in layers(model).values():
        assert layer.hot.choice is not None and layer.hot.choice.grad_weight.error <= 0.05
    assert callback.selection and all(isinstance(choice, dict) for choice in callback.selection.values())
    again = tiny_llama(layers=1)  # and these are taken up, without a word
    trainer(again, data, tmp_path, [HOTCallback(budget)], max_steps=5, **settings).train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-4")
    )
    assert len(said) == 1
    assert {n: m.hot.plan for n, m in layers(again).items()} == {n: m.hot.plan for n, m in layers(model).items()}


def test_compiled_by_the_trainer(tmp_path, monkeypatch):
    """torch_compile=True compiles the model that the callback has patched: losses as in eager mode, nobody is accused
    of never being called."""
    from hot_hf import callback as module

    warned = []
    monkeypatch.setattr(module.logger, "warning", warned.append)
    eager, data = tiny_llama(layers=1), rows()
    compiled = twin(eager)
    torch.compiler.reset()
    histories = []
    for m, settings in ((eager, {}), (compiled, {"torch_compile": True, "torch_compile_backend": "aot_eager"})):
        run = trainer(m, data, tmp_path, [HOTCallback()], report_to="tensorboard", max_steps=4, **settings)
        run.train()
        histories.append(losses(run))
    torch.compiler.reset()
    assert len(layers(compiled)) == 7 and not warned
    assert all(
        layer.hot.traces < torch_compile.traces for layer in layers(compiled).values()
    )  # it was compiled, patched
    assert histories[1] == pytest.approx(histories[0], rel=1e-3)


@pytest.mark.parametrize("adapters", [False, True], ids=["all weights", "LoRA"])
def test_sft_trainer(adapters, tmp_path):
    """TRL's SFTTrainer takes the callback as it is, with its own peft_config too; HOT's gradients stay near: the losses
    of a few steps agree."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    plain = tiny_llama(pad_token_id=0, eos_token_id=1)
    model = twin(plain)
    data = Dataset.from_list([{"input_ids": torch.randint(2, 97, (12,)).tolist()} for _ in range(8)])
    peft_config = None
    if adapters:
        from peft import LoraConfig

        peft_config = LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)
    histories, seed = [], int(torch.randint(2**31, ()))
    for m, callbacks in ((plain, []), (model, [HOTCallback(HOTConfig())])):
        args = trl.SFTConfig(
            str(tmp_path), max_steps=4, per_device_train_batch_size=2, report_to="none", use_cpu=True, bf16=False,
            logging_steps=1, save_strategy="no", disable_tqdm=True, learning_rate=1e-3, gradient_checkpointing=False,
            dataset_kwargs={"skip_prepare_dataset": True},
        )  # fmt: skip
        torch.manual_seed(seed)  # adapters
        settings = {"processing_class": _tokenizer(), "callbacks": callbacks, "peft_config": peft_config}
        run = trl.SFTTrainer(m, args, train_dataset=data, **settings)
        run.train()
        histories.append(losses(run))
    names = layers(run.model)
    assert len(names) == (28 if adapters else 14) and sum("lora_A" in name for name in names) == 14 * adapters
    assert histories[1] == pytest.approx(histories[0], rel=0.01) and histories[0] != histories[1]


def _tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, 97)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")), pad_token="<pad>", eos_token="<eos>"
    )


def test_gradients_under_the_callback_are_near(tmp_path):
    """One step in the Trainer gives the gradients that a loop of one's own gets from apply_hot."""
    model, data = tiny_llama(), rows(2)
    by_hand = patched(twin(model))
    by_hand(**{k: torch.stack([r[k] for r in data]) for k in data[0]}).loss.backward()

    class Keep(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            self.grads = grads(model)

    keep = Keep()
    trainer(model, data, tmp_path, [HOTCallback(), keep], max_steps=1, max_grad_norm=0.0,
            train_sampling_strategy="sequential").train()  # fmt: skip
    for name, grad in grads(by_hand).items():
        torch.testing.assert_close(keep.grads[name], grad, rtol=1e-4, atol=1e-6)

"""HOTCallback in a real Trainer, and what it measures."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from hot_hf import AutoModelForCausalLM, HOTCallback, HOTConfig, apply_hot, callback, compiling, report_of
from hot_hf.memory import SavedTensors
from hot_hf.monitor import GradientErrors, KeptMeter, NonFiniteGradients
from hot_hf.patching import config_of

from .models import grads, mlp, relative_error, tiny_llama, token_batch, twin
from .training import layers, losses, rows, same, tensorboard, trainer

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


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    seen: list[str] = []
    monkeypatch.setattr(callback.logger, "warning", seen.append)
    monkeypatch.setattr(callback.logger, "log", lambda level, text: level >= 30 and seen.append(text))
    return seen


def test_a_patched_model_keeps_its_configuration(tmp_path, warnings):
    """Patched by hand or by from_pretrained: the callback leaves it, and warns where it was told otherwise."""
    model = tiny_llama()
    apply_hot(model, HOTConfig.fast())
    trainer(model, rows(4), tmp_path, [HOTCallback("smallest")], max_steps=1).train()
    assert config_of(model) == HOTConfig.fast()
    assert len(warnings) == 1 and "keeps its configuration" in warnings[0]


def test_data_parallel_threads_are_warned_of(tmp_path, warnings):
    run = trainer(tiny_llama(), rows(4), tmp_path, [])
    for gpus in (1, 4):
        run.args._n_gpu = gpus
        HOTCallback().on_train_begin(run.args, run.state, run.control, model=run.model)
    assert len(warnings) == 1 and "4 GPUs" in warnings[0] and "torchrun" in warnings[0]


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


def test_tensorboard_receives_everything(tmp_path):
    """Every value reaches the event file, at the step it belongs to, beside the loss."""
    model, data = tiny_llama(), rows()
    with SavedTensors(_patched(twin(model))) as saved:
        saved.model(**{k: torch.stack([r[k] for r in data[:2]]) for k in data[0]})
    callback = HOTCallback(error_every=3, error_layers=2)
    run = trainer(model, data, tmp_path, [callback], report_to="tensorboard")
    run.train()
    scalars = tensorboard(tmp_path)
    assert [s for s, _ in scalars["train/loss"]] == [1, 2, 3, 4, 5, 6]
    assert scalars["train/hot/kept_bytes"] == [(step, saved.hot_bytes) for step in range(1, 7)]
    assert scalars["train/hot/nonfinite_steps"] == [(step, 0) for step in range(1, 7)]
    assert scalars["train/hot/layers/INT8 per_token, ht_int4"] == [(1, 14)]
    assert scalars["train/hot/never_called"] == [(2, 0)]
    errors = {tag: values for tag, values in scalars.items() if "_error/" in tag}
    assert len(errors) == 4
    for values in errors.values():
        assert [step for step, _ in values] == [1, 4] and all(0 < v < 0.4 for _, v in values)
    history = [e for e in run.state.log_history if "loss" in e]
    assert [e["hot/kept_bytes"] for e in history] == [saved.hot_bytes] * 6
    json.dumps({k: v for e in history for k, v in e.items()}, allow_nan=False)


def _patched(model, config=None):
    apply_hot(model, config)
    return model


def test_without_a_reporter(tmp_path, capsys):
    """Trainer's own default, report_to=[]: counts and bytes in log_history and on the console; no hook, no errors."""

    class Look(TrainerCallback):
        def on_optimizer_step(self, args, state, control, model=None, **kwargs):
            self.hooks = [len(m._forward_hooks) for m in layers(model).values()]

    look, stock = Look(), TrainingArguments(tmp_path, use_cpu=True).report_to
    run = trainer(tiny_llama(), rows(), tmp_path, [HOTCallback(error_every=1), look], max_steps=2, report_to=stock)
    run.train()
    assert run.args.report_to == []
    assert look.hooks == [0] * 14
    first, second = [entry for entry in run.state.log_history if "loss" in entry]
    assert first["hot/kept_bytes"] == second["hot/kept_bytes"] > 0
    assert first["hot/nonfinite_gradients"] == second["hot/nonfinite_steps"] == 0
    assert first["hot/layers/INT8 per_token, ht_int4"] == 14 and second["hot/never_called"] == 0
    assert first["hot/coverage"] == round(report_of(run.model).multiply_add_share, 4) > 0.9
    assert not any("_error/" in key for key in (*first, *second))
    printed = capsys.readouterr().out
    assert all(f"hot/{name}" in printed for name in ("kept_bytes", "coverage", "nonfinite_steps"))


def test_what_was_not_seen_is_not_zero(tmp_path):
    """An engine that keeps the gradients to itself (DeepSpeed), layers that keep nothing: no count, no bytes."""

    class Taken(Trainer):
        def training_step(self, model, *args, **kwargs):
            loss = super().training_step(model, *args, **kwargs)
            model.zero_grad()
            return loss

    model = tiny_llama(layers=1)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lm_head" in name)
    run = Taken(model, trainer(model, rows(2), tmp_path, max_steps=1).args, train_dataset=rows(2))
    run.add_callback(HOTCallback())
    run.train()
    assert run.state.log_history[0]["hot/coverage"] > 0
    assert not any("nonfinite" in key or "kept_bytes" in key for entry in run.state.log_history for key in entry)


def test_empty_shards_are_no_gradients():
    """Of a sharded gradient (a DTensor) a rank may have no rows: passed over, others counted."""

    class Sharded:
        def __init__(self, local):
            self.is_sparse, self.local = False, local

        def to_local(self):
            return self.local

    counter = NonFiniteGradients()
    for gradients, want in (
        ([torch.empty(0, 8)], None),
        ([torch.empty(0, 8), torch.full((2,), torch.nan), torch.ones(3).bfloat16()], (1, 1)),
    ):
        parameters = [SimpleNamespace(grad=Sharded(gradient)) for gradient in gradients]
        counter.count(SimpleNamespace(parameters=parameters.__iter__))
        assert counter.read() == want


def test_low_coverage_is_a_warning(tmp_path, caplog):
    """A model that is mostly head: HOTCallback and from_pretrained say so, with the counts, without being asked."""
    model = tiny_llama(layers=1, vocab_size=4096)
    trainer(model, rows(2), tmp_path / "run", [HOTCallback()], max_steps=1).train()
    model.save_pretrained(tmp_path / "model")
    AutoModelForCausalLM.from_pretrained(tmp_path / "model", hot_config="default")
    said = [r.message for r in caplog.records if r.levelname == "WARNING" and "of multiply-adds" in r.message]
    assert len(said) == 2 and all("7 of 8 linear layers patched" in text for text in said)


def test_reporters_that_cannot_be_moved(tmp_path, warnings):
    """Called by something else than the Trainer's handler: a warning that reporters may miss the values."""
    run = trainer(tiny_llama(layers=1), rows(2), tmp_path, [])
    for report_to in ([], ["tensorboard"]):
        run.args.report_to = report_to
        HOTCallback().on_train_begin(run.args, run.state, run.control, model=run.model)
    assert len(warnings) == 1 and "tensorboard may get no hot/ values" in warnings[0]


def test_layers_made_since_are_patched(tmp_path, warnings):
    """A head that resizing has replaced: patched when training starts, and said, as nobody has asked for it."""
    model = _patched(tiny_llama(layers=1), HOTConfig(skip_heads=False))
    model.resize_token_embeddings(104)
    trainer(model, rows(2), tmp_path, [HOTCallback()], max_steps=1).train()
    assert "lm_head" in layers(model) and len(layers(model)) == 8
    assert len(warnings) == 1 and "made since apply_hot: lm_head." in warnings[0]


def test_budget_after_a_resume_is_kept(tmp_path, warnings):
    """Choices that another configuration has measured do not stand in for this one's: measured anew, and said."""
    data, settings = rows(12), {"save_strategy": "steps", "save_steps": 2}
    lqs = HOTConfig.paper(lqs_batches=1)
    budget = HOTConfig(selection="budget", max_grad_error=0.05, lqs_batches=1)
    trainer(tiny_llama(layers=1), data, tmp_path, [HOTCallback(lqs)], max_steps=2, **settings).train()
    model = tiny_llama(layers=1)
    callback = HOTCallback(budget)
    run = trainer(model, data, tmp_path, [callback], max_steps=4, **settings)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert len(warnings) == 1 and "another configuration" in warnings[0]
    for layer in layers(model).values():
        assert layer.hot.choice is not None and layer.hot.choice.grad_weight.error <= 0.05
    assert callback.selection and all(isinstance(choice, dict) for choice in callback.selection.values())
    again = tiny_llama(layers=1)  # and these are taken up, without a word
    trainer(again, data, tmp_path, [HOTCallback(budget)], max_steps=5, **settings).train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-4")
    )
    assert len(warnings) == 1
    assert {n: m.hot.plan for n, m in layers(again).items()} == {n: m.hot.plan for n, m in layers(model).items()}


def test_non_finite_gradients_are_counted(tmp_path):
    """C31: the Trainer's filter shows ordinary losses on; the count starts at the step that broke, and is JSON-safe."""
    model = tiny_llama()
    data = [{k: torch.full((8,), 5 if i in (4, 5) else 3) for k in ("input_ids", "labels")} for i in range(12)]
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = torch.inf
    run = trainer(model, data, tmp_path, [HOTCallback()], report_to="tensorboard", train_sampling_strategy="sequential")
    run.train()
    entries = [e for e in run.state.log_history if "loss" in e]
    assert [e["hot/nonfinite_steps"] for e in entries] == [0, 0, 1, 2, 3, 4]
    assert all(e["hot/nonfinite_gradients"] > 0 for e in entries[2:])
    json.dumps([{k: v for k, v in e.items() if k.startswith("hot/")} for e in entries], allow_nan=False)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_counter(value):
    """Every kind of non-finite entry counts, large finite ones and sparse gradients included."""
    model = mlp(8, 8, 8)
    embedding = nn.Embedding(10, 8, sparse=True)
    both = nn.ModuleList([model, embedding])
    counter = NonFiniteGradients()
    assert counter.read() is None
    model(embedding(torch.tensor([1, 1, 2]))).sum().backward()
    model[0].weight.grad.fill_(3e38)  # a norm of order 2 would overflow
    counter.count(both)
    assert counter.read() == (0, 0)
    model[0].weight.grad[3, 4] = value
    embedding.weight.grad._values()[0, 0] = value
    counter.count(both)
    counter.count(both)
    assert counter.read() == (4, 2)


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
    assert all(layer.hot.traces < compiling.traces for layer in layers(compiled).values())  # it was compiled, patched
    assert histories[1] == pytest.approx(histories[0], rel=1e-3)


class Bypassing(nn.Module):
    """Uses one layer, and the weight of another without calling it."""

    def __init__(self):
        super().__init__()
        self.used, self.read = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x, labels=None):
        return {"loss": F.linear(self.used(x), self.read.weight).square().mean()}


def test_layers_never_called_are_named(tmp_path, monkeypatch):
    """C24: a patched layer whose weight the model reads itself is named after the first steps, and only that."""
    from hot_hf import callback as module

    warned = []
    monkeypatch.setattr(module.logger, "warning", warned.append)
    data = [{"x": torch.randn(64), "labels": 0} for _ in range(8)]
    run = trainer(Bypassing(), data, tmp_path, [HOTCallback()], report_to="tensorboard")
    run.train()
    assert len(warned) == 1 and "1 patched layers were never called" in warned[0] and ": read." in warned[0]
    assert [e["hot/never_called"] for e in run.state.log_history if "hot/never_called" in e] == [1]


@pytest.mark.parametrize(
    "config", ["default", "fast", HOTConfig(rounding="stochastic"), HOTConfig(activation_format="int8")]
)
def test_gradient_errors_are_those_of_training(config):
    """The reported errors are the distances of the gradients that the optimizer gets from the exact ones."""
    exact = nn.Sequential(nn.Linear(96, 80))
    model = twin(exact)
    apply_hot(model, config)
    x, g = torch.randn(3, 17, 96), torch.randn(3, 17, 80)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    monitor = GradientErrors.sample(model, 3)
    monitor.start()
    for m, x in zip((model, exact), inputs, strict=True):
        m(x).backward(g)
    want = {
        "grad_input_error/0": relative_error(inputs[0].grad, inputs[1].grad),
        "grad_weight_error/0": relative_error(model[0].weight.grad, exact[0].weight.grad),
    }
    assert monitor.stop() == pytest.approx(want, rel=1e-3)
    model(x.detach()).backward(g)
    assert monitor.stop() == {}


@pytest.mark.parametrize("checkpointing", [None, True, False])
def test_kept_bytes_under_sharing_and_checkpointing(checkpointing):
    """The meter counts shared buffers once, agrees with saved-tensor hooks, and returns to zero after the backward."""
    model = _patched(tiny_llama())
    meter = KeptMeter()
    for layer in layers(model).values():
        layer.hot.meter = meter
    inputs = token_batch()
    if checkpointing is None:
        with SavedTensors(model) as saved:
            loss = model(**inputs).loss
        assert meter.live == meter.peak == saved.hot_bytes > 0
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
        model.train(), model.enable_input_require_grads()
        loss = model(**inputs).loss
        assert meter.live == 0
    loss.backward()
    del loss
    assert meter.live == 0
    whole = meter.take_peak()
    assert whole > 0 and meter.take_peak() == 0
    if checkpointing is not None:  # one of two blocks at a time
        reference, inputs = tiny_llama(layers=1), token_batch()
        with SavedTensors(_patched(reference)) as saved:
            reference(**inputs)
        assert whole == saved.hot_bytes


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
    for m, callbacks in ((plain, []), (model, [HOTCallback(HOTConfig(lora=True))])):
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
    by_hand = _patched(twin(model))
    by_hand(**{k: torch.stack([r[k] for r in data]) for k in data[0]}).loss.backward()

    class Keep(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            self.grads = grads(model)

    keep = Keep()
    trainer(model, data, tmp_path, [HOTCallback(), keep], max_steps=1, max_grad_norm=0.0,
            train_sampling_strategy="sequential").train()  # fmt: skip
    for name, grad in grads(by_hand).items():
        torch.testing.assert_close(keep.grads[name], grad, rtol=1e-4, atol=1e-6)

"""What HOTCallback measures and reports in a real Trainer."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from hot_hf import AutoModelForCausalLM, HOTCallback, HOTConfig, apply_hot, report_of
from hot_hf.memory import SavedTensors
from hot_hf.monitor import GradientErrors, KeptMeter, NonFiniteGradients

from .models import mlp, patched, relative_error, tiny_llama, token_batch, twin
from .training import layers, rows, tensorboard, trainer


def test_tensorboard_receives_everything(tmp_path):
    """Every value reaches the event file, at the step it belongs to, beside the loss."""
    model, data = tiny_llama(), rows()
    with SavedTensors(patched(twin(model))) as saved:
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


def test_reporters_in_front_of_the_callback(tmp_path, said):
    """Without report_through a warning names the remedy, where there are reporters; with it there is none."""
    run = trainer(tiny_llama(layers=1), rows(2), tmp_path, [])
    for report_to in ([], ["tensorboard"]):
        run.args.report_to = report_to
        HOTCallback().on_train_begin(run.args, run.state, run.control, model=run.model)
    assert len(said) == 1 and "callback.report_through(trainer)" in said[0] and "tensorboard" in said[0]
    callback = HOTCallback()
    with pytest.raises(ValueError, match="none of the trainer's"):
        callback.report_through(run)
    run.add_callback(callback)
    callback.report_through(run)
    callback.on_train_begin(run.args, run.state, run.control, model=run.model)
    assert len(said) == 1
    names = [type(c).__name__ for c in run.callback_handler.callbacks]
    assert names.count("HOTCallback") == 1 and names.index("HOTCallback") <= 1


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
    model = patched(tiny_llama())
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
        with SavedTensors(patched(reference)) as saved:
            reference(**inputs)
        assert whole == saved.hot_bytes

"""Quantizer selection inside the Trainer: what it chooses, what it reports, and what it leaves alone."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import TrainerCallback

from hot_hf import HOTCallback, HOTConfig
from tests.models import tiny_bert, tiny_llama, twin
from tests.training import layers, rows, tensorboard, trainer


def _lqs_by_hand(model, batches, threshold=0.5) -> dict[str, str]:
    """spec.md, section 7 from the exact gradients of each layer's output, in float64."""
    errors: dict[str, torch.Tensor] = {}

    def note(name, g):
        g = g.double().reshape(-1, g.shape[-1])
        out = []
        for absmax in (g.abs().amax(), g.abs().amax(1, keepdim=True)):
            scale = torch.where(absmax > 0, absmax / 7, 1.0)
            out.append(((g / scale).round() * scale - g).square().sum())
        errors[name] = errors.get(name, 0) + torch.stack(out)

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.register_forward_hook(lambda m, a, y, n=name: y.register_hook(lambda g: note(n, g)) and None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        model.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    choose = {n: "per_token" if e[1].sqrt() < threshold * e[0].sqrt() else "per_tensor" for n, e in errors.items()}
    return {name: choose[name] for name in sorted(choose)}


def test_selection_in_flight_follows_the_paper(tmp_path):
    """spec.md, section 7: after lqs_batches micro-batches each layer has the choice its own exact gradients ask for."""
    model, data = tiny_llama(layers=3), rows(8)
    with torch.no_grad():  # spread the magnitudes of tokens, so that the rule has something to decide
        model.model.embed_tokens.weight *= torch.logspace(-1, 1, 97)[:, None]
    by_hand = twin(model)
    callback = HOTCallback(HOTConfig.paper(lqs_batches=4))
    run = trainer(
        model, data, tmp_path, [callback], max_steps=5, optim="sgd", learning_rate=0.1, lr_scheduler_type="constant",
        max_grad_norm=0.0, train_sampling_strategy="sequential", report_to="tensorboard",
    )  # fmt: skip
    run.train()
    batches = [{k: torch.stack([r[k] for r in data[i : i + 2]]) for k in data[0]} for i in range(0, 8, 2)]
    want = _lqs_by_hand(by_hand, batches)
    assert callback.selection == want and len(want) == 21
    scalars = tensorboard(tmp_path)
    assert scalars["train/hot/layers/measuring"] == [(1, 21)]
    for granularity, count in Counter(want.values()).items():
        assert scalars[f"train/hot/layers/INT4 {granularity}, hla_int8 r=8"] == [(4, count)]
    got = {name: layer.hot.plan.grad_input_granularity for name, layer in layers(model).items()}
    assert got == want and all(layer.hot.probe is None for layer in layers(model).values())


class Normalized(nn.Module):
    """Linear layers with BatchNorm between them: a forward more than training makes would show in its buffers."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, x, labels=None):
        y = self.body(x)
        return {"loss": F.cross_entropy(y, labels), "logits": y}


def test_calibration_leaves_batch_norm_alone(tmp_path):
    """C28: buffers, flags and weights after steps that measure are those of training without HOT, bit by bit."""
    plain = Normalized()
    model = twin(plain)
    data = [{"x": torch.randn(64), "labels": int(torch.randint(64, ()))} for _ in range(32)]
    for m, name, callbacks in ((plain, "a", []), (model, "b", [HOTCallback("paper", error_every=1)])):
        settings = {"eval_strategy": "steps", "eval_steps": 2, "report_to": "tensorboard", "max_steps": 4}
        trainer(m, data, tmp_path / name, callbacks, data[:4], **settings).train()
    assert len(layers(model)) == 2 and model.body[1].num_batches_tracked == 4
    state, want = model.state_dict(), plain.state_dict()
    assert state.keys() == want.keys() and all(torch.equal(state[name], want[name]) for name in want)


@pytest.mark.parametrize("same_callback", [True, False])
@pytest.mark.parametrize("config", [HOTConfig(), HOTConfig.paper()], ids=["default", "lqs measures"])
def test_calibration_leaves_the_model_as_it_was(config, same_callback, tmp_path):
    """C28: flags, buffers, hooks and requires_grad are untouched by measuring, also when a step raises midway, once the
    callback, or the model with another one, is used again."""
    model = tiny_bert()
    model.bert.embeddings.requires_grad_(False)
    model.config.use_cache = False
    flags = {n: p.requires_grad for n, p in model.named_parameters()}

    class Raise(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 1:
                raise KeyboardInterrupt

    class Look(TrainerCallback):
        hooks = 0

        def on_step_begin(self, args, state, control, **kwargs):
            self.hooks += sum(len(m._forward_hooks) for m in layers(model).values())

    data = [{**r, "labels": torch.randint(2, ())} for r in rows()]
    callback = HOTCallback(config, error_every=1)
    run = trainer(model, data, tmp_path, [callback, Raise()], report_to="tensorboard")
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert {n: p.requires_grad for n, p in model.named_parameters()} == flags and model.training
    hooks = sum(len(m._forward_hooks) for m in layers(model).values())
    assert hooks == (0 if config.grad_input_granularity == "lqs" else callback.error_layers)  # of the step that broke
    other = model
    if same_callback:
        other = tiny_bert()  # the callback alone lets go of the first model
        run.model = run.model_wrapped = other
        run.remove_callback(Raise)
    else:
        callback, look = HOTCallback(config, error_every=0), Look()
        run = trainer(model, data, tmp_path, [callback, look], report_to="tensorboard")
    run.train()
    assert same_callback or look.hooks == 0  # from the first step on
    assert len(layers(other)) == 13 and len(callback.selection) == (13 if hooks == 0 else 0)
    for used in (model, other):
        assert not any(m._forward_hooks or m.hot.meter for m in layers(used).values())

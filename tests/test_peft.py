"""PEFT: adapters before or after patching, merging, saving, checkpointing, quantized bases."""

import copy
import warnings

import pytest
import torch
import transformers
from torch import nn

import hot_hf
from hot_hf import HOTCallback, HOTConfig, HOTPatchError, apply_hot, remove_hot, report_of
from hot_hf.layers import HOTMixin
from hot_hf.memory import SavedTensors

from .architectures import batch, build
from .models import grads, mlp, tiny_bert, tiny_llama, token_batch, twin, whole_error
from .training import layers, losses, rows, trainer

peft = pytest.importorskip("peft")
NAMES = ["q_proj", "v_proj", "down_proj"]
NEAR = 0.18  # spec.md, section 8: 0.14 for one g_w; whole gradients of these models came to 0.07 to 0.13


def lora(model, **settings):
    config = {"r": 8, "target_modules": NAMES, "lora_alpha": 16, "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(**{**config, **settings}))


def patched(model) -> set[str]:
    return {n for n, m in model.named_modules() if isinstance(m, HOTMixin)}


def step(model, inputs, seed=0):
    torch.manual_seed(seed)  # LoRA's dropout
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), grads(model)


def equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("r", [1, 2, 8])
@pytest.mark.parametrize("config", [HOTConfig(lora=False), HOTConfig()], ids=["base", "lora_A too"])
def test_either_order_gives_the_same_model(r, config, seed):
    """C43: the same layers, loss and gradients, bit by bit; with dropout, which hides shared inputs. Near the exact."""
    base = tiny_llama()
    settings = {"r": r, "lora_dropout": 0.1}
    torch.manual_seed(seed)
    exact = lora(twin(base), **settings)
    torch.manual_seed(seed)
    after = lora(twin(base), **settings)
    apply_hot(after, config)
    before = twin(base)
    apply_hot(before, config)
    torch.manual_seed(seed)
    before = lora(before, **settings)
    assert len(report_of(before).unseen) == (0 if config.lora is False else 6)
    if (
        config.lora is not False
    ):  # made after patching: a loop of one's own patches again, HOTCallback by itself (below)
        apply_hot(before, config)
    assert patched(after) == patched(before)
    assert sum("lora_A" in n for n in patched(after)) == (0 if config.lora is False else 6)
    assert not any("lora_B" in n for n in patched(after))
    inputs = token_batch()
    results = [step(m.train(), inputs) for m in (exact, after, before)]
    assert results[0][0] == results[1][0] == results[2][0]
    assert equal(results[1][1], results[2][1])
    assert 0 < whole_error(results[1][1], results[0][1]) < NEAR


@pytest.mark.parametrize("way", ["apply_hot", "from_pretrained"])
@pytest.mark.parametrize("told", [True, False], ids=["HOTCallback(config)", "HOTCallback()"])
def test_adapters_after_hot_in_a_trainer(way, told, seed, tmp_path):
    """C43: patched before the adapters are made: HOTCallback patches lora_A by itself, and training is that
    of the other order, bit by bit. What is patched in full is left alone by the next run."""
    config, data = HOTConfig(), rows(8)
    base = tiny_llama()
    histories = []
    for first in (True, False):
        model = twin(base)
        if first and way == "apply_hot":
            apply_hot(model, config)
        elif first:
            base.save_pretrained(tmp_path / "base")
            model = hot_hf.AutoModelForCausalLM.from_pretrained(tmp_path / "base", hot_config=config)
        torch.manual_seed(seed)
        model = lora(model, init_lora_weights=True)
        callback = HOTCallback(config if told or not first else None)
        run = trainer(model, data, tmp_path / "run", [callback], max_steps=3)
        run.train()
        histories.append(losses(run))
        assert sum("lora_A" in name for name in layers(model)) == 6 and len(layers(model)) == 14 + 6
        assert all(layer.hot.called for layer in layers(model).values())
        states = {name: layer.hot for name, layer in layers(model).items()}
        run.train()
        assert all(layer.hot is states[name] for name, layer in layers(model).items())
    assert histories[0] == histories[1]


def test_adapters_after_hot_and_a_selection(tmp_path):
    """C46: lqs with adapters made after patching: the resumed run has the first one's choices and measures nothing."""
    config = HOTConfig.paper(lqs_batches=2)
    data, settings = rows(8), {"save_strategy": "steps", "save_steps": 3, "max_steps": 3}
    chosen = []
    for steps in (3, 4):
        model = tiny_llama(layers=1)
        apply_hot(model, config)
        model = lora(model)
        callback = HOTCallback(config)
        run = trainer(model, data, tmp_path, [callback], **{**settings, "max_steps": steps})
        run.train(resume_from_checkpoint=steps == 4)
        assert all(layer.hot.probe is None for layer in layers(model).values())
        assert ("hot/layers/measuring" in str(run.state.log_history[-2])) is False
        chosen.append(callback.selection)
    assert chosen[0] == chosen[1] and len(chosen[0]) == 7 + 3


def test_adapters_in_a_part_of_a_model(tmp_path, caplog):
    """Only a part was given to apply_hot: the rest stays as it is, and new adapters in the part are asked for."""
    model = nn.ModuleDict({"a": mlp(64, 64, 64), "b": mlp(64, 64)})
    apply_hot(model["a"], HOTConfig())
    run = trainer(tiny_llama(layers=1), rows(2), tmp_path)
    HOTCallback().on_train_begin(run.args, run.state, run.control, model=model)
    assert patched(model) == {"a.0", "a.2"} and not caplog.records
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["0"], r=4), model["a"])
    HOTCallback().on_train_begin(run.args, run.state, run.control, model=model)
    assert patched(model) == {"a.0.base_layer", "a.2"}
    assert len(caplog.records) == 1 and "a.0.lora_A.default. Only parts" in caplog.text


def test_frozen_layers_and_idle_adapters_are_told_of(tmp_path, caplog):
    """Nothing that HOT has patched trains: the report says that frozen layers keep nothing, a warning names
    lora=False; not without it, not where a head trains too, not where nothing trains at all."""
    model = lora(tiny_llama(layers=1))
    with pytest.warns(UserWarning, match=r"Without HOTConfig\(lora=False\)"):
        report = apply_hot(model, HOTConfig(lora=False))
    assert {row.reason for row in report.rows if row.action == "patched"} == {"INT8 per_token; frozen, keeps nothing"}
    run = trainer(model, rows(2), tmp_path, [HOTCallback()], max_steps=1)
    run.train()
    assert [r.levelname for r in caplog.records if "lora=False" in r.message] == ["WARNING"]
    for told in (lora(tiny_llama(layers=1)), lora(tiny_llama(layers=1), modules_to_save=["o_proj"])):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            apply_hot(told, HOTConfig(lora=False if "modules_to_save" in str(told) else None))
            apply_hot(told.requires_grad_(False))
    reasons = {row.name.rsplit(".", 2)[-2]: row.reason for row in apply_hot(model).rows}
    assert reasons["lora_A"] == "INT8 per_token / ht_int4"


@pytest.mark.parametrize("target", ["all-linear", NAMES, r".*layers\.0.*(q|up)_proj"])
def test_targets_on_a_patched_model(target):
    """C41: PEFT finds the layers of a patched model by "all-linear", by name and by pattern, as on a plain one."""
    plain, model = tiny_llama(), tiny_llama()
    apply_hot(model)
    adapted = [lora(m, target_modules=target) for m in (plain, model)]
    names = [{n for n, m in a.named_modules() if isinstance(m, peft.tuners.lora.LoraLayer)} for a in adapted]
    assert names[0] == names[1] and names[0]


def test_gpt2_conv1d_under_lora(seed):
    """C20, C41: PEFT treats a patched Conv1D as one (fan_in_fan_out), in either order."""
    base = build("GPT-2").eval()
    models = []
    for first in (False, True):
        model = twin(base)
        if first:
            apply_hot(model)
        torch.manual_seed(seed)
        model = lora(model, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
        apply_hot(model)
        models.append(model.eval())
    inputs = batch("GPT-2")
    assert patched(models[0]) == patched(models[1])
    (loss, got), (other, want) = (step(m, inputs) for m in models)
    assert loss == other and equal(got, want)


def test_frozen_base_keeps_nothing():
    """C40: no packed input for frozen layers; lora_A is kept packed on request, shared by q and v."""
    inputs = token_batch()
    sizes = {}
    for name, config in (("base", HOTConfig(lora=False)), ("lora", HOTConfig())):
        model = lora(tiny_llama(layers=1), target_modules=["q_proj", "v_proj"])
        apply_hot(model, config)
        with SavedTensors(model) as saved:
            model(**inputs)
        sizes[name] = saved.hot_bytes
    tokens = inputs["input_ids"].numel()
    assert sizes == {"base": 0, "lora": tokens * 64 // 2 + tokens * 4}  # half a byte each and a float per token, once


def test_two_adapters_and_modules_to_save():
    """C44: switching adapters trains the chosen one; modules_to_save is patched as what it copies; names match in
    full."""
    model = tiny_bert(labels=64)  # a classifier wide enough to be patched
    model = lora(model, target_modules=["query", "value"], task_type="SEQ_CLS", modules_to_save=["classifier"])
    model.add_adapter("second", peft.LoraConfig(target_modules=["query"], r=4, init_lora_weights=False))
    exact = twin(model)
    report = apply_hot(model, HOTConfig())
    names = patched(model)
    assert any("modules_to_save" in n for n in names)
    assert {n.rsplit(".", 1)[-1] for n in names if "lora_A" in n} == {"default", "second"}
    assert report.patched
    inputs = {"input_ids": torch.randint(97, (2, 9)), "labels": torch.tensor([1, 0])}
    for adapter in ("second", "default"):
        model.set_adapter(adapter), exact.set_adapter(adapter)
        (loss, got), (want_loss, want) = step(model, inputs), step(exact, inputs)
        assert loss == want_loss and got.keys() == want.keys()
        assert {n.split(".lora_A.")[1].split(".")[0] for n in got if "lora_A" in n} == {adapter}
        assert 0 < whole_error(got, want) < NEAR
    assert any("modules_to_save.default" in n for n in got)
    with pytest.raises(HOTPatchError, match="query"):
        apply_hot(model, HOTConfig(exclude=["query"]))
    assert not any(n.endswith("query.base_layer") for n in apply_hot(model, HOTConfig(exclude=["*.query"])).patched)


@pytest.mark.parametrize("first", ["LoRA", "HOT"])
def test_dora(first, seed):
    """DoRA multiplies an identity matrix and reads the base weight: right, patched before or after."""
    base = tiny_llama(layers=1)
    torch.manual_seed(seed)
    exact = lora(twin(base), use_dora=True)
    config = HOTConfig()
    if first == "HOT":
        apply_hot(base, config)
    torch.manual_seed(seed)
    model = lora(base, use_dora=True)
    apply_hot(model, config)
    inputs = token_batch()
    (want_loss, want), (loss, got) = step(exact, inputs), step(model, inputs)
    assert loss == want_loss and any("magnitude" in name for name in want)
    assert got.keys() == want.keys()
    assert 0 < whole_error(got, want) < NEAR


@pytest.mark.parametrize("lora_too", [False, True])
def test_merge_unload_save_and_load(lora_too, tmp_path):
    """C07, C44, C47: after a step, merging gives the plain model's weights, unloading patched layers; files load."""
    exact = lora(tiny_llama(layers=1))
    model = twin(exact)
    apply_hot(model, HOTConfig(lora=lora_too))
    inputs = token_batch()
    step(model, inputs)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    exact.load_state_dict(model.state_dict(), strict=True)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(twin(exact.unload()), tmp_path)
    exact = lora(again.unload())
    exact.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(peft.PeftModel.from_pretrained(twin(exact).unload(), tmp_path)(**inputs).logits,
                       model(**inputs).logits)  # fmt: skip
    merged, want = model.merge_and_unload(), exact.merge_and_unload()
    assert equal(merged.state_dict(), want.state_dict())
    assert patched(merged) and not any("lora" in n for n in patched(merged))
    merged.train().requires_grad_(True)
    loss, got = step(merged, inputs)
    assert loss == step(want.train().requires_grad_(True), inputs)[0] and len(got) == len(list(want.parameters()))
    remove_hot(merged)
    assert equal(merged.state_dict(), want.state_dict())


@pytest.mark.parametrize("enable", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_under_lora(enable, reentrant):
    """C33: what the unpatched model does, gradients or none, and where some they equal those without checkpointing."""
    exact = lora(tiny_llama()).train()
    model = twin(exact)
    apply_hot(model, HOTConfig())
    inputs = token_batch()
    straight = step(model, inputs)[1]
    results = []
    for m in (exact, model):
        m.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if enable:
            m.enable_input_require_grads()
        try:
            results.append(step(m, inputs)[1])
        except RuntimeError as error:  # reentrant without inputs that require gradients: nothing to differentiate
            results.append(str(error))
    if isinstance(results[0], str):
        assert results[1] == results[0]
    else:
        assert results[0].keys() == results[1].keys() and equal(results[1], straight)


def test_float32_adapters_on_a_bf16_base():
    """C34, C43: each gradient has its tensor's type, near the exact one in bf16."""
    base = tiny_llama(layers=1).bfloat16()
    exact = lora(base)
    assert {p.dtype for p in exact.parameters()} == {torch.float32, torch.bfloat16}  # as PEFT makes it
    model = twin(exact)
    apply_hot(model, HOTConfig())
    inputs = token_batch()
    (_, want), (_, got) = step(exact, inputs), step(model, inputs)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert got[name].dtype == parameter.dtype == torch.float32
    assert 0 < whole_error(got, want) < NEAR


def test_lora_b_at_zero():
    """C04: PEFT's own start, B = 0: lora_A's gradient is exactly zero, B's is near, nothing is NaN."""
    exact = lora(tiny_llama(layers=1), init_lora_weights=True)
    model = twin(exact)
    apply_hot(model, HOTConfig())
    got = step(model, token_batch())[1]
    assert all(not g.any() for n, g in got.items() if "lora_A" in n)
    assert all(torch.isfinite(g).all() and g.any() for n, g in got.items() if "lora_B" in n)


def test_target_parameters_of_experts():
    """LoRA on fused expert weights (target_parameters) sits on a patched experts layer."""
    base = build("Mixtral").eval()
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=["experts.down_proj"], init_lora_weights=False)
    torch.manual_seed(5)
    exact = peft.get_peft_model(twin(base), config).eval()
    model = twin(exact)
    apply_hot(model)
    assert any(n.endswith("experts.base_layer") for n in patched(model))
    inputs = batch("Mixtral")
    (want_loss, want), (loss, got) = step(exact, inputs), step(model, inputs)
    torch.testing.assert_close(loss, want_loss)
    assert 0 < whole_error(got, want) < NEAR


def test_qlora_on_the_cpu():
    """QLoRA: a bitsandbytes NF4 base stays as it is, lora_A is patched; without adapters the error says what to do."""
    bnb = pytest.importorskip("bitsandbytes")
    model = tiny_llama(layers=1)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            four = bnb.nn.Linear4bit(module.in_features, module.out_features, bias=False, quant_type="nf4")
            four.weight = bnb.nn.Params4bit(module.weight.data, requires_grad=False, quant_type="nf4")
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], four.to("cpu"))
    model.is_loaded_in_4bit = True
    with pytest.raises(HOTPatchError, match="Linear4bit"):
        apply_hot(copy.deepcopy(model))
    exact = lora(model, target_modules=["q_proj", "v_proj", "up_proj"])
    hot = copy.deepcopy(exact)
    report = apply_hot(hot, HOTConfig())
    assert len(report.patched) == 3 and all("lora_A" in n for n in report.patched)
    inputs = token_batch()
    (want_loss, want), (loss, got) = step(exact, inputs), step(hot, inputs)
    assert loss == want_loss
    assert 0 < whole_error(got, want) < NEAR


@pytest.mark.parametrize("way", ["hot_hf", "transformers"])
def test_quantized_base_from_pretrained(way, tmp_path):
    """bitsandbytes through from_pretrained: the error names the quantizer and the way on, and that way works; a folder
    of adapters on a quantized base is patched as it loads."""
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    if way == "transformers":
        hot_hf.install()
    auto = {"hot_hf": hot_hf, "transformers": transformers}[way].AutoModelForCausalLM
    tiny_llama(layers=1).save_pretrained(tmp_path / "base")
    settings = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True), "device_map": "cpu"}
    try:
        with pytest.raises(HOTPatchError, match=r"quantized.*\n*.*HOTConfig\(\)"):
            auto.from_pretrained(tmp_path / "base", hot_config="default", **settings)
        model = lora(auto.from_pretrained(tmp_path / "base", **settings))
        apply_hot(model, HOTConfig())
        assert len(patched(model)) == 3
        assert torch.isfinite(step(model, token_batch())[0])
        model.save_pretrained(tmp_path / "adapters")
        again = auto.from_pretrained(tmp_path / "adapters", hot_config=HOTConfig(), **settings)
    finally:
        hot_hf.uninstall()
    assert len(patched(again)) == 3 and all("lora_A" in name for name in patched(again))
    inputs = token_batch()
    with torch.no_grad():  # loaded adapters are frozen, and with gradients bitsandbytes multiplies in another way
        assert torch.equal(again(**inputs).logits, model(**inputs).logits)

"""apply_hot and remove_hot: which layers, under which names, what is refused, and that everything is given back."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hot_hf
from hot_hf import HOTConfig, HOTLinear, HOTPatchError, apply_hot, config_of, remove_hot, report_of
from hot_hf.decisions import canonical_name, matches
from hot_hf.saving import save_beside
from tests.models import grads, mlp, tiny_llama, tiny_vit, token_batch, twin


class Plain(nn.Linear):
    """A subclass whose forward is nn.Linear's."""


class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def fingerprint(model: nn.Module) -> dict:
    """Classes, attributes and parameter identities: what remove_hot has to give back."""
    return {
        name: (type(m), sorted(vars(m)), {n: id(p) for n, p in m.named_parameters(recurse=False)})
        for name, m in model.named_modules()
    }


def test_tied_embedding_stays_exact_and_tied():
    """A tied head is the output embedding: skipped by default, patched on request, the same Parameter throughout."""
    for skip in (True, False):
        model = tiny_llama(1, tie=True)
        weight = model.model.embed_tokens.weight
        report = apply_hot(model, HOTConfig(skip_heads=skip))
        assert ("lm_head" in report.skipped) == skip
        assert model.lm_head.weight is model.model.embed_tokens.weight is weight
        model(**token_batch()).loss.backward()
        assert weight.grad.any()


def test_patterns_match_full_names():
    """Include, exclude and per-name settings, on whole names and not on their last part."""
    model = tiny_llama(2)
    report = apply_hot(model, HOTConfig(include=["*.q_proj", "model.layers.1.*"], exclude=["*.layers.1.mlp.*"]))
    assert report.patched == [
        "model.layers.0.self_attn.q_proj",
        *(f"model.layers.1.self_attn.{p}_proj" for p in "qkvo"),
    ]
    assert report.skipped["model.layers.0.self_attn.k_proj"] == "not in include"
    assert report.skipped["model.layers.1.mlp.up_proj"] == "excluded"
    apply_hot(model, HOTConfig(overrides={"*_proj": {"rank": 4}, "model.layers.0.*": {"activation_format": "int8"}}))
    assert model.model.layers[0].mlp.up_proj.hot.plan.activation_format == "int8"
    assert model.model.layers[1].mlp.up_proj.hot.plan.activation_format == "ht_int4"
    assert {m.hot.plan.rank for m in model.modules() if isinstance(m, HOTLinear)} == {4}


def test_root_module():
    """C27: the root itself a Linear, with a pattern for its empty name."""
    model = nn.Linear(64, 64)
    report = apply_hot(model, HOTConfig(overrides={"": {"activation_format": "int8"}}))
    assert report.patched == ["(root)"] and type(model) is HOTLinear
    assert model.hot.plan.activation_format == "int8"
    assert "hot=INT8 per_token / int8" in repr(model)
    assert remove_hot(model) == [""] and type(model) is nn.Linear


def test_one_module_under_two_names():
    """C27: patched once, reported once, the second name noted; its gradient is the sum of both uses."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU())
    apart = nn.Sequential(twin(model[0]), nn.GELU(), twin(model[0]))
    model.append(model[0])
    report = apply_hot(model)
    apply_hot(apart)
    assert report.patched == ["0"] and report.aliases == {"2": "0"}
    assert "2 is 0 under a second name" in str(report) and "1 of 1 linear layers" in str(report)
    x = torch.randn(4, 64)
    for each in (model, apart):
        each(x).square().sum().backward()
    assert torch.equal(model[0].weight.grad, apart[0].weight.grad + apart[2].weight.grad)
    with pytest.raises(HOTPatchError, match="exclude: '2' matches 2, a second name of 0; write that"):
        apply_hot(model, HOTConfig(exclude=["2"]))
    assert remove_hot(model) == ["0"]


def test_one_of_two_models():
    """C52: only the one that was given changes; torch.nn.functional.linear is untouched."""
    linear = F.linear
    forward = nn.Linear.forward
    model, other = mlp(64, 64), mlp(64, 64)
    before = fingerprint(other)
    apply_hot(model)
    assert fingerprint(other) == before and F.linear is linear and nn.Linear.forward is forward
    assert type(model[0]) is HOTLinear


def test_configuration_is_kept_as_it_was(caplog, tmp_path):
    """The caller's object may change afterwards; parts with different configurations have none in common."""
    model, config = mlp(64, 64, 64), HOTConfig(overrides={"0": {"rank": 4}})
    apply_hot(model, config)
    config.rank, config.overrides["0"]["rank"] = 3, 2
    assert config_of(model) == HOTConfig(overrides={"0": {"rank": 4}})
    assert config_of(model) is model[0].hot.config is model[2].hot.config
    apply_hot(model[2], HOTConfig.fast())
    with pytest.raises(ValueError, match=r"2 different configurations.*: 0; 2\. Call apply_hot on the whole"):
        config_of(model)
    assert "2 configurations" in str(report_of(model)) and report_of(model).patched == ["0", "2"]
    assert not save_beside(model, tmp_path) and not list(tmp_path.iterdir())
    assert "No hot_config.json is written" in caplog.text
    apply_hot(model)
    assert save_beside(model, tmp_path) and HOTConfig.from_pretrained(tmp_path) == HOTConfig()


@pytest.mark.parametrize("build", [tiny_llama, tiny_vit, lambda: mlp(64, 64, 64)], ids=["llama", "vit", "mlp"])
def test_remove_gives_everything_back(build):
    """C52: classes, attributes, parameter identities and state_dict are those from before, after training too."""
    model = build()
    before, state = fingerprint(model), list(model.state_dict())
    parameters = list(model.parameters())
    report = apply_hot(model)
    assert list(model.state_dict()) == state
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert len(list(model.buffers())) == len(list(build().buffers()))
    assert remove_hot(model) == report.patched
    assert fingerprint(model) == before
    assert remove_hot(model) == [] and fingerprint(model) == before


def test_patching_again_replaces():
    """A second configuration replaces the first; layers that it leaves out are given back."""
    model = mlp(64, 64, 64)
    before = fingerprint(model)
    apply_hot(model)
    apply_hot(model, HOTConfig.smallest(exclude=["0"]))
    assert type(model[0]) is nn.Linear and model[2].hot.plan.activation_format == "hla_int4"
    remove_hot(model)
    assert fingerprint(model) == before


def test_failing_changes_nothing():
    """A refused configuration leaves the model, and an earlier patch, as they were."""
    model = mlp(64, 64, 64)
    apply_hot(model, "smallest")
    before = fingerprint(model)
    for config in (HOTConfig(include=["nothing"]), HOTConfig(min_features=65), HOTConfig(exclude=["*"])):
        with pytest.raises(HOTPatchError):
            apply_hot(model, config)
        assert fingerprint(model) == before and model[0].hot.plan.activation_format == "hla_int4"


def test_copies():
    """deepcopy, pickle and torch.save of a patched model: patched, independent, the same gradients bit for bit."""
    model = mlp(64, 64, 64)
    model.append(Plain(64, 64))
    apply_hot(model, HOTConfig(rounding="stochastic", linear_classes=["Plain"]))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
    ]
    x = torch.randn(18, 64)
    model(x).square().sum().backward()
    for other in copies:
        assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
        assert other[0].hot is not model[0].hot and other[0].hot.clock is other[2].hot.clock
        assert other[0].hot.clock is not model[0].hot.clock
        other(x).square().sum().backward()
        for name, value in grads(model).items():
            assert torch.equal(grads(other)[name], value), name
        remove_hot(other)
        assert type(other[0]) is nn.Linear and type(other[-1]) is Plain
    assert isinstance(model[0], HOTLinear)


def test_state_dicts_are_plain():
    """Patched and plain state dicts load into each other strictly."""
    model, plain = mlp(64, 64), mlp(64, 64)
    apply_hot(model)
    plain.load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict(plain.state_dict(), strict=True)
    assert torch.equal(model[0].weight, plain[0].weight)


def test_optimizer_made_before_patching():
    """Parameter identities survive: an optimizer from before still trains the layer."""
    model = mlp(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    apply_hot(model)
    before = model[0].weight.detach().clone()
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)


def test_a_forward_of_its_own():
    """An instance's forward would bypass the swapped class: refused by name, or left out on request."""
    model = mlp(64, 64, 64)
    model[0].forward = lambda x: x
    with pytest.raises(HOTPatchError, match=r"^0 carries a forward of its own.*exclude"):
        apply_hot(model)
    assert type(model[2]) is nn.Linear
    assert apply_hot(model, HOTConfig(exclude=["0"])).patched == ["2"]


def test_subclasses():
    """C22: skipped with a note unless opted in; one with a forward of its own cannot be."""
    model = nn.Sequential(Plain(64, 64), Scaled(64, 64), nn.Linear(64, 64))
    report = apply_hot(model)
    assert report.patched == ["2"] and "opt in with linear_classes" in report.skipped["0"]
    report = apply_hot(model, HOTConfig(linear_classes=["Plain"]))
    assert report.patched == ["0", "2"] and isinstance(model[0], Plain)
    assert [row.kind for row in report.rows] == ["Plain", "Scaled", "Linear"]
    model(torch.randn(4, 64)).sum().backward()
    # The opt-in belongs to the configuration, not to the model's past.
    assert apply_hot(model).patched == ["2"] and type(model[0]) is Plain
    with pytest.raises(HOTPatchError, match=r"1 is a Scaled, whose forward is its own.*Take 'Scaled' out"):
        apply_hot(model, HOTConfig(linear_classes=["Scaled"]))


def test_other_class_changes_are_noticed():
    """A parametrization put on a patched layer has to go before HOT does; before patching it is a subclass."""
    model = mlp(64, 64, 64)
    apply_hot(model)
    nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Identity())
    with pytest.raises(HOTPatchError, match="0 is a ParametrizedHOTLinear since apply_hot"):
        remove_hot(model)
    assert isinstance(model[2], HOTLinear)
    model(torch.randn(4, 64)).sum().backward()
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    assert remove_hot(model) == ["0", "2"]
    nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Identity())
    assert "subclass ParametrizedLinear" in apply_hot(model).skipped["0"]


def test_weight_norm():
    """A weight that is computed before each forward (no leaf) gets its gradient through HOT."""
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)), nn.Linear(64, 64))
    assert apply_hot(model).patched == ["1"]
    with pytest.warns(FutureWarning):
        old = nn.utils.weight_norm(nn.Linear(64, 64))
    apply_hot(old)
    old(torch.randn(4, 64)).sum().backward()
    assert old.weight_g.grad.any() and old.weight_v.grad.any()


def test_canonical_names():
    for wrapped, plain in (
        ("base_model.model.model.layers.0.self_attn.q_proj.base_layer", "model.layers.0.self_attn.q_proj"),
        ("base_model.model.score.modules_to_save.default", "score"),
        ("base_model.model.score.original_module", "score"),
        ("base_model.model.lm_head.modules_to_save.second.base_layer", "lm_head"),
        ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj"),
        ("base_model.model.q_proj.lora_A.default", "q_proj.lora_A.default"),
    ):
        assert canonical_name(wrapped) == plain
        assert matches(wrapped, plain) and matches(wrapped, wrapped)
    assert not matches("score_head", "score")


@pytest.mark.parametrize("before", [True, False], ids=["patch then LoRA", "LoRA then patch"])
@pytest.mark.parametrize("lora", [True, False])
def test_patterns_mean_the_same_under_peft(before, lora):
    """The same patterns before and after PEFT's wrapping: the same layers, heads in modules_to_save left alone."""
    from peft import LoraConfig, get_peft_model

    config = HOTConfig(exclude=["model.layers.0.*"], overrides={"*.v_proj": {"activation_format": "int8"}}, lora=lora)
    peft_config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], lora_dropout=0.0)
    model = tiny_llama(2)
    if before:
        apply_hot(model, config)
        model = get_peft_model(model, peft_config)
    else:
        model = get_peft_model(model, peft_config)
        apply_hot(model, config)
    layer = "model.layers.1."
    expected = {layer + f"self_attn.{p}_proj.lora_A.default" for p in "qv"} if lora else set()
    if before:  # adapters made since: known, and patched by a second call
        assert {canonical_name(n) for n in report_of(model).unseen} == expected
        apply_hot(model, config)
    assert report_of(model).unseen == []
    patched = {canonical_name(n): m for n, m in model.named_modules() if isinstance(m, HOTLinear)}
    adapters = {n for n in patched if "lora_" in n}
    base = {n for n in patched if n not in adapters}
    assert base == {layer + f"self_attn.{p}_proj" for p in "qkvo"} | {
        layer + f"mlp.{p}_proj" for p in ("gate", "up", "down")
    }
    assert adapters == expected
    assert patched[layer + "self_attn.v_proj"].hot.plan.activation_format == "int8"
    model(**token_batch()).loss.backward()
    assert model.base_model.model.lm_head.modules_to_save.default.weight.grad.any()
    assert patched[layer + "self_attn.q_proj"].weight.grad is None


def test_public_names():
    """Everything that __all__ promises is there, and importing patched nothing."""
    assert all(hasattr(hot_hf, name) for name in hot_hf.__all__)
    assert type(nn.Linear(2, 2)) is nn.Linear

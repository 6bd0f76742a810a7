"""The coverage report: what is patched, what is not, and why."""

import copy
import re

import pytest
from torch import nn

from hot_hf import HOTConfig, HOTPatchError, apply_hot, fix_selection, remove_hot, report_of
from tests.models import mlp, tiny_llama, tiny_vit


def test_llama_coverage():
    """Every projection, not the head; the shares are counted here by hand."""
    model = tiny_llama(2)
    report = apply_hot(model)
    assert len(report.patched) == 14 and report.skipped == {"lm_head": "output head or router (skip_heads)"}
    inner = 2 * (4 * 64 * 64 + 3 * 64 * 128)
    total = sum(p.numel() for p in model.parameters())
    assert report.parameter_share == inner / total
    assert report.multiply_add_share == inner / (inner + 97 * 64)
    text = str(report)
    assert "14 of 15 linear layers patched" in text and f"{inner / total:.1%} of parameters" in text
    assert re.search(r"gate_proj \(Linear\) +2 +128 x 64 +patched +INT8 per_token / ht_int4", text)
    assert re.search(r"lm_head \(Linear\) +1 +97 x 64 +exact +output head", text)


def test_vit_coverage_names_what_is_not_linear():
    """The patch embedding multiplies and stays exact; added embeddings do not multiply."""
    report = apply_hot(tiny_vit())
    assert report.others == {"Conv2d": (1, 64 * 4 + 64)}
    assert "Conv2d" in str(report) and "not a linear layer" in str(report)
    assert report.skipped == {"classifier": "narrower than min_features=64"}


def test_narrow_and_exact_layers():
    model = mlp(64, 63, 64, 64)
    report = apply_hot(model)
    assert report.patched == ["4"] and set(report.skipped) == {"0", "2"}
    exact = {"grad_input_bits": None, "activation_format": "none"}
    report = apply_hot(model, HOTConfig(min_features=1, overrides={"2": exact}))
    assert report.patched == ["0", "4"] and report.skipped == {"2": "configured exact"}


@pytest.mark.parametrize("build", [tiny_llama, tiny_vit, lambda: mlp(64, 63, 64, 64)], ids=["llama", "vit", "mlp"])
def test_report_of_a_patched_model(build):
    """What apply_hot said can be read from the model, from its copies too; without HOT there is nothing to report."""
    model = build()
    assert report_of(model) is None
    report = apply_hot(model, HOTConfig(rank=5))
    assert report_of(model) == report and str(report_of(copy.deepcopy(model))) == str(report)
    remove_hot(model)
    assert report_of(model) is None


def test_report_follows_the_model():
    """Plans chosen since, layers made since, and layers frozen since, which keep nothing."""
    model = mlp(64, 64, 64, 64)
    apply_hot(model, HOTConfig.paper(lqs_batches=9))
    assert "lqs" in report_of(model).rows[0].reason
    fix_selection(model)  # nothing was recorded
    assert report_of(model).rows[0].reason == "INT4 per_token / hla_int8 r=8"
    model[2] = nn.Linear(64, 64)
    model[4].requires_grad_(False)
    report = report_of(model)
    assert report.unseen == ["2"] and report.patched == ["0", "4"]
    assert report.rows[2].reason == "INT4 per_token; frozen, keeps nothing"
    budget = mlp(64, 64)
    budget[0].weight.requires_grad_(False)  # a bias that trains keeps nothing either
    first = apply_hot(budget, HOTConfig(selection="budget", max_grad_error=0.1))
    assert first == report_of(budget) and first.rows[0].reason == "chosen by budget; frozen, keeps nothing"


def test_low_coverage_is_announced(caplog):
    """A line with counts: a warning where less than half of what the user did not leave out is covered."""
    wide_head = {"vocab_size": 4096}
    caplog.set_level("INFO", logger="hot_hf")
    for model, config, level in (
        (tiny_llama(1), HOTConfig(), "INFO"),
        (tiny_llama(1, **wide_head), HOTConfig(), "WARNING"),
        (tiny_llama(1, **wide_head), HOTConfig(exclude=["lm_head"]), "INFO"),
        (tiny_llama(2), HOTConfig(include=["*.q_proj"]), "INFO"),
        (mlp(64, 64), HOTConfig(grad_input_bits=None, activation_format="none"), "INFO"),
    ):
        caplog.clear()
        report = apply_hot(model, config)
        assert not caplog.records
        report.announce()
        assert [r.levelname for r in caplog.records] == [level]
        assert f"{len(report.patched)} of {len(report.rows)} linear layers patched" in caplog.text
        assert ("report_of" in caplog.text) == (level == "WARNING")


def test_pattern_without_a_layer():
    """Bad input: the pattern, the names there are, and a pattern that would match."""
    for where in ("include", "exclude"):
        with pytest.raises(HOTPatchError, match=rf"{where}: 'q_proj' matches no linear layer.*write '\*\.q_proj'"):
            apply_hot(tiny_llama(1), HOTConfig(**{where: ["q_proj"]}))
    with pytest.raises(HOTPatchError, match=r"overrides: '\*\.c_attn' matches no.*model.layers.0.self_attn.q_proj"):
        apply_hot(tiny_llama(1), HOTConfig(overrides={"*.c_attn": {"rank": 4}}))
    with pytest.raises(HOTPatchError, match="embed_tokens"):  # an embedding is no linear layer
        apply_hot(tiny_llama(1), HOTConfig(include=["*.embed_tokens"]))


def test_nothing_to_patch():
    """Bad input: a model without linear layers, or with narrow ones only: the table and the remedy."""
    with pytest.raises(HOTPatchError, match="nothing to patch in Conv2d"):
        apply_hot(nn.Conv2d(3, 8, 3))
    with pytest.raises(HOTPatchError, match=r"(?s)nothing to patch.*narrower than min_features=64.*lower min_features"):
        apply_hot(mlp(32, 32))

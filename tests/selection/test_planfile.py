"""Plans saved, loaded, shown and used again."""

import json

import pytest
import torch

from hot_hf import HOTConfig, HOTPatchError, SelectedPlan, apply_hot, fix_selection
from hot_hf.cli import main
from hot_hf.layers import HOTMixin
from tests.models import grads, tiny_llama, token_batch, twin


@pytest.fixture(scope="module")
def selected():
    """A model with a plan of its own, and the plan."""
    model = tiny_llama()
    plain = twin(model)
    config = HOTConfig(
        selection="budget", max_grad_error=0.12, lqs_batches=2, seed=5, exclude=["*.0.mlp.up_proj"],
        overrides={"*.1.*.o_proj": {"activation_format": "int8"}},
    )  # fmt: skip
    apply_hot(model, config)
    for _ in range(2):
        model(**token_batch(2, 64)).loss.backward()
    fix_selection(model)
    model.zero_grad()
    return plain, model, SelectedPlan.of(model)


def plans(model) -> dict:
    return {m.hot.name: m.hot.plan for m in model.modules() if isinstance(m, HOTMixin)}


def test_round_trip(selected, tmp_path):
    """The same plan comes back; written again it is the same file; small, and a layer per line."""
    _, _, plan = selected
    path = plan.save(tmp_path / "new" / "plan.json")
    again = SelectedPlan.load(path)
    assert {n: c.plan for n, c in again.layers.items()} == {n: c.plan for n, c in plan.layers.items()}
    assert len(again.layers) == 12 and again.budget == {"max_grad_error": 0.12}
    assert again.save(tmp_path / "again.json").read_text() == path.read_text()
    assert path.stat().st_size < 800 * 12 and len(path.read_text().splitlines()) < 12 + 12
    for name, choice in again.layers.items():
        assert choice.grad_weight.error == pytest.approx(plan.layers[name].grad_weight.error, rel=1e-3)
        assert choice.bytes == plan.layers[name].bytes


def test_used_again_without_measuring(selected, tmp_path):
    """From the file: every layer as it was chosen, from the first step on, with gradients equal bit by bit; what the
    configuration excluded or overrode stays so."""
    plain, model, plan = selected
    config = HOTConfig.from_plan(plan.save(tmp_path / "plan.json"))
    other = twin(plain)
    apply_hot(other, config)
    assert plans(other) == plans(model) and all(m.hot.probe is None for m in other.modules() if hasattr(m, "hot"))
    assert config.seed == 5 and config.selection is None
    batch = token_batch()
    for m in (model, other):
        m.zero_grad()
        m(**batch).loss.backward()
    assert all(torch.equal(value, grads(other)[name]) for name, value in grads(model).items())
    model.zero_grad()
    assert HOTConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_changes_to_a_plan(selected, tmp_path):
    path = selected[2].save(tmp_path / "plan.json")
    config = HOTConfig.from_plan(path, rounding="nearest", overrides={"*.q_proj": {"activation_format": "none"}})
    other = twin(selected[0])
    apply_hot(other, config)
    formats = {n: p.activation_format for n, p in plans(other).items()}
    assert {f for n, f in formats.items() if "q_proj" in n} == {"none"}
    with pytest.raises(ValueError, match="no field"):
        HOTConfig.from_plan(path, bits=4)


def test_a_plan_of_another_model(selected, tmp_path):
    """All layers that the model lacks are named, and nothing is changed."""
    config = HOTConfig.from_plan(selected[2].save(tmp_path / "plan.json"))
    other = tiny_llama(layers=1)
    with pytest.raises(
        HOTPatchError, match=r"'\*\.1\.\*\.o_proj', 'model\.layers\.1\.self_attn\.q_proj'.* and \d more"
    ):
        apply_hot(other, config)
    assert not plans(other)


def test_nothing_was_selected():
    model = tiny_llama()
    with pytest.raises(ValueError, match="No plan was selected for this LlamaForCausalLM: apply_hot with"):
        SelectedPlan.of(model)
    apply_hot(model, HOTConfig(selection="budget", max_grad_error=0.1))
    with pytest.raises(ValueError, match="No plan was selected"):
        SelectedPlan.of(model)


def edited(plan: SelectedPlan, tmp_path, edit) -> str:
    path = plan.save(tmp_path / "plan.json")
    values = json.loads(path.read_text())
    edit(values)
    path.write_text(json.dumps(values))
    return str(path)


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    "edit, message",
    [
        (lambda v: v.pop("layers"), r"is no plan: it lacks \['layers'\]"),
        (lambda v: v.update(format=2), "has format 2, this version of hot_hf reads 1"),
        (lambda v: v["layers"][Q].pop("grad_input"), f"layer '{Q}' is not as SelectedPlan.save writes it"),
        (lambda v: v["layers"][Q].update(speed=3), f"layer '{Q}'"),
        (lambda v: v["layers"][Q]["plan"].update(rank=99), r"layer '.*q_proj'.*rank=99"),
        (lambda v: v["layers"][Q]["plan"].update(activation_format="int3"), "int3"),
        (lambda v: v["layers"].update({Q: 3}), f"layer '{Q}'"),
    ],
)
def test_files_that_are_no_plan(edit, message, selected, tmp_path, capsys):
    path = edited(selected[2], tmp_path, edit)
    with pytest.raises(ValueError, match=message):
        HOTConfig.from_plan(path)
    assert main(["plan", "show", path]) == 2
    assert capsys.readouterr().err.startswith("hot-hf plan: ")


def test_missing_and_broken_files(tmp_path, capsys):
    with pytest.raises(FileNotFoundError, match=r"No plan at .*none\.json"):
        HOTConfig.from_plan(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text('{"layers": ')
    (tmp_path / "list.json").write_text("[1]")
    for name, message in (("none", "No plan at"), ("broken", "not valid JSON"), ("list", "is no plan: it lacks")):
        assert main(["plan", "show", str(tmp_path / f"{name}.json")]) == 2
        assert message in capsys.readouterr().err


def test_show(selected, tmp_path, capsys):
    """The table has every layer with its errors, and totals; the plot is a picture."""
    pytest.importorskip("matplotlib")
    path = selected[2].save(tmp_path / "plan.json")
    assert main(["plan", "show", str(path), "--png", str(tmp_path / "plan.png")]) == 0
    out = capsys.readouterr().out
    q = next(line for line in out.splitlines() if Q in line)
    choice = selected[2].layers[Q]
    assert f"{choice.grad_weight.error:.3f}" in q and choice.plan.activation_format in q
    assert "LlamaForCausalLM, max_grad_error=0.12: " in out and "MiB" in out
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert len(out.splitlines()) >= 12 + 2 + 2

"""benchmarks/gradient_fidelity.py: its arithmetic against float64, its resumption, its report."""

import csv

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

import gradient_fidelity
from fidelity import runs, single
from fidelity.capture import capture
from fidelity.store import Store, key_of, settings_of

from hot_hf import HOTConfig


def test_captured_tensors_give_the_layer_s_own_gradients():
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = torch.nn.Linear(24, 40), torch.nn.Linear(40, 8)

        def forward(self, x, y):
            class Out:
                loss = (self.two(torch.relu(self.one(x))) - y).square().mean()

            return Out

    model, twin = Twice(), Twice()
    twin.load_state_dict(model.state_dict())
    batch = {"x": torch.randn(3, 7, 24), "y": torch.randn(3, 7, 8)}
    layers = capture(model, batch, ["one", "two"])
    twin(**batch).loss.backward()
    for name, (x, g, w) in layers.items():
        assert x.shape[0] == g.shape[0] == 21 and torch.equal(w, twin.get_submodule(name).weight)
        # float32 sums of 21 products, in another order
        torch.testing.assert_close(single.exact("g_w", x, g, w).float(), twin.get_submodule(name).weight.grad)
    assert all(p.grad is None for p in model.parameters())


def test_errors_order_as_the_arithmetic_says():
    """Smooth tokens of uneven size: more bits, finer scales and more sequencies are nearer, each by its own margin."""
    tokens, wide, out = 256, 64, 48
    drift = torch.randn(tokens, wide).cumsum(0) / 8
    size = torch.logspace(-1.5, 0, tokens)[torch.randperm(tokens), None]
    x, g, w = drift, torch.randn(tokens, out) * size, torch.randn(out, wide)
    layers = {"layer": (x, g, w)}
    errors = {}
    for row in single.ROWS:
        truth = {"layer": single.exact(row.gradient, x, g, w)}
        result = single.errors(row, layers, truth)
        errors[row.label] = result["error"]
        assert result["error"] == result["largest_error"] and result["cosine"] == result["worst_cosine"]
        # A projection, or rounding: never worse than a guess of zero, bar the coarsest grid with random rounding.
        assert 0 < result["error"] < (3 if "stochastic" in row.label else 1)
    assert errors["INT8 per token, H, nearest (default)"] < errors["INT4 per token, H, nearest"] / 8  # 127 / 7 levels
    assert errors["INT4 per token, H, nearest"] < errors["INT4 per tensor, H, nearest"]
    assert errors["INT4 per token, H, nearest"] < errors["INT4 per token, H, stochastic"]
    assert errors["INT8 full, per feature"] < errors["`ht_int4` (default)"] < errors["3-bit `ht`"]
    assert errors["HLA r=12 INT8"] < errors["HLA r=8 INT8, per feature"]


def test_first_rows_of_sylvester_are_another_projection():
    """Tokens that alternate are row 1 of H (Sylvester), the highest sequency: kept by the one, dropped by the other."""
    sign = torch.tensor([1.0, -1.0]).repeat(16)[:, None]
    x, g, w = sign * torch.randn(1, 32), sign * torch.randn(1, 16), torch.randn(16, 32)
    rows = {row.label: row for row in single.ROWS}
    truth = {"layer": single.exact("g_w", x, g, w)}
    errors = single.errors(rows["HLA r=8, first 8 Sylvester rows"], {"layer": (x, g, w)}, truth)
    assert errors["error"] < 0.02  # two INT8 roundings, 0.5 / 127 each at most
    # The other drops them altogether, up to the float32 rounding of the transform's sums.
    assert rows["HLA r=8 INT8, per feature"].compute(x, g, w).abs().max() < 1e-5


def test_store_finds_what_was_finished(tmp_path):
    path = tmp_path / "rows.csv"
    Store(path, ("a",), ("b",)).add(a='{"x": 1}', b=2.5)
    again = Store(path, ("a",), ("b",))
    assert again.find(a='{"x": 1}')["b"] == "2.5" and again.find(a="other") is None


def test_a_stored_run_outlives_new_fields():
    """The run of a configuration without some field is the run of that field's default; exact stays exact."""
    old = HOTConfig.smallest().to_dict()
    del old["share"], old["block_size"]
    assert runs.with_defaults(key_of(old)) == key_of(settings_of(HOTConfig.smallest()))
    assert runs.with_defaults(key_of({**old, "share": False})) == key_of(settings_of(HOTConfig.smallest(share=False)))
    assert runs.with_defaults(key_of(None)) == key_of(None)


def test_one_command_resumes_and_reports(tmp_path):
    def call(*arguments):
        assert gradient_fidelity.main(["--data", "digits", "--steps", "2", "--output", str(tmp_path), *arguments]) == 0
        with (tmp_path / "fidelity_gradients.csv").open() as file:
            gradients = list(csv.DictReader(file))
        training = tmp_path / "fidelity_training.csv"
        return gradients, training.read_text() if training.exists() else ""

    first, _ = call("--parts", "gradients", "--limit", "3")
    assert len(first) == 3
    rows, _ = call("--parts", "gradients")
    assert rows[:3] == first and len(rows) == len(single.ROWS) and {r["layers"] for r in rows} == {"24"}
    _, one = call("--parts", "training", "--limit", "1")
    _, two = call("--parts", "training", "--limit", "1")
    assert two.startswith(one) and two.count("\n") == one.count("\n") + 1 == 3
    report = (tmp_path / "fidelity.md").read_text()
    assert "`ht_int4` (default)" in report and "from exact" in report
    assert (tmp_path / "fidelity.png").read_bytes().startswith(b"\x89PNG")

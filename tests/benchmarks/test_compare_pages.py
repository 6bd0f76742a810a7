"""The pages of benchmarks/compare_methods.py from made-up rows: numbers where they belong."""

import pytest

pytest.importorskip("matplotlib")

from fidelity.store import Store, key_of
from gradient_fidelity import TRAINING_KEY, TRAINING_VALUES
from methods import ablation_page, shared, training_page
from methods.claims import claims
from methods.plan import Run
from methods.rows import key
from methods.summary import Results
from methods.tasks import TASKS

from hot_hf import HOTConfig


def row(task, method, seed, loss, accuracy="", linear=1000, kept=2000, norm=1.0, seconds=1.0, **changes):
    return {
        **{name: str(value) for name, value in key(Run(task, method, seed), None).items()},
        "held_out_loss": str(loss),
        "held_out_accuracy": str(accuracy),
        "largest_grad_norm": str(norm),
        "kept_bytes": str(kept),
        "kept_linear_bytes": str(linear),
        "seconds_per_step": str(seconds),
        "minutes": "1",
        "torch": "2",
        "machine": "a machine",
        **changes,
    }


@pytest.fixture
def rows():
    """code: the default within both bounds, paper() not. minilm: the default half a percent below, paper() more."""
    return [
        row("code", "exact", 0, 2.000),
        row("code", "exact", 1, 3.000),
        row("code", "default", 0, 2.002, linear=125, kept=1125, seconds=0.9),
        row("code", "default", 1, 3.006, linear=125, kept=1125, seconds=0.9),
        row("code", "paper", 0, 2.250, linear=125, kept=1125, norm=50),
        row("code", "paper", 1, 3.150, linear=125, kept=1125, norm=50),
        row("minilm", "exact", 0, 0.30, 0.850, linear=1000, kept=8000),
        row("minilm", "default", 0, 0.31, 0.845, linear=130, kept=7130, seconds=1.5),
        row("minilm", "paper", 0, 0.33, 0.840, linear=250, kept=7250),
        row("minilm", "bf16", 0, 0.30, 0.851, linear=500, kept=4000),
    ]


def line(table, start):
    return next(cells for cells in table if all(s in c for s, c in zip(start, cells, strict=False)))


def test_claims_are_the_rows(rows):
    table = claims(Results(rows))
    good = line(table, ["Python sources", "`default`"])
    assert good[2:] == ["+0.0040 (+0.0020 to +0.0060)", "0.1250", "2", "yes"]
    assert line(table, ["Python sources", "`paper`"])[2:] == ["+0.2000 (+0.1500 to +0.2500)", "0.1250", "2", "no: loss"]
    scales = line(table, ["MiniLM", "`default`"])
    assert scales[2:] == ["-0.50 points", "0.1300 (an eighth, and scales)", "1", "yes"]
    assert line(table, ["MiniLM", "`paper`"])[2:] == ["-1.00 points", "0.2500", "1", "no: accuracy and bytes"]


def test_rows_of_other_settings_are_left_out(rows):
    short = row("prose", "exact", 0, 2.0, steps="3")
    old = row("code", "luq", 0, 1.0, configuration='{"hot": null}')
    unknown = {**row("code", "luq", 0, 1.0), "method": "given up"}
    results = Results([*rows, short, old, unknown])
    assert "prose" not in results.by and results.methods("code") == ["exact", "default", "paper"]
    assert results.above("code", "luq", "held_out_loss") is None


def test_training_page_holds_tables_and_plot(rows, tmp_path):
    training_page.write(rows, tmp_path)
    page = (tmp_path / "training.md").read_text()
    for part in ("## Does it hold?", "## SmolLM2-135M, Python sources", "a machine, torch 2"):
        assert part in page
    table = [r.strip("| ").split(" | ") for r in page.splitlines() if r.startswith("| `exact`")]
    assert [r[:3] for r in table] == [
        ["`exact`: exact float32", "1", "0.3000"],
        ["`exact`: exact float32", "2", "2.5000 (2.0000 to 3.0000)"],
    ]
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    training_page.write([], tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_ablation_page_reads_the_rows(rows, tmp_path):
    ablation_page.write(rows, tmp_path)
    assert not (tmp_path / "ablation.md").exists()  # nothing ablated yet
    more = [
        row("code", "ablation-g_x-only", 0, 2.001),
        row("code", "ablation-g_w-only", 0, 2.004, linear=125),
        row("code", "ablation-rank-4", 0, 2.5, linear=62),
        row("code", "ablation-no-transform", 0, 2.1, linear=125),
    ]
    ablation_page.write([*rows, *more], tmp_path)
    page = (tmp_path / "ablation.md").read_text().replace("\n  ", " ")
    assert "approximating g_x alone adds +0.0010 to the loss, g_w alone +0.0040: more for g_w, by one seed." in page
    assert "the costliest changes are HLA INT8 r=4 (+0.4980), no transform (+0.0980)" in page
    assert "| rank | HLA INT8 r=4 | 1 | 2.5000 | +0.5000 |  | 0.062 |" in page
    assert "MiniLM" not in page
    for loss, verdict in ((3.004, "the loss is more sensitive to g_w"), (2.999, "2 seeds do not tell them apart")):
        seeds = [row("code", "ablation-g_x-only", 1, 3.0008), row("code", "ablation-g_w-only", 1, loss)]
        ablation_page.write([*rows, *more, *seeds], tmp_path)
        assert verdict in (tmp_path / "ablation.md").read_text().replace("\n  ", " ")
    assert (tmp_path / "ablation.png").read_bytes().startswith(b"\x89PNG")


def test_runs_of_the_fidelity_harness_are_taken_over(tmp_path):
    """Those of the same configuration, task, seed and steps, and no others."""
    path = tmp_path / "fidelity_training.csv"
    store = Store(path, TRAINING_KEY, TRAINING_VALUES)
    paper = HOTConfig.paper().to_dict()
    paper["token_grid"] = None  # as it was stored while that field existed
    for data, configuration, seed, steps, loss in (
        ("text", None, 0, TASKS["code"].steps, 2.0),
        ("text", paper, 0, TASKS["code"].steps, 2.1),
        ("text", HOTConfig().to_dict(), 0, 3, 9.0),  # another length
        ("digits", HOTConfig().to_dict(), 2, TASKS["digits"].steps, 0.5),  # seed 0 inside: nothing is drawn
        ("digits", HOTConfig(rank=3).to_dict(), 0, TASKS["digits"].steps, 9.0),  # nobody's method
    ):
        values = dict.fromkeys(TRAINING_VALUES, "1") | {"held_out_loss": loss}
        store.add(data=data, configuration=key_of(configuration), seed=seed, steps=steps, **values)
    runs = [
        Run(task, m, seed)
        for task in ("code", "prose", "digits")
        for m in ("exact", "default", "paper")
        for seed in (0, 2)
    ]
    found = {(r["task"], r["method"], r["seed"]): r for r in shared.rows(runs, None, path)}
    assert {k: r["held_out_loss"] for k, r in found.items()} == {
        ("code", "exact", 0): "2.0",
        ("code", "paper", 0): "2.1",
        ("digits", "default", 2): "0.5",
    }
    taken = found["digits", "default", 2]
    assert taken["configuration"] == key(Run("digits", "default", 2), None)["configuration"]
    assert taken["minutes"] == taken["machine"] == ""
    results = Results([{name: str(value) for name, value in r.items()} for r in found.values()])
    assert results.difference_text("code", "paper") == "+0.1000"
    training_page.write([{n: str(v) for n, v in r.items()} for r in found.values()], tmp_path)

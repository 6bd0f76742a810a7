"""benchmarks/bench_step.py as its page names it: without arguments, on tiny models and with few configurations."""

import csv
import importlib.util
import sys
from pathlib import Path

import pytest

from tests.models import image_batch, tiny_llama, tiny_vit, token_batch

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """The script, whose models are tiny and whose rows go elsewhere; returns a function that gives those rows."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    spec = importlib.util.spec_from_file_location("bench_step", SCRIPTS / "bench_step.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_step", module)
    spec.loader.exec_module(module)
    tiny = {"smollm2": lambda: (tiny_llama(1), token_batch()), "vit": lambda: (tiny_vit(1), image_batch())}
    assert module.MODELS.keys() == tiny.keys()
    monkeypatch.setattr(module, "MODELS", {name: (title, tiny[name]) for name, (title, _) in module.MODELS.items()})
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(module, "write_pages", lambda: None)

    def rows(*arguments: str) -> list[dict[str, str]]:
        settings = ["--rounds", "2", "--configurations", "float32", "HOT default"]
        monkeypatch.setattr("sys.argv", ["bench_step.py", *arguments, *settings])
        module.main()
        return list(csv.DictReader((tmp_path / "bench_step.csv").open()))

    return rows


def test_both_models_without_arguments(bench):
    rows = bench()
    found = [(row["model"].split(",")[0], row["configuration"]) for row in rows]
    assert found == [(m, c) for m in ("SmolLM2-135M", "ViT-B/16") for c in ("float32", "HOT default")]
    assert all(float(row["ms"]) > 0 and row["x_float32"] for row in rows)
    assert all(row["replaced_share"] for row in rows if row["configuration"] == "float32")


def test_one_model(bench):
    assert {row["model"] for row in bench("vit")} == {"ViT-B/16, batch 8"}


def test_another_model_is_refused(bench, capsys):
    with pytest.raises(SystemExit):
        bench("gpt5")
    assert "'gpt5'; choose of smollm2, vit" in capsys.readouterr().err

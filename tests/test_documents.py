"""The documents say what the commands that they name print, and point at what is there."""

import csv
import importlib.util
import random
import re
from pathlib import Path

import pytest
import transformers

from hot_hf import apply_hot
from hot_hf.demo.models import small_vit

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "scripts/launch/README.md", *(ROOT / "docs").rglob("*.md")]


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page):
    """Relative links, and scripts, tests and notebooks that are named in the text."""
    text = page.read_text()
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (page.parent / target).exists(), target
    for path in re.findall(r"\b(?:benchmarks|scripts|tests|notebooks)/[\w/]+\.(?:py|yaml|ipynb)", text):
        assert (ROOT / path).exists(), path


def test_the_readme_shows_a_report_as_it_is_printed():
    """The table of the README's first page is that of the demo's ViT under the default configuration."""
    block = re.search(r"(?m)^    layer +count .*\n(?:    .*\n)+", (ROOT / "README.md").read_text())[0]
    assert [line[4:].rstrip() for line in block.splitlines()] == str(apply_hot(small_vit())).splitlines()


def test_every_environment_variable_is_named():
    sources = "".join(path.read_text() for path in (ROOT / "hot_hf").rglob("*.py"))
    used = set(re.findall(r"""environ[^\n]*["'](HOT_HF_\w+)["']""", sources))
    page = (ROOT / "docs/environment.md").read_text()
    assert len(used) >= 4 and set(re.findall(r"^\| `(HOT_HF_\w+)=", page, re.M)) == used


def test_the_readme_shows_the_three_ways_in():
    text = (ROOT / "README.md").read_text()
    for way in ("hot_config=HOTConfig())", "hot_hf.install()", "callbacks=[HOTCallback("):
        assert way in text
    assert "apply_hot(model, HOTConfig())" in text and "remove_hot(model)" in text


def test_the_spec_quotes_measured_errors():
    """Section 8's rows of errors are rows of the page of benchmarks/gradient_fidelity.py; no other number is."""
    section = re.search(r"(?ms)^## 8\..*?(?=^## 9\.)", (ROOT / "docs/spec.md").read_text())[0]
    rows = [line for line in section.splitlines() if re.match(r"\| g_[xw] \|", line)]
    measured = (ROOT / "docs/results/fidelity.md").read_text().splitlines()
    assert len(rows) == 9 and [row for row in rows if row not in measured] == []
    rest = "\n".join(line for line in section.splitlines() if line not in rows)
    assert not re.search(r"\d\.\d|\d%", rest)


def test_every_case_is_named_by_a_test():
    cases = re.findall(r"^- (C\d+) ", (ROOT / "tests/cases.md").read_text(), re.M)
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    assert len(cases) > 40
    assert [case for case in cases if not re.search(rf"\b{case}\b", tests)] == []


def test_coverage_page():
    """Three rows, other ones each time, are what benchmarks/coverage_table.py writes."""
    table = script("coverage_table")
    page = (ROOT / "docs/results/coverage.md").read_text()
    if f"with transformers {transformers.__version__}:" not in page:
        pytest.skip("the page is of another transformers")
    assert page.count("\n|") == len(table.MODELS) + 2
    for name in random.sample(sorted(table.MODELS), 3):
        assert table.row(name, table.MODELS[name]) in page


def test_memory_per_rank(capsys, monkeypatch):
    """The table of docs/distributed.md is what benchmarks/per_rank_memory.py prints."""
    monkeypatch.setattr("sys.argv", ["per_rank_memory.py"])
    script("per_rank_memory").main()
    assert capsys.readouterr().out.strip() in (ROOT / "docs/distributed.md").read_text()


def test_the_readme_quotes_measured_losses():
    """Every difference in the README's table of methods is that of the stored runs, to the digits shown."""
    with open(ROOT / "docs/results/training.csv", newline="") as file:
        loss = {
            (r["task"], r["method"]): float(r["held_out_loss"])
            for r in csv.DictReader(file)
            if r["seed"] == "0" and r["steps"] == "60"
        }
    starts = ("`HOTConfig()`", "`HOTConfig(max", "exact", "SwitchBack", "INT8", "LUQ", "INT4", "LBP-WHT", "`paper()`")
    methods = ("default", "budget-eighth", "bf16", "switchback", "int8", "luq", "int4", "lbp-wht", "paper")
    labels = dict(zip(starts, methods, strict=True))
    table = (ROOT / "README.md").read_text().split("| | sources | prose |\n|---|---|---|\n")[1].split("\n\n")[0]
    found = []
    for line in table.splitlines():
        label, *shown = (cell.strip() for cell in line.strip("|").split("|"))
        method = next(m for start, m in labels.items() if label.startswith(start))
        for task, text in zip(("code", "prose"), shown, strict=True):
            above = loss[task, method] - loss[task, "exact"]
            assert text == f"{above:+.{len(text.partition('.')[2])}f}", (label, task)
        found.append(method)
    assert sorted(found) == sorted(labels.values())

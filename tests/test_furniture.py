"""What stands around the package agrees with it: versions, pins, workflows, the site, and the files that pages name."""

import configparser
import importlib.util
import json
import re
from pathlib import Path

import pytest
import yaml

import hot_hf

ROOT = Path(__file__).parents[1]


def load(path: str):
    return yaml.safe_load((ROOT / path).read_text())


def names(requirements: str) -> set[str]:
    """The packages of a requirement list, normalized as PyPA has it; ``%(extra)s`` is no package."""
    lines = [line.strip() for line in requirements.splitlines() if line.strip() and not line.startswith(("#", "%"))]
    return {re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", line)[0]).lower() for line in lines}


def setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "setup.cfg")
    return parser


def pages(nav) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for part in (nav.values() if isinstance(nav, dict) else nav) for page in pages(part)]


@pytest.fixture(scope="module")
def links():
    spec = importlib.util.spec_from_file_location("links", ROOT / "docs/tools/links.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_versions_agree():
    """The package, the citation and the newest numbered section of the changelog, with its date."""
    citation = load("CITATION.cff")
    sections = re.findall(r"^## \[(\S+)\](?: - (\S+))?$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert sections[0] == ("Unreleased", "")
    assert sections[1] == (hot_hf.__version__, citation["date-released"])
    assert citation["version"] == hot_hf.__version__


def test_the_paper_is_cited_as_the_spec_names_it():
    paper = load("CITATION.cff")["preferred-citation"]
    arxiv = paper["identifiers"][0]["value"].removeprefix("arXiv:")
    spec = (ROOT / "docs/spec.md").read_text()
    assert arxiv in spec and arxiv in paper["url"] and f"{paper['authors'][0]['family-names']} et al." in spec


def test_everything_that_make_installs_is_pinned():
    """Requirements and extras, each with a highest version; ruff with the one version that pre-commit runs."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = names("\n".join(line for line in lines if re.search(r"[=<]=", line)))
    sections = setup()
    wanted = names("\n".join([sections["options"]["install_requires"], *sections["options.extras_require"].values()]))
    assert len(wanted) > 15 and wanted - pinned == set()
    ruff = next(repo for repo in load(".pre-commit-config.yaml")["repos"] if "ruff" in repo["repo"])
    assert f"ruff=={ruff['rev'].removeprefix('v')}" in lines


def test_python_versions_agree():
    """The classifiers, what the workflow runs, and the oldest in setup.cfg and ruff.toml."""
    metadata = setup()
    listed = re.findall(r"Python :: (3\.\d+)$", metadata["metadata"]["classifiers"], re.M)
    assert load(".github/workflows/ci.yml")["jobs"]["test"]["strategy"]["matrix"]["python"] == listed
    assert metadata["options"]["python_requires"] == f">={listed[0]}"
    assert f'target-version = "py{listed[0].replace(".", "")}"' in (ROOT / "ruff.toml").read_text()


def test_every_page_is_in_the_nav_once(links):
    nav = pages(load("mkdocs.yml")["nav"])
    assert len(nav) == len(set(nav))
    assert [uri for uri in nav if not links.path_of(uri).is_file()] == []
    written = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert written - set(nav) == set()


def test_the_reference_lists_the_public_names():
    """Each name of ``__all__``, under hot_hf or, where it is imported when asked for, under its own module."""
    listed = re.findall(r"^::: (\S+)$", (ROOT / "docs/reference.md").read_text(), re.M)
    assert len(listed) == len(set(listed))
    assert set(hot_hf.__all__) - {name.rpartition(".")[2] for name in listed} == set()


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "CHANGELOG.md"])
def test_files_that_pages_name_are_there(page, links):
    """Links, and the paths in the guide's text; the changelog may name what is gone."""
    text = (ROOT / page).read_text()
    targets = [match["target"] for match in links.LINK.finditer(text)]
    if page == "CONTRIBUTING.md":
        targets += re.findall(r"`((?:hot_hf|tests|benchmarks|docs|scripts|notebooks)/[\w./]*)`", text)
    assert len(targets) > 0
    assert [target for target in targets if not (ROOT / target).exists()] == []


@pytest.mark.parametrize(
    "uri, link, shown",
    [
        ("README.md", "[m](docs/memory.md)", "[m](memory.md)"),
        ("README.md", "[m](docs/memory.md#predict)", "[m](memory.md#predict)"),
        ("README.md", '<img src="docs/results/memory.png">', '<img src="results/memory.png">'),
        ("CONTRIBUTING.md", "[l](LICENSE)", "[l](LICENSE)"),
        ("memory.md", "![i](results/memory.png)", "![i](results/memory.png)"),
        ("memory.md", "[r](../README.md)", "[r](README.md)"),
        ("selection.md", "[p](results/plans)", "[p](results/plans/README.md)"),
        ("results/plans/README.md", "[s](../../selection.md)", "[s](../../selection.md)"),
        ("results/memory.md", "[c](../../CONTRIBUTING.md)", "[c](../CONTRIBUTING.md)"),
        ("memory.md", "[gone](nothing.md) [out](../../x.md)", "[gone](nothing.md) [out](../../x.md)"),
        ("memory.md", "[w](https://x.org/a.md) [a](#measure)", "[w](https://x.org/a.md) [a](#measure)"),
    ],
)
def test_links_of_the_repository_become_those_of_the_site(links, uri, link, shown):
    """On GitHub a link is a path in the repository; the site has docs/ and what lies outside it on one level."""
    assert links.rewrite(link, uri) == shown


def test_what_is_linked_to_is_copied(links):
    used = []
    links.rewrite("[l](../LICENSE) [gone](nothing.md)", "memory.md", used.append)
    assert used == ["LICENSE"]


def test_issue_forms_ask_for_what_is_printed():
    """The bug form asks for the doctor and the coverage report; every field has a label and an id of its own."""
    forms = {path.name: load(path) for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")}
    bug = json.dumps(forms["bug.yml"])
    assert "hot-hf doctor" in bug and "hot_hf.report_of(model)" in bug
    for name in ("bug.yml", "feature.yml"):
        fields = [part for part in forms[name]["body"] if part["type"] != "markdown"]
        assert len({part["id"] for part in fields}) == len(fields) and all(p["attributes"]["label"] for p in fields)

"""Imports go downward only, in the order in which docs/architecture.md lists the modules."""

import ast
import re
from pathlib import Path

import pytest

import hot_hf

PACKAGE = Path(hot_hf.__file__).parent
PAGE = PACKAGE.parent / "docs" / "architecture.md"


def order_of(table: str) -> list[set[str]]:
    """The modules of each row of a table, top to bottom."""
    rows = re.findall(r"^\| (`[^|]*) \|", table, re.M)
    return [set(re.findall(r"`(\w+)`", row)) for row in rows]


def orders() -> dict[str, list[set[str]]]:
    """The two tables: of the package and of ``ops``."""
    package, ops = PAGE.read_text().split("Inside `ops`:")
    return {"hot_hf": order_of(package), "hot_hf.ops": order_of(ops.split("Beside the package")[0])}


def children(package: str) -> set[str]:
    folder = PACKAGE.joinpath(*package.split(".")[1:])
    found = {p.stem for p in folder.glob("*.py")} | {p.parent.name for p in folder.glob("*/__init__.py")}
    return found - {"__init__", "__main__"}


def imported(path: Path) -> set[str]:
    """Full names of what a file of the package imports from it, at the top or inside functions."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    package = parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base = (*base, *(node.module.split(".") if node.module else ()))
            found |= {".".join((*base, alias.name)) for alias in node.names}
    return {name for name in found if name.startswith("hot_hf")}


@pytest.mark.parametrize("package", ["hot_hf", "hot_hf.ops"])
def test_the_page_lists_every_module_once(package):
    listed = [name for row in orders()[package] for name in row]
    assert sorted(listed) == sorted(children(package))


@pytest.mark.parametrize("package", ["hot_hf", "hot_hf.ops"])
def test_imports_go_downward(package):
    """Also those inside functions, so that nothing hides a circle."""
    place = {name: i for i, row in enumerate(orders()[package]) for name in row}
    folder, depth = PACKAGE.joinpath(*package.split(".")[1:]), package.count(".") + 1
    upward = []
    for path in folder.rglob("*.py"):
        own = path.relative_to(folder).with_suffix("").parts[0]
        if own not in place:  # the package's own __init__ is above all
            continue
        for name in imported(path):
            parts = name.split(".")
            if name == package or (parts[:depth] == package.split(".") and parts[depth] not in place):
                upward.append(f"{path.relative_to(PACKAGE)} imports {name} from the package itself")
            elif parts[:depth] == package.split(".") and parts[depth] != own and place[parts[depth]] >= place[own]:
                upward.append(f"{path.relative_to(PACKAGE)} imports {name}, which is not above it")
    assert not upward, upward


def modules_of(folder: str) -> dict[str, Path]:
    return {p.stem: p for p in (PACKAGE / folder).glob("*.py") if p.stem != "__init__"}


@pytest.mark.parametrize(
    "folder", ["selection", "logits", "block", "dry_run", "fit", "memory", "demo", "commands", "ops/cpu", "ops/triton"]
)
def test_no_circle_inside_a_folder(folder):
    """Its modules can be put in an order in which each imports only earlier ones."""
    modules = modules_of(folder)
    prefix = "hot_hf." + folder.replace("/", ".") + "."
    needs = {
        stem: {name.removeprefix(prefix).split(".")[0] for name in imported(path) if name.startswith(prefix)}
        & {*modules}
        for stem, path in modules.items()
    }
    while needs:
        free = [stem for stem, of in needs.items() if not of - {stem}]
        assert free, f"a circle among {sorted(needs)}"
        needs = {stem: of - {*free} for stem, of in needs.items() if stem not in free}


def test_module_names_mean_one_thing():
    stems = [p.stem for p in PACKAGE.rglob("*.py") if p.stem not in ("__init__", "__main__")]
    assert {stem for stem in stems if stems.count(stem) > 1} == set()

"""Runs triton_interpreted.py in a process of its own, and reports its tests one by one."""

import ast
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the interpreter is part of Triton")

FILE = Path(__file__).with_name("triton_interpreted.py")
NAMES = [node.name for node in ast.parse(FILE.read_text()).body if getattr(node, "name", "").startswith("test_")]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Outcome and message of every case, by test name."""
    report = tmp_path_factory.mktemp("interpreted") / "report.xml"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", str(FILE), "-q", "-p", "no:cacheprovider", f"--junitxml={report}"],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=FILE.parents[2],
        capture_output=True,
        text=True,
    )
    assert report.is_file(), run.stdout + run.stderr
    cases = {}
    for case in ElementTree.parse(report).iter("testcase"):
        problems = [child for child in case if child.tag in ("failure", "error", "skipped")]
        message = "\n".join(f"{case.get('name')}: {p.get('message')}\n{p.text}" for p in problems)
        cases.setdefault(case.get("name").split("[")[0], []).append(message)
    return cases


@pytest.mark.parametrize("name", NAMES)
def test_interpreted(results, name):
    """C61: kernels' values, not only shapes."""
    assert results.get(name), f"{name} did not run"
    failures = [message for message in results[name] if message]
    assert not failures, "\n\n".join(failures)

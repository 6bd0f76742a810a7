"""benchmarks/compare_memory.py: rows of tiny workloads, times on one set of parameters, what the page concludes."""

import csv
from dataclasses import replace

import pytest
import torch

pytest.importorskip("peft")

import compare_memory
from memory import page, timing, workloads
from memory.workloads import FULL, LORA, WORKLOADS

from hot_hf.memory import measure
from tests.models import patched_names, tiny_llama, token_batch


def tiny(steps: int):
    return tiny_llama(), [token_batch(2, 16) for _ in range(steps)], [token_batch(2, 16)]


@pytest.fixture
def stored(monkeypatch, tmp_path):
    """Both tables and the page in a folder of their own, the text workloads tiny."""
    for name, file in (("TABLE", "memory.csv"), ("SECONDS", "memory_seconds.csv"), ("RESULTS", "")):
        monkeypatch.setattr(page, name, tmp_path / file)
    monkeypatch.setattr(timing, "SECONDS", tmp_path / "memory_seconds.csv")
    for name in ("smollm2", "smollm2-lora"):
        monkeypatch.setitem(WORKLOADS, name, replace(WORKLOADS[name], make=tiny, steps=2))
    return tmp_path


@pytest.mark.parametrize("method", [*FULL, *LORA])
def test_every_method_is_what_its_name_says(method):
    """HOT where it is named; block and sharing change what is kept, in the direction that they should."""
    model = workloads.prepare(tiny_llama(), method)
    names, parts = patched_names(model), method.replace(" ", "+").split("+")
    assert bool(names) == bool({"hot", "fast", "paper", "smallest"} & set(parts))
    assert any("lora_A" in n for n, _ in model.named_parameters()) == ("lora" in method or "velora" in method)
    assert any("lora_A" in n for n in names) == (bool(names) and "lora" in parts)  # VeLoRA has its own for them
    assert getattr(model, "is_gradient_checkpointing", False) == ("checkpointing" in method)
    if "block" in parts or "unshared" in parts:
        other = workloads.prepare(tiny_llama(), method.removesuffix("+block").removesuffix(" unshared"))
        batch = token_batch(4, 64)  # block compression leaves small tensors alone
        kept, without = (measure(m, batch).total_bytes for m in (model, other))
        assert kept < without if "block" in parts else kept > without


def test_rows_times_and_page(stored, capsys):
    """The commands in turn: rows with bytes and losses, one row of times per method, and all of it on the page."""
    threads = torch.get_num_threads()
    try:
        for workload, methods in (("smollm2", ("exact", "checkpointing", "hot+block")), ("smollm2-lora", ("lora",))):
            for method in methods:
                compare_memory.add(compare_memory.run_row(workload, method, None))
    finally:
        torch.set_num_threads(threads)
    timing.time_workload("smollm2", 2)
    page.write()
    exact, checkpointing, block, lora = page.rows()
    assert int(block["kept"]) < int(exact["kept"]) and int(checkpointing["kept"]) < int(exact["kept"])
    assert exact["loss"] == checkpointing["loss"] and float(lora["loss"]) > 0
    with open(page.SECONDS) as file:
        times = {r["method"]: r for r in csv.DictReader(file)}
    assert list(times) == list(FULL) and all(float(r["ms"]) > 0 for r in times.values())
    text = (stored / "memory.md").read_text()
    assert f"| hot+block | {int(block['kept']) / 2**20:,.1f} |" in text and (stored / "memory.png").exists()


def test_methods_are_timed_on_one_set_of_parameters(stored, monkeypatch):
    """One copy of weights and optimizer state however many methods; and the samples are of training steps."""
    seen = []
    original = timing._sampler

    def noting(model, method, batch, optimizer):
        seen.append((model, optimizer))
        return original(model, method, batch, optimizer)

    monkeypatch.setattr(timing, "_sampler", noting)
    samplers = timing.samplers("smollm2")
    assert list(samplers) == list(FULL)
    first = [id(p) for p in seen[0][0].parameters()]
    assert all([id(p) for p in model.parameters()] == first for model, _ in seen)
    assert len({id(model) for model, _ in seen}) == len(FULL) and len({id(o) for _, o in seen}) == 1
    before = [p.detach().clone() for p in seen[0][0].parameters()]
    assert samplers["hot"]() > 0
    assert any(not torch.equal(a, b) for a, b in zip(before, seen[0][0].parameters(), strict=True))

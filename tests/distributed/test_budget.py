"""Selection by budget on two processes; the work is in budget_worker.py."""

import pytest
import torch

from hot_hf import HOTConfig, SelectedPlan, apply_hot, fix_selection
from tests.models import tiny_llama

from .budget_worker import BUDGET, data

WORKER = "budget_worker"

pytestmark = [pytest.mark.xdist_group("budget"), pytest.mark.timeout(400)]


def test_the_same_on_all_ranks(outcome):
    """C58: on different data, plans and what was measured of them are equal bit by bit."""
    first, second = outcome.of("the_same_on_all_ranks")
    assert first == second and len(first["error"]) == len(first["bytes"]) == 14
    assert all(choice["batches"] == 2 * 3 for choice in first["error"].values())


def test_as_one_process_with_all_the_data(outcome):
    """Errors of single gradients and of their sum are those of one process that saw both ranks' micro-batches."""
    found = outcome.of("sharded")[0]["ddp"]
    torch.manual_seed(outcome.seed)
    model = tiny_llama()
    apply_hot(model, HOTConfig(**{**BUDGET, "lqs_batches": 4}, max_grad_error=0.12))
    for rank in (0, 1):
        for batch in data(outcome.seed, rank):
            model(**batch).loss.backward()
    fix_selection(model)
    for name, choice in SelectedPlan.of(model).layers.items():
        assert found[name]["plan"] == choice.plan and found[name]["bytes"] == choice.bytes
        for what in ("error", "accumulated"):
            # float32 products of another order, at most one 4-bit integer apart now and then
            value = getattr(found[name]["grad_weight"], what)
            assert value == pytest.approx(getattr(choice.grad_weight, what), rel=1e-3)


def test_sharded(outcome):
    """FSDP2 against DDP on the same data."""
    for found in outcome.of("sharded"):
        assert {n: c["plan"] for n, c in found["ddp"].items()} == {n: c["plan"] for n, c in found["fsdp"].items()}

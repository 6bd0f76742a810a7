"""Selection by budget on two ranks."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from hot_hf import HOTConfig, SelectedPlan, apply_hot, fix_selection
from tests.models import tiny_llama, token_batch

from .worker import Scenarios, assert_close, assert_same_on_all_ranks, gradients

scenario = Scenarios()
BUDGET = {"selection": "budget", "lqs_batches": 2}


def table(model) -> dict:
    return {name: vars(choice) for name, choice in SelectedPlan.of(model).layers.items()}


def measured(wrap, seed, batches_of, **budget):
    """The plan after two micro-batches of this rank's data."""
    torch.manual_seed(seed)
    model = tiny_llama()
    apply_hot(model, HOTConfig(**BUDGET, **budget))
    wrapped = wrap(model)
    for batch in batches_of(dist.get_rank()):
        wrapped(**batch).loss.backward()
    return model, wrapped


def data(seed, rank):
    """Rank 1 has other rows, and longer ones."""
    torch.manual_seed(seed + 1 + rank)
    return [token_batch(2, 24 + 16 * rank) for _ in range(2)]


@scenario
def the_same_on_all_ranks(seed):
    """C58: by error and by bytes, with what each rank alone would choose."""
    found = {}
    for name, budget in (("error", {"max_grad_error": 0.12}), ("bytes", {"max_bytes": "14%"})):
        model, wrapped = measured(DDP, seed, lambda rank: data(seed, rank), **budget)
        wrapped(**token_batch()).loss.backward()  # more than asked for: no rank decides by itself
        assert all(m.hot.probe is not None for m in model.modules() if hasattr(m, "hot"))
        fix_selection(wrapped)
        found[name] = table(model)
        model.zero_grad()
        wrapped(**token_batch()).loss.backward()
        assert_same_on_all_ranks(gradients(model))
    return found


@scenario
def sharded(seed):
    """FSDP2, which takes the weights away in between, measures what DDP measures and trains exactly meanwhile."""

    def shard(model):
        for block in model.model.layers:
            fully_shard(block)
        return fully_shard(model)

    plain, wrapped = measured(DDP, seed, lambda rank: data(seed, rank), max_grad_error=0.12)
    model, _ = measured(shard, seed, lambda rank: data(seed, rank), max_grad_error=0.12)
    assert_close(gradients(model), gradients(plain))
    fix_selection(wrapped)
    fix_selection(model)
    return {"ddp": table(plain), "fsdp": table(model)}


if __name__ == "__main__":
    scenario.main()

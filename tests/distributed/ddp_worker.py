"""DistributedDataParallel on two ranks, each with its own data, against the same model on one process."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from hot_hf import HOTConfig, apply_hot, fix_selection
from hot_hf.plan import Plan
from tests.models import mlp, tiny_llama, token_batch

from .worker import (
    Scenarios,
    assert_close,
    assert_same_on_all_ranks,
    gradients,
    mean_over_ranks,
    weights,
    worst,
)

scenario = Scenarios()


def of_this_rank(seed: int) -> None:
    """From here on the ranks draw different data."""
    torch.manual_seed(seed + 1 + dist.get_rank())


def loss_of(model, batch):
    return model(**batch).loss


def average_of_single_processes(model, batches) -> dict:
    """What data parallel must give: each rank's own gradients without any wrapper, averaged over ranks.

    The quantizers see the same tensors in both, so HOT's gradients too agree to float tolerance.
    """
    model.zero_grad()
    for batch in batches:
        (loss_of(model, batch) / len(batches)).backward()
    mean = mean_over_ranks(gradients(model))
    model.zero_grad()
    return mean


@scenario
def gradients_are_the_average(seed):
    """C55: for the presets, with buckets that are views of the gradients (C56: strides)."""
    found = {}
    for name in ("default", "paper", "fast", "smallest"):
        torch.manual_seed(seed)
        model = tiny_llama(layers=1)
        config = HOTConfig.from_preset(name)
        if name == "paper":
            config = HOTConfig.paper(grad_input_granularity="per_tensor")  # no measuring here
        apply_hot(model, config)
        single = copy.deepcopy(model)
        wrapped = DDP(model, gradient_as_bucket_view=True)
        of_this_rank(seed)
        batch = token_batch()
        loss_of(wrapped, batch).backward()
        for n, p in model.named_parameters():
            assert p.grad.stride() == p.stride(), n
        found[name] = assert_close(gradients(model), average_of_single_processes(single, [batch]))
        assert_same_on_all_ranks(gradients(model))
    return found


@scenario
def exact_plans_equal_one_process(seed):
    """All plans exact, as a selection may choose: three AdamW steps equal one process on all the data."""
    torch.manual_seed(seed)
    model = tiny_llama(layers=1)
    apply_hot(model, HOTConfig())
    for module in model.modules():
        if hasattr(module, "hot"):
            module.hot.plan = Plan(grad_input_bits=None, activation_format="none")
    single = copy.deepcopy(model)
    return three_steps(DDP(model), single, seed)


@scenario
def hot_is_near_one_process(seed):
    """The default on two ranks against the default on one: scales span other tokens, so near and not equal."""
    torch.manual_seed(seed)
    model = tiny_llama(layers=1)
    apply_hot(model, HOTConfig())
    return three_steps(DDP(model), copy.deepcopy(model), seed)


def three_steps(wrapped, single, seed) -> dict:
    before = weights(single)
    pairs = [(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in (wrapped, single)]
    for step in range(3):
        torch.manual_seed(seed + 10 + step)
        batch = token_batch(rows=4)
        rank = dist.get_rank()
        own = {k: v[2 * rank : 2 * rank + 2] for k, v in batch.items()}
        for (model, optimizer), data in zip(pairs, (own, batch), strict=True):
            optimizer.zero_grad()
            loss_of(model, data).backward()
            optimizer.step()
    found, expected = weights(wrapped), weights(single)
    assert_same_on_all_ranks(found)
    moved = max((expected[n] - before[n]).norm() / before[n].norm() for n in before)
    change = {n: expected[n] - before[n] for n in before}
    difference = torch.cat([(found[n] - expected[n]).flatten() for n in change]).norm()
    total = torch.cat([c.flatten() for c in change.values()]).norm()
    return {"worst": worst(found, expected), "moved": moved.item(), "of the change": (difference / total).item()}


@scenario
def accumulation_without_sync(seed):
    """Two micro-batches under no_sync and one that reduces: the average over all three."""
    torch.manual_seed(seed)
    model = tiny_llama(layers=1)
    apply_hot(model, HOTConfig())
    single = copy.deepcopy(model)
    wrapped = DDP(model)
    of_this_rank(seed)
    batches = [token_batch(length=n) for n in (24, 17, 31)]
    with wrapped.no_sync():
        for batch in batches[:2]:
            (loss_of(wrapped, batch) / 3).backward()
    (loss_of(wrapped, batches[2]) / 3).backward()
    return assert_close(gradients(model), average_of_single_processes(single, batches))


class Branches(nn.Module):
    """Rank-dependent use of layers: ``b`` is used by the last rank alone, ``never`` by none."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.never = mlp(64, 128, 64), mlp(64, 128, 64), nn.Linear(64, 64)

    def forward(self, x, use_b):
        x = self.a(x)
        return self.b(x) if use_b else x


@scenario
def unused_parameters(seed):
    torch.manual_seed(seed)
    model = Branches()
    apply_hot(model, HOTConfig())
    single = copy.deepcopy(model)
    wrapped = DDP(model, find_unused_parameters=True)
    of_this_rank(seed)
    x, use_b = torch.randn(3, 20, 64), dist.get_rank() == dist.get_world_size() - 1
    for m in (wrapped, single):
        m(x, use_b).square().mean().backward()
    for p in single.b.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    expected = mean_over_ranks(gradients(single))
    assert all(p.grad is None or not p.grad.any() for p in model.never.parameters())
    return assert_close({n: g for n, g in gradients(model).items() if "never" not in n}, expected)


def checkpointed(model, reentrant: bool):
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


@scenario
def static_graph_and_checkpointing(seed):
    """Both kinds of checkpointing; reentrant needs a static graph. Two steps, the second with the recorded order."""
    found = {}
    for reentrant, static in ((False, False), (False, True), (True, True)):
        torch.manual_seed(seed)
        model = tiny_llama(layers=1)
        apply_hot(model, HOTConfig())
        single = copy.deepcopy(model)
        wrapped = DDP(checkpointed(model, reentrant), static_graph=static)
        of_this_rank(seed)
        for step in range(2):
            batch = token_batch()
            model.zero_grad()
            loss_of(wrapped, batch).backward()
            expected = average_of_single_processes(single, [batch])
            found[f"reentrant {reentrant} static {static} step {step}"] = assert_close(gradients(model), expected)
    return found


@scenario
def lora_with_checkpointing(seed):
    """C55, C33: adapters train, the frozen base stays; patched lora_A too. Gradients equal on all ranks."""
    from peft import LoraConfig, get_peft_model

    found = {}
    for reentrant in (False, True):
        torch.manual_seed(seed)
        model = get_peft_model(
            tiny_llama(layers=1), LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)
        )
        apply_hot(model, HOTConfig())
        model.enable_input_require_grads()
        single = copy.deepcopy(model)
        wrapped = DDP(checkpointed(model, reentrant), static_graph=reentrant)
        of_this_rank(seed)
        batch = token_batch()
        loss_of(wrapped, batch).backward()
        got = gradients(model)
        assert got and all("lora_" in n for n in got)
        assert_same_on_all_ranks(got)
        found[f"reentrant {reentrant}"] = assert_close(got, average_of_single_processes(single, [batch]))
    return found


@scenario
def stochastic_rounding_differs_between_ranks(seed):
    """C30: the same data on both ranks gives different gradients there, and the same again in a second run."""
    torch.manual_seed(seed)
    model = tiny_llama(layers=1)
    apply_hot(model, HOTConfig(rounding="stochastic", seed=seed))
    again = copy.deepcopy(model)
    batch, state = token_batch(), torch.get_rng_state()
    for m in (model, again):
        loss_of(m, batch).backward()
    assert torch.equal(torch.get_rng_state(), state), "the global generator moved"
    own, repeated = gradients(model), gradients(again)
    assert all(torch.equal(own[n], repeated[n]) for n in own)
    name = "model.layers.0.mlp.up_proj.weight"
    other = [torch.empty_like(own[name]) for _ in range(dist.get_world_size())]
    dist.all_gather(other, own[name])
    assert not torch.equal(other[0], other[1])
    wrapped = DDP(model)
    model.zero_grad()
    loss_of(wrapped, batch).backward()
    assert_same_on_all_ranks(gradients(model))


@scenario
def selection_is_the_same_on_all_ranks(seed):
    """C58: one rank alone would choose per_token, the other per_tensor; together they agree, and keep on training."""
    torch.manual_seed(seed)
    model = mlp(64, 128, 64)
    apply_hot(model, HOTConfig.paper(lqs_batches=2))
    wrapped = DDP(model)
    of_this_rank(seed)
    for _ in range(3):  # more micro-batches than asked for: no rank may switch by itself
        x, g = torch.randn(4, 25, 64), torch.randn(4, 25, 64)
        if dist.get_rank() == 0:
            g[0, 0] *= 30  # one scale for all tokens loses the others here
        (wrapped(x) * g).sum().backward()
        assert all(m.hot.probe is not None for m in model.modules() if hasattr(m, "hot"))
    alone = [m.hot.probe.choose().grad_input_granularity for m in model.modules() if hasattr(m, "hot")]
    chosen = {name: plan.grad_input_granularity for name, plan in fix_selection(wrapped).items()}
    (wrapped(x) * g).sum().backward()
    assert_same_on_all_ranks(gradients(model))
    return {"alone": alone, "chosen": chosen}


@scenario
def compiled(seed):
    """torch.compile around DDP (whose optimizer splits the graph at buckets) and inside it."""
    found = {}
    for outside in (True, False):
        torch.compiler.reset()
        torch.manual_seed(seed)
        model = tiny_llama(layers=1, hidden=256 if outside else 64)  # 2.6 MB: three buckets of 1 MB
        apply_hot(model, HOTConfig())
        single = copy.deepcopy(model)
        if outside:
            wrapped = torch.compile(DDP(model, bucket_cap_mb=1), backend="aot_eager")
        else:
            wrapped = DDP(torch.compile(model, backend="aot_eager", fullgraph=True))
        of_this_rank(seed)
        batch = token_batch()
        loss_of(wrapped, batch).backward()
        found["outside" if outside else "inside"] = assert_close(
            gradients(model), average_of_single_processes(single, [batch])
        )
    return found


if __name__ == "__main__":
    scenario.main()

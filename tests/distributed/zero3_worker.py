"""DeepSpeed ZeRO-3 on two ranks against one process."""

import copy

import torch
import torch.distributed as dist

from hot_hf import HOTConfig, apply_hot
from tests.architectures import build
from tests.models import tiny_llama, token_batch

from .worker import Scenarios, gradients, mean_over_ranks, worst

scenario = Scenarios()

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,  # even the smallest parameters are partitioned
        "reduce_bucket_size": 5_000,
        "stage3_prefetch_bucket_size": 5_000,
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_force_ds_cpu_optimizer": False,
}


@scenario
def three_steps(seed):
    """The single process takes over the gathered weights after every step, as in the FSDP2 test."""
    torch.manual_seed(seed)
    return train(tiny_llama(layers=2), seed)


@scenario
def conv1d_and_experts(seed):
    """Layers that compute with a view of their weight, which would hold what was gathered: none is saved."""
    found = {}
    for name in ("GPT-2", "Mixtral"):
        torch.manual_seed(seed)
        found[name] = train(build(name).eval(), seed)
    return found


def train(model, seed) -> dict:
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    apply_hot(model, HOTConfig())
    single = copy.deepcopy(model)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    if not model.training:
        engine.eval()
    layers = [m for m in model.modules() if hasattr(m, "hot")]
    own = {id(p) for m in layers for p in m.parameters(recurse=False)}
    found = {"worst": 0.0, "placeholders": sum(p.numel() == 0 for p in model.parameters()), "views": 0}

    def count(t):
        found["views"] += id(t._base) in own
        return t

    for step in range(3):
        torch.manual_seed(seed + 10 * step + dist.get_rank())
        batch = token_batch()
        with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
            loss = engine(**batch).loss
        engine.backward(loss)
        single.zero_grad()
        single(**batch).loss.backward()
        got = {n: safe_get_full_grad(p) for n, p in model.named_parameters()}
        found["worst"] = max(found["worst"], worst(got, mean_over_ranks(gradients(single))))
        engine.step()
        with torch.no_grad():
            for (_, p), q in zip(model.named_parameters(), single.parameters(), strict=True):
                q.copy_(safe_get_full_fp32_param(p))
    return found


if __name__ == "__main__":
    scenario.main()

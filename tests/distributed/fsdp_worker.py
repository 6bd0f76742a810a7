"""FSDP2 (``fully_shard``) on two ranks against one process, and what it leaves in memory."""

import copy
import os
from dataclasses import replace
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hot_hf import HOTConfig, HOTPatchError, apply_hot, remove_hot
from hot_hf.memory import SavedTensors
from tests.architectures import build
from tests.models import tiny_llama, token_batch

from .launch_files import environment
from .worker import Scenarios, assert_close, gradients, mean_over_ranks, weights, worst

scenario = Scenarios()


def shard(model, per_linear: bool = False, **settings):
    """Shard each block, or each of its linear layers, then the root."""
    for block in model.model.layers:
        if per_linear:
            for module in [m for m in block.modules() if isinstance(m, nn.Linear)]:
                fully_shard(module, **settings)
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def three_steps_match(sharded, single, seed, tolerance=1e-5) -> float:
    """Each rank its own data; the single process averages the ranks' gradients and takes the same AdamW step.

    After every step the single process takes over the sharded weights: a difference in the last place of a gradient
    that is nearly zero would otherwise decide the direction of its AdamW step.
    """
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (sharded, single)]
    found = 0.0
    for step in range(3):
        torch.manual_seed(seed + 10 * step + dist.get_rank())
        batch = token_batch()
        for model in (sharded, single):
            model.zero_grad()
            model(**batch).loss.backward()
        expected = mean_over_ranks(gradients(single))
        found = max(found, assert_close(gradients(sharded), expected, tolerance))
        for name, p in single.named_parameters():
            p.grad = expected.get(name)
        for optimizer in optimizers:
            optimizer.step()
        now = weights(sharded)
        assert worst(now, weights(single)) < 0.01
        with torch.no_grad():
            for name, p in single.named_parameters():
                p.copy_(now[name])
    return found


def patched_pair(seed, **settings):
    torch.manual_seed(seed)
    model = tiny_llama(layers=2, **settings)
    apply_hot(model, HOTConfig())
    return model, copy.deepcopy(model)


@scenario
def three_steps(seed):
    """Per block and per linear, resharded after the forward or not, checkpointed or not, tied or not."""
    found = {}
    for checkpointing, settings in (
        (False, {"per_linear": False, "reshard_after_forward": True}),
        (True, {"per_linear": False, "reshard_after_forward": False}),
        (True, {"per_linear": True, "reshard_after_forward": True}),
    ):
        model, single = patched_pair(seed, tie=checkpointing)
        if checkpointing:
            model.train()
            model.gradient_checkpointing_enable({"use_reentrant": False})
        found[f"{settings} checkpointing={checkpointing}"] = three_steps_match(shard(model, **settings), single, seed)
    return found


@scenario
def mixed_precision(seed):
    """Parameters gathered in bfloat16, gradients reduced in float32, against a bfloat16 model on one process."""
    model, single = patched_pair(seed)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sharded = shard(model, mp_policy=policy)
    for p in single.parameters():  # not .to(): the rotary frequencies stay float32, as under the policy
        p.data = p.data.bfloat16()
    torch.manual_seed(seed + dist.get_rank())
    batch = token_batch()
    for m in (sharded, single):
        m(**batch).loss.backward()
    assert all(p.grad.dtype == torch.float32 for p in sharded.parameters())
    expected = mean_over_ranks({n: g.float() for n, g in gradients(single).items()})
    return assert_close(gradients(sharded), expected)


@scenario
def accumulation(seed):
    """Two micro-batches without reduction, then one with it."""
    model, single = patched_pair(seed)
    sharded = shard(model)
    torch.manual_seed(seed + dist.get_rank())
    for last, length in ((False, 24), (False, 17), (True, 31)):
        sharded.set_requires_gradient_sync(last)
        batch = token_batch(length=length)
        for m in (sharded, single):
            m(**batch).loss.backward()
    return assert_close(gradients(sharded), mean_over_ranks(gradients(single)))


@scenario
def lora(seed):
    """A frozen base sharded with its adapters, checkpointed."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    model = get_peft_model(tiny_llama(layers=2), LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False))
    apply_hot(model, HOTConfig())
    single = copy.deepcopy(model)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for block in model.base_model.model.model.layers:
        fully_shard(block)
    return three_steps_match(fully_shard(model), single, seed)


def other_kind(name, seed):
    """(patched model, its blocks, a layer inside one, a copy for one process); without dropout."""
    torch.manual_seed(seed)
    model = build(name).eval()
    apply_hot(model, HOTConfig())
    blocks = model.transformer.h if name == "GPT-2" else model.model.layers
    return model, blocks, blocks[0].mlp.c_proj if name == "GPT-2" else blocks[0].mlp.experts, copy.deepcopy(model)


@scenario
def conv1d_and_experts(seed):
    """Layers that compute with a view of their weight: GPT-2's Conv1D and Mixtral's experts."""
    found = {}
    for name in ("GPT-2", "Mixtral"):
        model, blocks, _, single = other_kind(name, seed)
        for block in blocks:
            fully_shard(block)
        found[name] = three_steps_match(fully_shard(model), single, seed)
    return found


@scenario
def nothing_gathered_stays(seed):
    """What the forward leaves alive is what one process keeps beside its parameters: no gathered weight, no copy.

    Autograd holds the Parameter itself, or a view of it, whose storage FSDP empties after the forward and fills before
    the backward.
    """
    found = {}
    # With reshard_after_forward=None the root group would stay gathered until the backward, as FSDP2 means it.
    for name, per_linear in (("Llama", False), ("Llama", True), ("GPT-2", False), ("Mixtral", False)):
        if name == "Llama":
            model, single = patched_pair(seed)
            inside = model.model.layers[1].mlp.down_proj
            for layer in (m for m in single.modules() if hasattr(m, "hot")):
                layer.hot.config = replace(
                    layer.hot.config, share=not per_linear
                )  # FSDP2 hands each layer that it wraps an alias of its own
            sharded = shard(model, per_linear, reshard_after_forward=True)
        else:
            model, blocks, inside, single = other_kind(name, seed)
            for block in blocks:
                fully_shard(block, reshard_after_forward=True)
            sharded = fully_shard(model, reshard_after_forward=True)
        found[f"{name}, {'each linear layer' if per_linear else 'blocks'}"] = bytes_alive(sharded, inside, single)
    return found


def bytes_alive(sharded, inside, single) -> dict[str, int]:
    """Bytes that autograd holds after a layer inside a block, after the whole forward, and on one process."""
    batch, storages, in_forward = token_batch(), {}, []

    def record(t):
        storages[t.untyped_storage()._cdata] = t.untyped_storage()
        return t

    def now():
        return sum(s.nbytes() for s in storages.values())

    # Before the layer's own hooks, which empty it where it is sharded by itself.
    inside.register_forward_hook(lambda *_: in_forward.append(now()), prepend=True)
    with torch.autograd.graph.saved_tensors_hooks(record, lambda t: t):
        loss = sharded(**batch).loss
    after = now()
    with SavedTensors(single) as saved:
        single(**batch)
    loss.backward()
    return {"in the forward": in_forward[0], "after": after, "one process": saved.total_bytes}


@scenario
def save_and_reload(seed):
    """A sharded state saved by both ranks loads into a sharded HOT model, and whole into a plain one."""
    model, _ = patched_pair(seed)
    sharded = shard(model)
    expected = weights(sharded)
    path = os.path.join(os.environ["HOT_TEST_FOLDER"], "sharded")
    dcp.save({"model": get_model_state_dict(sharded)}, checkpoint_id=path)

    torch.manual_seed(seed + 1)
    other = tiny_llama(layers=2)
    apply_hot(other, HOTConfig())
    other = shard(other)
    state = {"model": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(other, state["model"])
    assert_close(weights(other), expected, 0.0)

    exact = tiny_llama(layers=2)
    exact.load_state_dict(expected, strict=True)
    assert_close(weights(exact), expected, 0.0)
    return len(expected)


@scenario
def same_tensors_to_flatten(seed):
    """C57: the same parameter names, shapes and types reach FSDP, and nothing else."""
    model, _ = patched_pair(seed)
    bare = tiny_llama(layers=2)
    described = [
        {n: (tuple(t.shape), t.dtype) for n, t in (*m.named_parameters(), *m.named_buffers())} for m in (model, bare)
    ]
    assert described[0] == described[1]
    return len(described[0])


@scenario
def patching_after_sharding(seed):
    """C32: blocks may be sharded first; a linear layer that FSDP wraps by itself is refused by name, both ways."""
    torch.manual_seed(seed)
    model = tiny_llama(layers=2)
    single = copy.deepcopy(model)
    apply_hot(single, HOTConfig())
    shard(model)
    parameters = [id(p) for p in model.parameters()]
    apply_hot(model, HOTConfig())
    assert [id(p) for p in model.parameters()] == parameters
    error = three_steps_match(model, single, seed)
    remove_hot(model)
    model(**token_batch()).loss.backward()

    messages = []
    bare = shard(tiny_llama(layers=1), per_linear=True)
    patched = tiny_llama(layers=1)
    apply_hot(patched, HOTConfig())
    shard(patched, per_linear=True)
    for action in (lambda: apply_hot(bare, HOTConfig()), lambda: remove_hot(patched)):
        try:
            action()
        except HOTPatchError as refused:
            messages.append(str(refused))
    return {"error": error, "messages": messages}


@scenario
def compiled_blocks(seed):
    """The order FSDP2 asks for: compile each block, then shard it."""
    model, single = patched_pair(seed)
    for block in model.model.layers:
        block.compile(backend="aot_eager")
    return three_steps_match(shard(model), single, seed)


@scenario
def tensor_parallelism(seed):
    """Refused by name: at patching, and in the forward of a layer that was split afterwards."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {f"layers.0.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    plan["layers.0.mlp.down_proj"] = RowwiseParallel()
    messages = []
    split = tiny_llama(layers=1)
    parallelize_module(split.model, mesh, plan)
    later = tiny_llama(layers=1)
    apply_hot(later, HOTConfig())
    parallelize_module(later.model, mesh, plan)
    for action in (lambda: apply_hot(split, HOTConfig()), lambda: later(**token_batch())):
        try:
            action()
        except RuntimeError as refused:
            messages.append(str(refused))
    apply_hot(split, HOTConfig(exclude=["*.mlp.*"]))
    split(**token_batch()).loss.backward()
    return messages


@scenario
def accelerate_configuration(seed):
    """scripts/launch/fsdp2.yaml through Accelerate's own plugin and preparation, which it allows on GPUs alone."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    os.environ.update(environment("fsdp2"))
    plugin = FullyShardedDataParallelPlugin()
    model, single = patched_pair(seed)
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        mixed_precision="no",
        device=torch.device("cpu"),
        is_main_process=dist.get_rank() == 0,
        parallelism_config=None,
    )
    sharded = fsdp2_prepare_model(accelerator, model)  # by way of the meta device
    assert isinstance(sharded.model.layers[0], FSDPModule)
    # What a callback does that patches only now: blocks are sharded, and the head by itself.
    assert len(apply_hot(sharded, HOTConfig()).patched) == 14
    return three_steps_match(sharded, single, seed)


if __name__ == "__main__":
    scenario.main()

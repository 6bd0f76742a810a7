"""FSDP2 (``fully_shard``) on two processes; the work is in fsdp_worker.py."""

import pytest

WORKER = "fsdp_worker"

pytestmark = [pytest.mark.xdist_group("fsdp"), pytest.mark.timeout(400)]


@pytest.mark.parametrize(
    "name",
    [
        "three_steps",
        "mixed_precision",
        "accumulation",
        "lora",
        "conv1d_and_experts",
        "compiled_blocks",
        "save_and_reload",
        "accelerate_configuration",
    ],
)
def test_as_one_process(outcome, name):
    """Gradients in three AdamW steps, and saved weights, equal one process's to float tolerance."""
    outcome.of(name)


def test_nothing_gathered_stays(outcome):
    """What two ranks keep for the backward is what one process keeps beside its parameters, byte for byte."""
    for cases in outcome.of("nothing_gathered_stays"):
        assert len(cases) == 4
        for name, found in cases.items():
            assert found["after"] == found["one process"] > 0, name
            # The measure sees gathered weights while they are there.
            assert found["in the forward"] > found["after"] or "each linear layer" in name, name


def test_patching_adds_nothing_to_flatten(outcome):
    """C57."""
    assert min(outcome.of("same_tensors_to_flatten")) > 0


def test_patching_after_sharding(outcome):
    """C32: a sharded block may be patched and unpatched; layers sharded by themselves are refused by name."""
    for found in outcome.of("patching_after_sharding"):
        assert found["error"] < 1e-5  # FLOAT_TOLERANCE
        after, removed = found["messages"]
        assert "layers.0.self_attn.q_proj" in after and "apply_hot first" in after
        assert "layers.0.self_attn.q_proj" in removed


def test_tensor_parallelism_is_refused(outcome):
    """By the layer's name, with what to do; excluded layers are no obstacle."""
    for messages in outcome.of("tensor_parallelism"):
        patching, forward = messages
        assert "model.layers.0.mlp.gate_proj" in patching and "tensor parallelism" in patching and "FSDP2" in patching
        assert "model.layers.0.mlp.gate_proj" in forward and "DTensor" in forward and "exclude" in forward

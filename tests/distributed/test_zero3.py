"""ZeRO-3: parameters that are empty outside their layer's forward and backward, simulated and by DeepSpeed."""

from importlib.util import find_spec

import pytest
import torch
from torch import nn
from transformers import MixtralConfig
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.pytorch_utils import Conv1D

from hot_hf import HOTConfig, apply_hot
from hot_hf.layer_kinds import is_linear
from hot_hf.monitor import GradientErrors
from tests.architectures import batch, build
from tests.models import grads, mlp, tiny_llama, token_batch, twin

from .launcher import launch

PRESETS = ["default", "fast", "smallest"]


class Placeholders:
    """What ZeRO-3 does to a layer's parameters: ``.data`` is empty but while the layer runs forward or backward.

    Memory that was gathered is filled with NaN when it is released: whoever still holds it shows.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.full = model, {}
        self.layers = [m for m in model.modules() if is_linear(m)]
        for layer in self.layers:
            layer.register_forward_pre_hook(lambda m, args: self.gather(m))
            layer.register_forward_hook(lambda m, args, y: self.release(m))
            layer.register_full_backward_pre_hook(lambda m, g: self.gather(m))
            layer.register_full_backward_hook(lambda m, gi, go: self.release(m))
            for number, p in enumerate(layer.parameters(recurse=False)):
                p.ds_id, p.ds_shape, p.ds_numel = number, p.shape, p.numel()  # as DeepSpeed marks its parameters
                if p.requires_grad:
                    # the real thing partitions the gradient here; a gradient wants the full shape to be stored
                    p.register_post_accumulate_grad_hook(lambda p: self.found.__setitem__(p, p.grad))
        self.found: dict = {}
        for layer in self.layers:
            self.release(layer)

    def gather(self, layer) -> None:
        for p in layer.parameters(recurse=False):
            if p in self.full:
                p.data = self.full.pop(p)

    def release(self, layer) -> None:
        for p in layer.parameters(recurse=False):
            if p not in self.full:
                self.full[p] = p.data.clone()
                p.data.fill_(torch.nan)
                p.data = torch.empty(0, dtype=p.dtype)


def conv1ds() -> nn.Module:
    return nn.Sequential(Conv1D(128, 64), nn.GELU(), Conv1D(64, 128))


class Experts(nn.Module):
    """Four experts, two to a token; gpt-oss keeps its weights transposed and has biases."""

    def __init__(self, config, cls) -> None:
        super().__init__()
        self.experts = cls(config)
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter, std=0.1)
        self.index = torch.stack([torch.randperm(4)[:2] for _ in range(40)])
        self.weights = torch.rand(40, 2)

    def forward(self, x):
        return self.experts(x, self.index, self.weights)


MIXTRAL = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4}
GPT_OSS = {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 4}
MODELS = {
    "Linear": lambda: mlp(64, 128, 64),
    "Conv1D": conv1ds,
    "Mixtral": lambda: Experts(
        MixtralConfig(hidden_size=64, intermediate_size=96, num_local_experts=4), MixtralExperts
    ),
    "GPT-OSS": lambda: Experts(GptOssConfig(hidden_size=64, intermediate_size=64, num_local_experts=4), GptOssExperts),
}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_placeholders(kind, preset, frozen):
    """C59: weights emptied after the forward and refilled before the backward: gradients as without, bit for bit; what
    was gathered for the forward is held by nobody."""
    model = MODELS[kind]()
    apply_hot(model, HOTConfig.from_preset(preset))
    model.requires_grad_(not frozen)
    plain, x = twin(model), torch.randn(40, 64)
    engine = Placeholders(model)
    assert all(p.numel() == 0 for p in model.parameters())
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    y = model(inputs[0])
    assert all(p.numel() == 0 for p in model.parameters())
    y.square().sum().backward()
    plain(inputs[1]).square().sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad) and torch.isfinite(inputs[0].grad).all()
    expected = grads(plain)
    assert len(expected) == (0 if frozen else len(list(plain.parameters())))
    for name, p in model.named_parameters():
        if not frozen:
            assert torch.equal(engine.found[p], expected[name]), name


@pytest.mark.parametrize("kind", ["Linear", "Conv1D"])
def test_a_weight_that_stays_away_is_an_error(kind):
    """C59: nobody gathers it again before the backward."""
    model = MODELS[kind]()
    apply_hot(model, HOTConfig())
    model[2].weight.ds_id = 0
    y = model(torch.randn(40, 64, requires_grad=True))
    model[2].weight.data = torch.empty(0)
    with pytest.raises(RuntimeError, match=r"64 x 128.*gather"):
        y.sum().backward()


def test_patching_placeholders():
    """Sizes come from the module, not from the empty weight: as many layers as before the partitioning."""
    model = tiny_llama(layers=1)
    names = apply_hot(twin(model), HOTConfig()).patched
    Placeholders(model)
    assert apply_hot(model, HOTConfig()).patched == names
    model(**token_batch()).loss.backward()


@pytest.mark.parametrize("name", ["GPT-2", "Mixtral"])
def test_patching_placeholders_of_other_kinds(name):
    """Conv1D and experts are found by what ZeRO-3 says of their shapes, and the report counts them whole."""
    model = build(name)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())  # the embedding stays where it is
    report = apply_hot(twin(model), HOTConfig())
    Placeholders(model)
    placeholders = apply_hot(model, HOTConfig())
    assert placeholders.patched == report.patched
    assert placeholders.parameter_share == pytest.approx(report.parameter_share)
    assert all(hasattr(layer, "weight") for layer in GradientErrors.sample(model, 100).layers)  # no experts
    model(**batch(name)).loss.backward()


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed (pip install deepspeed)")
def test_deepspeed(tmp_path, seed):
    """DeepSpeed's own ZeRO-3 on two ranks: gradients are the average of what each rank computes alone."""
    outcome = launch("zero3_worker", tmp_path, seed, DS_ACCELERATOR="cpu")
    kinds = [found for by_name in outcome.of("conv1d_and_experts") for found in by_name.values()]
    assert len(kinds) == 4 and not any(found["views"] for found in kinds)
    for found in (*outcome.of("three_steps"), *kinds):
        assert found["placeholders"] > 0
        # The partitioned buffers are aligned otherwise, float32 sums differ in the last place, and one INT8 value that
        # rounds the other way is 1/127 of the largest entry at most.
        assert found["worst"] < 0.01

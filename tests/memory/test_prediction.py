"""measure: every storage once, by owner, kind and type. estimate: the same bytes from a configuration alone."""

import copy
import json
import re
from pathlib import Path

import pytest
import torch
from peft import get_peft_model
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import BertConfig, LlamaConfig, MixtralConfig, T5Config, ViTConfig

import hot_hf.memory.prediction as prediction
from hot_hf import HOTConfig, apply_hot
from hot_hf.cli import main
from hot_hf.memory import Estimator, SavedTensors, estimate, largest_batch, measure

CONFIGS = {
    "vit": ViTConfig(
        image_size=64,
        patch_size=8,
        hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=3,
        intermediate_size=384,
        architectures=["ViTForImageClassification"],
    ),
    "bert": BertConfig(
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=512,
        vocab_size=400,
        architectures=["BertForSequenceClassification"],
    ),
    "llama": LlamaConfig(
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=400,
        architectures=["LlamaForCausalLM"],
    ),
}
METHODS = (
    "exact",
    "hot",
    "hot+block",
    "paper+block",
    "checkpointing",
    "hot+checkpointing",
    "lora",
    "lora+hot",
    "lora+hot+block",
    "lora+checkpointing",
)


def real_model(config, method: str, dtype: torch.dtype) -> nn.Module:
    """What a user would build and patch, on the CPU."""
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, config.architectures[0])._from_config(copy.deepcopy(config), dtype=dtype)
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    wanted = prediction.Method(method)
    if wanted.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if wanted.lora:
        from peft import LoraConfig

        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", **prediction._peft_task(model)))
    if wanted.config is not None:
        apply_hot(model, wanted.config)
        prediction.fix_selection(model)
    return model.train()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", CONFIGS)
def test_estimate_is_what_measure_finds(family, method):
    """Predicted on meta tensors within 5% of what a real forward keeps; parameters and gradients to the byte."""
    config = CONFIGS[family]
    batch, length = 3, None if family == "vit" else 80
    dtype = torch.bfloat16 if family == "llama" else torch.float32
    predicted = estimate(config, batch, length, method, dtype=dtype, device="cpu")
    model = real_model(config, method, dtype)
    found = measure(model, prediction.example_batch(model, batch, length))
    assert predicted.activations == pytest.approx(found.total_bytes, rel=0.05)  # the promise; they were equal
    assert predicted.parameters == sum(p.numel() * p.element_size() for p in model.parameters())
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert predicted.gradients == sum(p.numel() * p.element_size() for p in trainable)
    assert (predicted.recompute > 0) == ("checkpointing" in method)
    assert predicted.kept.by("kind").keys() == found.by("kind").keys()


@pytest.mark.parametrize("method", ["exact", "hot", "hot+block", "checkpointing", "lora+hot"])
@pytest.mark.parametrize("family", CONFIGS)
def test_estimate_under_autocast(family, method):
    """Float32 weights under bfloat16 autocast, the usual setup: as above within 5% of a real forward on the CPU."""
    config = CONFIGS[family]
    batch, length = 3, None if family == "vit" else 80
    state = torch.get_rng_state()
    predicted = estimate(config, batch, length, method, autocast=torch.bfloat16, device="cpu")
    assert torch.equal(torch.get_rng_state(), state)
    model = real_model(config, method, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = measure(model, prediction.example_batch(model, batch, length))
    assert predicted.activations == pytest.approx(found.total_bytes, rel=0.05)  # the promise; they were equal
    assert predicted.parameters == sum(p.numel() * p.element_size() for p in model.parameters())  # still float32
    if method == "exact":  # packed groups are as large in either type
        assert estimate(config, batch, length, method, device="cpu").activations > 1.05 * predicted.activations


def test_autocast_of_an_accelerator_keeps_more_in_float32():
    """Norms and softmax run in float32 there (torch's list); under the CPU's autocast they keep their type."""
    seen = {}
    for device in ("cpu", "cuda"):
        estimator = Estimator(CONFIGS["llama"], length=64, method="exact", autocast=torch.float16, device=device)
        with estimator.autocast.forward(), prediction.MetaForward(device):
            x = torch.ones(2, 8, 8, dtype=torch.float16)
            found = torch.softmax(x, -1), x.pow(2), x @ x, nn.functional.layer_norm(x.float() @ x.float(), (8,))
        seen[device] = [t.dtype for t in found]
    assert seen["cpu"] == [torch.float16] * 4
    assert seen["cuda"] == [torch.float32, torch.float32, torch.float16, torch.float32]


@pytest.mark.parametrize("optimizer", ["adamw", "momentum", "sgd"])
def test_optimizer_state_is_what_torch_allocates(optimizer):
    model = real_model(CONFIGS["vit"], "lora", torch.float32)
    trainable = [p for p in model.parameters() if p.requires_grad]
    made = {
        "adamw": lambda: torch.optim.AdamW(trainable),
        "momentum": lambda: torch.optim.SGD(trainable, 0.1, momentum=0.9),
        "sgd": lambda: torch.optim.SGD(trainable, 0.1),
    }[optimizer]()
    for p in trainable:
        p.grad = torch.zeros_like(p)
    made.step()
    state = [t for s in made.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    assert prediction.optimizer_bytes(model, optimizer) == sum(t.numel() * t.element_size() for t in state)


def test_largest_batch_fits_and_one_more_does_not():
    estimator = Estimator(CONFIGS["llama"], length=64, method="hot", device="cpu")
    memory = estimator.at(13).total + 1000
    assert largest_batch(estimator, memory) == 13
    assert largest_batch(estimator, estimator.at(1).total - 1) == 0


def test_devices_differ_where_their_kernels_do():
    """Attention with dropout is fused on a GPU and written out on the CPU, where its probabilities are kept."""
    cpu, cuda = (estimate(CONFIGS["bert"], 2, 128, "exact", device=d).activations for d in ("cpu", "cuda"))
    assert cuda < 0.8 * cpu


@pytest.mark.parametrize("kind", ["xpu", "mps", "cuda"])
def test_the_device_is_this_machines_accelerator(monkeypatch, kind):
    """C66: whatever its kind, not only where torch.cuda is there."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device(kind))
    assert Estimator(CONFIGS["vit"], method="exact").device == kind
    assert Estimator(CONFIGS["vit"], method="exact", device="cpu").device == "cpu"
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    assert Estimator(CONFIGS["vit"], method="exact").device == "cpu"


def test_no_device_is_named_outside_its_kernels():
    """C66: torch.cuda appears in the Triton kernels' folder alone."""
    package = Path(prediction.__file__).parents[1]
    found = [p for p in package.rglob("*.py") if re.search(r"\btorch\.cuda\b", p.read_text())]
    assert [p for p in found if p.parent != package / "ops/triton"] == []


def test_measuring_asks_no_device_that_is_not_there(monkeypatch):
    """C66: a model on the CPU is measured by the CPU's random state alone, with no literal of another device."""
    asked = []
    real = torch.random.fork_rng
    monkeypatch.setattr(torch.random, "fork_rng", lambda **settings: (asked.append(settings), real(**settings))[1])
    measure(nn.Linear(2, 2), torch.ones(1, 2))
    assert asked == [{"devices": [], "device_type": "cpu"}]


def test_user_errors():
    with pytest.raises(ValueError, match=r"\['hat'\] not known"):
        estimate(CONFIGS["vit"], method="hat")
    with pytest.raises(ValueError, match="2 presets"):
        estimate(CONFIGS["vit"], method="paper+fast")
    with pytest.raises(ValueError, match="optimizer 'adam'"):
        estimate(CONFIGS["vit"], method="exact", optimizer="adam")
    with pytest.raises(ValueError, match="device 'toaster'"):
        estimate(CONFIGS["vit"], method="exact", device="toaster")
    with pytest.raises(ValueError, match=r"autocast=torch.int8 must be torch.bfloat16"):
        estimate(CONFIGS["vit"], method="exact", autocast=torch.int8)
    with pytest.raises(ValueError, match="at least 1"):
        estimate(CONFIGS["vit"], batch=0, method="exact")
    with pytest.raises(ValueError, match="task 'sorting'"):
        estimate(CONFIGS["vit"], method="exact", task="sorting")
    with pytest.raises(ValueError, match="model_type"):
        estimate({"hidden_size": 3}, method="exact")
    with pytest.raises(ValueError, match="encoder-decoder: True"):
        estimate(T5Config(num_layers=1, vocab_size=100, d_ff=64), method="exact")
    moe = MixtralConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=99)
    with pytest.raises(ValueError, match="cannot run on meta tensors"):
        estimate(moe, 1, 32, "hot", dtype=torch.bfloat16)
    with torch.no_grad(), pytest.raises(RuntimeError, match="no_grad"):
        measure(nn.Linear(2, 2), torch.ones(1, 2))


def test_command_prints_a_table_and_draws(tmp_path, capsys):
    CONFIGS["llama"].save_pretrained(tmp_path / "model")
    chart = tmp_path / "chart.png"
    arguments = ["estimate", str(tmp_path / "model"), "--batch", "2", "--length", "64", "--memory-gb", "1"]
    assert main([*arguments, "--methods", "exact", "hot+block", "--plot", str(chart)]) == 0
    out = capsys.readouterr().out
    exact, block = (next(r.split() for r in out.splitlines() if r.startswith(m)) for m in ("exact", "hot+block"))
    assert int(block[-1]) > int(exact[-1]) > 100  # the largest batch in 1 GB
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert main(["estimate", str(tmp_path / "model" / "config.json"), "--methods", "exact", "--no-plot"]) == 0
    assert main([*arguments, "--methods", "exact", "--no-plot", "--bf16"]) == 0
    mixed = capsys.readouterr().out
    assert "float32 weights, bfloat16 autocast, adamw" in mixed
    assert int(mixed.splitlines()[-1].split()[-1]) > int(exact[-1])
    assert main([*arguments, "--methods", "magic", "--no-plot"]) == 2
    (tmp_path / "odd.json").write_text(json.dumps({"hidden_size": 3}))
    assert main(["estimate", str(tmp_path / "odd.json"), "--methods", "exact"]) == 2


class Shared(nn.Module):
    """Two layers and a product that save one input; the sum saves nothing."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 32)

    def forward(self, x):
        x = x.exp()  # saves its result, which both layers save too
        return self.a(x).sum() + self.b(x[:, :64].view(-1, 64)).sum()


def test_measure_counts_each_storage_once():
    model = Shared()
    x = torch.randn(10, 64, requires_grad=True)
    found = measure(model, x)
    assert found.total_bytes == 10 * 64 * 4
    assert found.by("owner") == {"": 10 * 64 * 4}  # the model's own code saved it first
    assert found.by("dtype") == {torch.float32: 10 * 64 * 4}
    with SavedTensors(model) as saved:
        model(x)
    assert saved.bytes_of(["a"]) == saved.bytes_of(["b"]) == saved.total_bytes
    assert found.outside("") == 0 and "MiB" in str(found)


def test_measure_leaves_no_trace():
    """The random state, the hooks and the memory are as before; nothing saved outlives the measurement (C54)."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Softmax(-1))
    outputs = []
    handle = model[2].register_forward_hook(lambda m, a, out: outputs.append(StorageWeakRef(out.untyped_storage())))
    x = torch.randn(8, 64)
    state = torch.get_rng_state()
    measure(model, x)
    assert torch.equal(torch.get_rng_state(), state)  # although the dropout drew
    handle.remove()
    # Softmax saves its output: kept as it is, tensor and node would keep each other alive for ever.
    assert outputs[0].expired()
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_hot_bytes_are_the_packed_inputs():
    model = nn.Sequential(nn.Linear(256, 128), nn.GELU())
    apply_hot(model, HOTConfig(activation_format="ht_int4"))
    with SavedTensors(model) as saved:
        model(torch.randn(32, 256))
    assert saved.hot_bytes == 32 * 256 // 2 + 32 * 4  # half a byte per element, one float32 scale per token


SMOLLM2 = LlamaConfig(
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=2,
    num_attention_heads=9,
    num_key_value_heads=3,
    vocab_size=49152,
    tie_word_embeddings=True,
    architectures=["LlamaForCausalLM"],
)
LLAMA_8 = LlamaConfig(
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=2,
    num_attention_heads=16,
    num_key_value_heads=8,
    architectures=["LlamaForCausalLM"],
)
VIT_B = ViTConfig(num_hidden_layers=3, num_labels=1000, architectures=["ViTForImageClassification"])


@pytest.mark.parametrize(
    "config, batch, length, dtype, method, base, less",
    [
        (VIT_B, 8, None, torch.float32, "hot+block", "exact", 0.75),
        (LLAMA_8, 1, 1024, torch.bfloat16, "hot+block", "exact", 0.60),
        (SMOLLM2, 2, 256, torch.float32, "lora+hot+block", "lora", 0.70),
    ],
)
def test_block_compression_keeps_what_was_promised(config, batch, length, dtype, method, base, less):
    """Shares of all but logits and loss; fewer layers than docs/results/memory.md has, so that ends weigh more."""
    loss = ("", "base_model.model")
    kept, whole = (
        estimate(config, batch, length, m, dtype=dtype, device="cpu").kept.outside(*loss) for m in (method, base)
    )
    assert kept < (1 - less) * whole

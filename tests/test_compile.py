"""torch.compile: whole models and block by block, many different plans, lengths, LoRA, checkpointing."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from hot_hf import HOTConfig, apply_hot, fix_selection, torch_compile
from tests.architectures import build
from tests.models import grads, mlp, relative_error, tiny_llama, token_batch, twin

# AOTAutograd decomposes float operations and sums them in another order: g differs in its last places, and an entry
# that lies within those of the middle between two INT8 steps rounds to the other one. One such entry in a tensor of n
# gives an error of 1 / (127 sqrt(n)) of its norm: 1e-4 for the smallest here.
CLOSE = 1e-3


@pytest.fixture
def dynamo():
    import torch._dynamo

    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo
    torch._dynamo.config.recompile_limit = limit
    torch._dynamo.reset()


def counting():
    """A backend that runs AOTAutograd without code generation and counts the graphs it is given."""
    from torch._dynamo.testing import CompileCounterWithBackend

    return CompileCounterWithBackend("aot_eager")


def compile_blocks(model, backend, **settings):
    for block in model.model.layers:
        block.compile(backend=backend, **settings)
    return model


def assert_same_gradients(compiled, eager, batches, close: float = CLOSE) -> None:
    for batch in batches:
        for model in (compiled, eager):
            model.zero_grad()
            model(**batch).loss.backward()
        expected = grads(eager)
        found = {n.removeprefix("_orig_mod."): g for n, g in grads(compiled).items()}
        assert found.keys() == expected.keys() and expected
        for name, value in expected.items():
            assert relative_error(found[name], value) < close, name


@pytest.mark.parametrize("regional", [False, True])
def test_no_graph_break_and_few_graphs(dynamo, regional):
    """C12: fullgraph over three lengths; block by block, equal plans share their graphs: two, whatever the depth."""
    model = tiny_llama(layers=3 if regional else 1)
    apply_hot(model, HOTConfig())
    eager, backend = twin(model), counting()
    if regional:
        compiled = compile_blocks(model, backend, fullgraph=True)
    else:
        compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert_same_gradients(compiled, eager, [token_batch(length=n) for n in (16, 24, 41)])
    assert backend.frame_count == 2  # the first length, then all others
    assert not dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("preset", ["fast", "smallest"])
def test_presets(dynamo, preset):
    model = mlp(64, 128, 64)
    apply_hot(model, HOTConfig.from_preset(preset))
    eager = twin(model)
    x = torch.randn(3, 21, 64)
    torch.compile(model, backend="aot_eager", fullgraph=True)(x).square().sum().backward()
    eager(x).square().sum().backward()
    for name, value in grads(eager).items():
        # One 4-bit value that rounds the other way is 1 / (7 sqrt(n)) of a tensor's norm.
        assert relative_error(grads(model)[name], value) < 0.01, name


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


@pytest.mark.parametrize("fullgraph", [False, True])
def test_more_plans_than_the_recompile_limit(dynamo, fullgraph, monkeypatch):
    """Twelve blocks with twelve plans, one code object: twelve graphs, where torch.compile would stop at eight."""
    blocks = 12
    monkeypatch.setattr(dynamo.config, "recompile_limit", 8)  # its default, whatever earlier tests raised it to
    model = nn.Sequential(*[Block() for _ in range(blocks)])
    formats = {f"{i}.*": {"activation_format": "hla_int8", "rank": i + 1} for i in range(blocks)}
    apply_hot(model, HOTConfig(overrides=formats))
    eager, backend = twin(model), counting()
    for block in model:
        block.compile(backend=backend, fullgraph=fullgraph)
    for _ in range(2):
        x = torch.randn(3, 21, 64)
        for m in (model, eager):
            m.zero_grad()
            m(x).square().sum().backward()
        assert backend.frame_count == blocks
        for name, value in grads(eager).items():
            assert relative_error(grads(model)[name], value) < 0.01, name


def test_one_plan_leaves_the_recompile_limit_alone(dynamo, monkeypatch):
    """The limit is the user's where no layer differs."""

    monkeypatch.setattr(torch_compile, "_plans", set())
    limit = dynamo.config.recompile_limit
    model = mlp(64, 64, 64)
    apply_hot(model, HOTConfig())
    torch.compile(model, backend="eager")(torch.randn(5, 64)).sum().backward()
    assert dynamo.config.recompile_limit == limit


def test_the_recompile_limit_grows_with_living_layers(dynamo, monkeypatch):
    """Not with every patch ever made: layers patched 20 times over count once, those of deleted models not at all."""

    monkeypatch.setattr(torch_compile, "_layers", {})
    monkeypatch.setattr(dynamo.config, "recompile_limit", 8)
    model = mlp(64, 64, 64, 64)
    for _ in range(20):
        apply_hot(model, HOTConfig(overrides={"0": {"activation_format": "int8"}}))
    other = mlp(64, 64)
    apply_hot(other, HOTConfig())
    del other
    torch.compile(model, backend="eager")(torch.randn(5, 64)).sum().backward()
    assert dynamo.config.recompile_limit == 8 + 3


def test_stochastic_rounding_leaves_the_graph(dynamo):
    """Each step draws anew and as in eager mode, step for step, with no version of a graph per step."""
    model = tiny_llama(layers=1)
    apply_hot(model, HOTConfig(rounding="stochastic"))
    eager, backend = twin(model), counting()
    compile_blocks(model, backend)
    graphs = []
    for _ in range(3):
        # 127 levels, each of which may round the other way where AOTAutograd's sums differ in the last place.
        assert_same_gradients(model, eager, [token_batch()], close=0.01)
        graphs.append(backend.frame_count)
    assert graphs[1] == graphs[2]


def test_stochastic_rounding_says_why_it_is_no_full_graph(dynamo):
    model = mlp(64, 64)
    apply_hot(model, HOTConfig(rounding="stochastic"))
    with pytest.raises(Exception, match="measures_or_rounds_stochastically"):
        torch.compile(model, backend="eager", fullgraph=True)(torch.randn(5, 64))


def test_compiled_while_lqs_measures(dynamo):
    """Exact while measuring, then the chosen plans; compiled anew they are one graph without breaks."""
    model = nn.Sequential(Block(), Block())
    apply_hot(model, HOTConfig(grad_input_granularity="lqs", lqs_batches=2))
    eager = twin(model)
    compiled = torch.compile(model, backend="aot_eager")

    def compare(close):
        x = torch.randn(3, 21, 64)
        for m in (compiled, eager):
            m.zero_grad()
            m(x).square().sum().backward()
        for name, value in grads(eager).items():
            assert relative_error(grads(model)[name], value) < close, name

    compare(1e-5)  # float products
    compare(1e-5)
    chosen = fix_selection(model)
    assert chosen == fix_selection(eager) and len(chosen) == 4
    compare(CLOSE)
    torch.compiler.reset()
    compiled = torch.compile(model, backend=(backend := counting()), fullgraph=True)
    compare(CLOSE)
    assert backend.frame_count == 1


def test_compiled_lora(dynamo):
    """C12: a frozen base keeps nothing and still passes gradients on, lora_A is patched; two lengths."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_llama(layers=1), LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False))
    apply_hot(model, HOTConfig())
    eager, backend = twin(model), counting()
    assert_same_gradients(
        torch.compile(model, backend=backend, fullgraph=True), eager, [token_batch(length=n) for n in (16, 30)]
    )
    assert backend.frame_count == 2


def test_compiled_conv1d(dynamo):
    """GPT-2's Conv1D: one graph, gradients as eager's, in the weight's own layout."""
    model = build("GPT-2").eval()
    model.loss_type = "ForCausalLM"  # unset, transformers warns, which breaks the graph
    apply_hot(model, HOTConfig())
    eager, backend = twin(model), counting()
    assert_same_gradients(torch.compile(model, backend=backend, fullgraph=True), eager, [token_batch()])
    assert backend.frame_count == 1
    assert all(p.grad.stride() == p.stride() for p in model.parameters())


def test_compiled_experts(dynamo):
    """Experts count their tokens on the host, which breaks the graph; the gradients stay eager's."""
    model = build("Mixtral").eval()
    apply_hot(model, HOTConfig())
    eager = twin(model)
    assert_same_gradients(torch.compile(model, backend="aot_eager"), eager, [token_batch(), token_batch()], close=0.01)


def test_compiled_checkpointing(dynamo):
    """Checkpointing inside a compiled model: recomputed in the backward graph, gradients equal eager's."""
    model = tiny_llama(layers=2)
    apply_hot(model, HOTConfig())
    eager = twin(model)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same_gradients(torch.compile(model, backend="aot_eager", fullgraph=True), eager, [token_batch()])


def saved_by_graph(model, *inputs) -> list[torch.Tensor]:
    """Tensors that the compiled forward hands to its backward, beside parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        torch.compile(model, backend="aot_eager_decomp_partition", fullgraph=True)(*inputs)
    return [t for t in kept if t.untyped_storage().data_ptr() not in own]


def test_one_packed_copy_in_a_compiled_attention(dynamo):
    """q, k, v read one tensor, gate and up another: four packed tensors in a block of seven layers, as in eager."""
    model = tiny_llama(layers=1)
    apply_hot(model, HOTConfig())
    packed = {}
    ids = token_batch(rows=2, length=32)["input_ids"]
    for share in (True, False):
        for module in model.modules():
            if hasattr(module, "hot"):
                module.hot.config = replace(module.hot.config, share=share)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, k=kept: (k.append(t), t)[1], lambda t: t):
            model(input_ids=ids)
        packed[share] = len({t.untyped_storage().data_ptr() for t in kept if t.dtype == torch.uint8})
    assert packed == {True: 4, False: 7}
    compiled = [t for t in saved_by_graph(model, ids) if t.dtype == torch.uint8]
    assert sorted(tuple(t.shape) for t in compiled) == [(64, 32)] * 3 + [(64, 64)]


def test_inductor(dynamo):
    """With code generation: gradients as eager's, in bfloat16 autocast too."""
    model = nn.Sequential(Block())
    apply_hot(model, HOTConfig())
    eager, x = twin(model), torch.randn(3, 21, 64)
    compiled = torch.compile(model, fullgraph=True)
    # bfloat16 keeps 8 bits, and inductor fuses away some roundings to it that eager mode makes.
    for bf16, close in ((False, CLOSE), (True, 0.02)):
        for m in (compiled, eager):
            m.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = m(x).float().square().mean()
            loss.backward()
        for name, value in grads(eager).items():
            assert relative_error(grads(model)[name], value) < close, name

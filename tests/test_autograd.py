"""Autograd beyond one backward: transforms, checkpointing, compilation, double backward, random rounding."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.utils.checkpoint import checkpoint

import hot_hf
from hot_hf import HOTConfig, apply_hot
from hot_hf.memory import SavedTensors
from hot_hf.ops import FORMATS
from hot_hf.rounding import StepClock, layer_seed
from tests.linear import INT8_PRODUCT, INT8_TWO_LAYERS
from tests.models import cosine, grads, image_batch, mlp, relative_error, tiny_llama, tiny_vit, token_batch, twin

FORMAT_NAMES = [*FORMATS, "none"]
# Integers of g on either side of the middle between two steps of 1/127.
ONE_STEP = 0.01


def patched(model: nn.Module, **settings) -> nn.Module:
    model = twin(model)
    apply_hot(model, HOTConfig(**{"min_features": 1, **settings}))
    return model


def equal_grads(a: nn.Module, b: nn.Module) -> None:
    assert grads(a).keys() == grads(b).keys()
    for name, value in grads(a).items():
        assert torch.equal(value, grads(b)[name]), name


# Double backward


def test_gradient_penalty_is_refused():
    """C13: differentiating a HOT gradient again names the reason and the remedy, whatever it depends on."""
    model = patched(mlp(32, 48, 24))
    x = torch.randn(18, 32, requires_grad=True)
    (g,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"hot_hf: .*differentiated again.*remove_hot"):
        g.square().sum().backward()
    # Here the upstream gradient is constant: only the weight links g to the second derivative.
    layer = patched(mlp(32, 24))
    (g,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    assert g.requires_grad
    with pytest.raises(RuntimeError, match="differentiated again"):
        g.square().sum().backward()
    (g,) = torch.autograd.grad(layer(x).sum(), layer[0].weight, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated again"):
        g.square().sum().backward()


def test_create_graph_alone_is_harmless():
    """C13: create_graph=True gives the same first gradients."""
    model = patched(mlp(32, 48, 24))
    x = torch.randn(18, 32)
    results = []
    for create_graph in (False, True):
        results.append(torch.autograd.grad(model(x).sum(), list(model.parameters()), create_graph=create_graph))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# torch.func


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("fmt", FORMAT_NAMES)
def test_functional_grad(fmt, rounding):
    """C16: functional_call under func.grad gives what backward gives, bit for bit."""
    model = patched(mlp(32, 48, 24), activation_format=fmt, rounding=rounding)
    x = torch.randn(18, 32)
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    result = grad(lambda p: functional_call(model, p, (x,)).square().sum())(parameters)
    fresh = patched(mlp(32, 48, 24), activation_format=fmt, rounding=rounding)
    fresh.load_state_dict(model.state_dict())
    fresh(x).square().sum().backward()
    for name, value in grads(fresh).items():
        assert torch.equal(result[name], value), name


@pytest.mark.parametrize("fmt", FORMAT_NAMES)
def test_per_sample_gradients(fmt):
    """C16: vmap over func.grad equals a loop over the samples."""
    model = patched(mlp(32, 48, 24), activation_format=fmt)
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    x = torch.randn(3, 5, 32)
    one = grad(lambda p, x: functional_call(model, p, (x,)).square().sum())
    batched = vmap(one, (None, 0))(parameters, x)
    for i in range(3):
        for name, value in one(parameters, x[i]).items():
            # Batched float products may sum in another order; g would then round differently.
            assert relative_error(batched[name][i], value) < ONE_STEP, name


def test_jacobians_and_nesting():
    """C16: jacrev is near the exact Jacobian; nested derivatives are refused, forward mode is exact."""
    exact = mlp(32, 24)
    model = patched(exact)
    x = torch.randn(3, 32)
    assert relative_error(jacrev(model)(x), jacrev(exact)(x)) < INT8_PRODUCT
    with pytest.raises(RuntimeError, match="differentiated again"):
        grad(lambda x: grad(lambda x: model(x).square().sum())(x).sum())(x)
    found, wanted = (torch.func.jvp(m, (x,), (x,))[1] for m in (model, exact))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_transforms_while_lqs_measures():
    """C16: nothing that belongs to a transform is remembered by the measurement."""
    model = patched(mlp(32, 24), grad_input_granularity="lqs", lqs_batches=1)
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    x = torch.randn(2, 5, 32)
    vmap(grad(lambda p, x: functional_call(model, p, (x,)).square().sum()), (None, 0))(parameters, x)
    assert model[0].hot.probe.recorded == 0
    model(x).square().sum().backward()
    assert model[0].hot.probe.recorded == 1


# Checkpointing


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Siblings(nn.Module):
    """Three layers that read one tensor, and one that reads their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        return self.o(self.q(x) + self.k(x) * self.v(x))


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "pseudo_stochastic"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("fmt", FORMAT_NAMES)
def test_checkpointing_changes_nothing(fmt, reentrant, rounding, share):
    """C37, C30: a recompute repeats its forward, sharing included, over several steps."""
    plain = patched(Siblings(), activation_format=fmt, rounding=rounding, share=share)
    model = twin(plain)
    wrapped = Checkpointed(model, reentrant)
    for _ in range(3):
        x = torch.randn(18, 32)
        inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
        for m, inner in ((plain, inputs[0]), (wrapped, inputs[1])):
            m(inner).square().sum().backward()
        equal_grads(plain, model)
        assert torch.equal(inputs[0].grad, inputs[1].grad)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_while_lqs_measures(reentrant):
    """C37: measured once per backward, and the choice does not fall between a forward and its recompute."""
    settings = {"grad_input_granularity": "lqs", "lqs_batches": 2, "grad_input_bits": 4}
    plain = patched(Siblings(), **settings)
    model = twin(plain)
    wrapped = Checkpointed(model, reentrant)
    for step in range(4):
        x = torch.randn(18, 32)
        for m in (plain, wrapped):
            m(x.clone().requires_grad_()).square().sum().backward()
        equal_grads(plain, model)
        if step == 0:
            assert [m.hot.probe.recorded for m in (model.q, model.k, model.v, model.o)] == [1] * 4
    assert model.q.hot.probe is None and model.q.hot.plan == plain.q.hot.plan


@pytest.mark.parametrize("family", [(tiny_llama, token_batch), (tiny_vit, image_batch)], ids=["llama", "vit"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_model_checkpointing(family, reentrant):
    """C37: transformers' own gradient checkpointing on Llama and ViT, in both modes."""
    model = patched(family[0](), activation_format="hla_int4", rounding="stochastic", compress="inputs")
    other, batch = twin(model), family[1]()
    other.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
    other.enable_input_require_grads()
    for _ in range(2):
        model.train()(**batch).loss.backward()
        other(**batch).loss.backward()
    equal_grads(model, other)


# torch.compile


@pytest.fixture
def dynamo():
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo
    torch._dynamo.reset()


def _compile_counted(model, dynamo):
    """The model compiled by AOTAutograd without code generation, with its graphs counted."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(model, backend=counter), counter


@pytest.mark.parametrize("frozen", [False, True])
def test_compiled_llama(dynamo, frozen):
    """C12: full over three lengths, and mostly frozen: no graph break, one graph for all lengths but the first."""
    model = patched(tiny_llama(1), min_features=64)
    if frozen:
        model.requires_grad_(False)
        model.model.embed_tokens.requires_grad_(True)
        model.model.layers[0].mlp.up_proj.requires_grad_(True)
    eager = twin(model)
    compiled, counter = _compile_counted(model, dynamo)
    for length in (16,) if frozen else (16, 24, 40):
        batch = token_batch(2, length)
        compiled(**batch).loss.backward()
        eager(**batch).loss.backward()
    for name, value in grads(eager).items():
        # The decomposed float operations sum in another order, and g rounds differently here and there.
        assert cosine(grads(model)[name], value) > 0.999, name
    assert not dynamo.utils.counters["graph_break"]
    assert counter.frame_count <= 2  # the first length, then all others


def _packed_outputs(graph) -> list:
    return [n for n in graph.graph.nodes if n.op == "call_function" and "hot_hf.compress" in str(n.target)]


def test_compilation_merges_siblings(dynamo):
    """C12, docs/architecture.md, decision 4: q, k and v keep one packed tensor, and x itself is not kept."""
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    graphs = {}

    def capture(kind):
        return lambda gm, inputs: (graphs.setdefault(kind, gm), gm.forward)[1]

    model = patched(Siblings())
    eager = twin(model)
    backend = aot_autograd(
        fw_compiler=capture("forward"),
        bw_compiler=capture("backward"),
        partition_fn=min_cut_rematerialization_partition,
    )
    x = torch.randn(64, 32, requires_grad=True)
    torch.compile(model, backend=backend)(x).square().sum().backward()
    eager(x.detach().clone().requires_grad_()).square().sum().backward()
    for name, value in grads(eager).items():
        assert relative_error(grads(model)[name], value) < ONE_STEP, name  # the decomposed sums have another order
    assert len(_packed_outputs(graphs["forward"])) == 2  # x once, and the input of o
    assert not _packed_outputs(graphs["backward"])
    kept = [n for n in graphs["backward"].graph.nodes if n.op == "placeholder"]
    assert [n.meta["val"].dtype for n in kept].count(torch.uint8) == 2
    assert all(n.meta["val"].shape == (32, 32) for n in kept if n.name.startswith("primals"))  # weights, but not x


def test_compiled_with_random_rounding(dynamo):
    """C12: stochastic rounding and lqs may break the graph but not the training."""
    for settings in ({"rounding": "stochastic"}, {"grad_input_granularity": "lqs", "lqs_batches": 1}):
        exact = mlp(64, 64, 64)
        model = patched(exact, activation_format="int8", **settings)
        compiled = torch.compile(model, backend="aot_eager")
        for length in (16, 24, 40):
            x = torch.randn(length, 64)
            for m in (compiled, exact):
                m.zero_grad()
                m(x).square().sum().backward()
            for name, value in grads(exact).items():
                assert relative_error(grads(model)[name], value) < INT8_TWO_LAYERS, (settings, name)


# Random rounding


def test_layer_seeds():
    """C30: the key differs in seed, layer, step and rank (by name), leaves room for three operands, and repeats."""
    keys = {layer_seed(s, layer, step) for s in (0, 1) for layer in ("a", "b") for step in range(50)}
    assert len(keys) == 200
    assert all(0 <= k < 2**62 and k % 4 == 0 for k in keys)
    assert layer_seed(3, "model.layers.0", 7) == layer_seed(3, "model.layers.0", 7)


def test_seed_depends_on_the_rank(monkeypatch):
    """C30: ranks draw different numbers."""
    keys = set()
    for rank in range(4):
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda r=rank: r)
        keys.add(layer_seed(0, "layer", 0))
    assert len(keys) == 4


def test_step_clock():
    """A step is a forward after a backward; several forwards or backwards in a row are one."""
    clock = StepClock()
    assert [clock.forward(), clock.forward()] == [0, 0]
    clock.backward()
    clock.backward()
    assert [clock.forward(), clock.forward()] == [1, 1]


@pytest.mark.parametrize("fmt", FORMAT_NAMES)
def test_stochastic_rounding(fmt):
    """C30: repeats under one seed; differs per seed, layer and step; leaves the global generator alone."""
    exact = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])
    exact[1].load_state_dict(exact[0].state_dict())
    x, upstream = torch.randn(18, 32), torch.randn(18, 32)

    def run(seed: int, layer: int, steps: int):
        model = patched(exact, activation_format=fmt, rounding="stochastic", seed=seed)
        for _ in range(steps):
            model.zero_grad()
            inner = x.clone().requires_grad_()
            model[layer](inner).backward(upstream)
        return torch.cat((inner.grad.flatten(), model[layer].weight.grad.flatten()))

    state = torch.random.get_rng_state()
    first = run(0, 0, 1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(run(0, 0, 1), first)
    for other in (run(1, 0, 1), run(0, 1, 1), run(0, 0, 2)):
        assert not torch.equal(other, first)


@pytest.mark.parametrize("fmt", ["int8", "ht_int4"])
def test_stochastic_rounding_is_unbiased(fmt):
    """C30: the mean over many steps approaches the exact gradient as 1 / sqrt(steps)."""
    exact = mlp(32, 32)
    model = patched(exact, activation_format=fmt, rounding="stochastic", grad_input_bits=4)
    x, upstream = torch.randn(18, 32), torch.randn(18, 32)
    inner = x.clone().requires_grad_()
    exact(inner).backward(upstream)
    expected = inner.grad, exact[0].weight.grad
    sums, errors = [torch.zeros(18, 32), torch.zeros(32, 32)], []
    for _ in range(64):
        model.zero_grad()
        inner = x.clone().requires_grad_()
        model(inner).backward(upstream)
        for total, value in zip(sums, (inner.grad, model[0].weight.grad), strict=True):
            total += value
        errors = errors or [relative_error(s, e) for s, e in zip(sums, expected, strict=True)]
    for total, value, single in zip(sums, expected, errors, strict=True):
        assert relative_error(total / 64, value) < 2 * single / 8


def test_what_modules_use_of_each_other_is_public():
    """No module of the library imports a name that starts with an underscore from another one."""
    pattern = re.compile(r"^ *from \.+[\w.]* import \(?[^)\n]*(?<!\w)_[a-z]\w*", re.M)
    assert pattern.search("from .autograd import a, _b") and not pattern.search("from .. import __version__")
    found = {path.name: pattern.findall(path.read_text()) for path in Path(hot_hf.__file__).parent.rglob("*.py")}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_saved_tensors_see_everything():
    """spec.md, section 4: what is kept goes through save_for_backward, and nothing stays on the module."""
    model = patched(mlp(64, 48), activation_format="ht_int4")
    before = set(vars(model[0].hot))
    with SavedTensors(model) as saved:
        model(torch.randn(96, 64))
    assert saved.hot_bytes == 96 * 64 // 2 + 4 * 96
    assert set(vars(model[0].hot)) == before
    assert not any(isinstance(v, torch.Tensor) for v in vars(model[0].hot).values())

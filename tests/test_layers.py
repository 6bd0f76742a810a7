"""A patched nn.Linear beside its exact twin: same forward, same dtypes and shapes, gradients as close as promised."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

from hot_hf import HOTConfig, apply_hot, remove_hot
from hot_hf.layers import HOTMixin
from tests.linear import FLOATS, FORMAT_NAMES, NEAR, assert_near, leaf, pair, same_leaf
from tests.models import cosine, grads, mlp, relative_error, tiny_bert, twin, whole


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("fmt", [*FORMAT_NAMES, "none"])
def test_forward_is_f_linear(fmt, dtype):
    """The forward is bit-identical to F.linear for every dtype, and the bias gradient exact."""
    model, exact = pair(40, 24, dtype=dtype, activation_format=fmt)
    x = leaf(3, 5, 40, dtype=dtype)
    y, expected = model(x), exact(x)
    assert torch.equal(y, expected) and torch.equal(y, F.linear(x, exact[0].weight, exact[0].bias))
    upstream = torch.randn_like(y)
    x_exact = same_leaf(x)
    y.backward(upstream)
    exact(x_exact).backward(upstream)
    assert torch.equal(model[0].bias.grad, exact[0].bias.grad)
    assert x.grad.dtype == model[0].weight.grad.dtype == dtype
    # bfloat16 stores 8 bits: 2^-9 relative per entry.
    assert relative_error(x.grad, x_exact.grad) < 0.03
    if fmt in NEAR:
        assert relative_error(model[0].weight.grad, exact[0].weight.grad) < max(NEAR[fmt], 2.0**-8)


@pytest.mark.parametrize("dtype", FLOATS)
def test_exact_parts_equal_linear(dtype):
    """``grad_input_bits=None`` gives nn.Linear's g_x, ``format none`` its g_w, bit for bit on matrices."""
    for settings in ({"grad_input_bits": None}, {"activation_format": "none"}):
        model, exact = pair(40, 24, dtype=dtype, **settings)
        x = leaf(17, 40, dtype=dtype)
        x_exact, upstream = same_leaf(x), torch.randn(17, 24).to(dtype)
        model(x).backward(upstream)
        exact(x_exact).backward(upstream)
        if "grad_input_bits" in settings:
            assert torch.equal(x.grad, x_exact.grad)
        else:
            assert torch.equal(model[0].weight.grad, exact[0].weight.grad)


LOSSES = {
    "sum": lambda y: y.sum(),
    "cat": lambda y: (torch.cat((y, y.detach()), -1) * torch.linspace(-1, 1, 2 * y.shape[-1])).sum(),
    "transpose": lambda y: (y.transpose(1, 2) * torch.linspace(-1, 1, y.shape[1])).sum(),
    "every second": lambda y: (y[:, ::2] * torch.linspace(-1, 1, y.shape[-1])).sum(),
    "expand": lambda y: (y[:, :1].expand(-1, 7, -1) * torch.linspace(-1, 1, y.shape[-1])).sum(),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("fmt", FORMAT_NAMES)
def test_strided_upstream_gradients(fmt, loss):
    """C01: the gradient's strides (0, transposed, sliced) change no bit against a contiguous copy of it."""
    model, _ = pair(40, 24, activation_format=fmt)
    x = leaf(2, 18, 40)
    y = model(x)
    (upstream,) = torch.autograd.grad(loss(y), y)
    y = model(x)
    loss(y).backward()
    strided = [x.grad, *grads(model).values()]
    x.grad, model[0].weight.grad, model[0].bias.grad = None, None, None
    model(x).backward(upstream.contiguous().clone())
    for a, b in zip(strided, [x.grad, *grads(model).values()], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "pseudo_stochastic"])
@pytest.mark.parametrize("fmt", FORMAT_NAMES)
def test_zero_gradients(fmt, rounding):
    """C04: a loss that is multiplied by zero gives exact zeros, and one zero token a zero row."""
    model, _ = pair(40, 64, 24, activation_format=fmt, rounding=rounding)
    x = leaf(2, 18, 40)
    (model(x) * 0).sum().backward()
    assert all(not g.any() for g in (x.grad, *grads(model).values()))
    x.grad = None
    (model(x)[:, 1:] ** 2).sum().backward()
    assert not x.grad[:, 0].any() and x.grad[:, 1:].any() and x.grad.isfinite().all()


def test_labels_all_ignored():
    """C04: cross entropy over labels of -100 only, as a sum: exact zeros, no NaN."""
    model, _ = pair(40, 24)
    x = leaf(18, 40)
    F.cross_entropy(model(x), torch.full((18,), -100), reduction="sum").backward()
    assert all(not g.any() for g in (x.grad, *grads(model).values()))


@pytest.mark.parametrize("fmt", FORMAT_NAMES)
def test_non_finite_reaches_every_gradient(fmt):
    """spec.md, section 6: what a GradScaler looks at is not finite after one infinite gradient."""
    model, _ = pair(40, 64, 24, activation_format=fmt)
    x = leaf(18, 40)
    upstream = torch.randn(18, 24)
    upstream[3, 5] = torch.inf
    model(x).backward(upstream)
    assert all(not g.isfinite().all() for g in (x.grad, *grads(model).values()))


@pytest.mark.parametrize("features", [12, 33, 48, 3584])
def test_odd_widths(features):
    """C15: widths that are no power of two, in and out."""
    model, exact = pair(features, 24, features)
    x = leaf(32, features)
    x_exact, upstream = same_leaf(x), torch.randn(32, features)
    assert torch.equal(model(x), exact(x))
    model(x).backward(upstream)
    exact(x_exact).backward(upstream)
    assert relative_error(x.grad, x_exact.grad) < 0.05
    assert_near(model, exact)


@pytest.mark.parametrize("change", ["step", "data.copy_", "load_state_dict", "half", "eval then train"])
def test_weight_is_never_stale(change):
    """C07: after any change of the weight the input gradient is that of a freshly patched copy, bit for bit."""
    model, _ = pair(40, 24)
    x = leaf(18, 40)
    model(x).square().sum().backward()
    other = nn.Linear(40, 24)
    if change == "step":
        torch.optim.SGD(model.parameters(), lr=0.5).step()
    elif change == "data.copy_":
        model[0].weight.data.copy_(other.weight.data)
    elif change == "load_state_dict":
        model.load_state_dict({"0.weight": other.weight, "0.bias": other.bias})
    elif change == "half":
        model.half()
    else:
        model.eval()
        with torch.no_grad():
            model(x)
            model[0].weight.mul_(-2)
        model.train()
    fresh = nn.Sequential(nn.Linear(40, 24)).to(model[0].weight.dtype)
    fresh.load_state_dict(model.state_dict())
    apply_hot(fresh, HOTConfig(min_features=1))
    results = []
    for m in (model, fresh):
        inner = x.detach().to(m[0].weight.dtype).requires_grad_()
        m(inner).square().sum().backward()
        results.append(inner.grad)
    assert torch.equal(*results)


def test_weight_changed_between_forward_and_backward():
    """C07: an in-place change after the forward is an error, as with nn.Linear; through .data the new value is used."""
    model, _ = pair(40, 24)
    x = leaf(18, 40)
    y = model(x)
    with torch.no_grad():
        model[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y = model(x)
    model[0].weight.data.zero_()
    y.sum().backward()
    assert not x.grad.any()


@pytest.mark.parametrize("fmt", [*FORMAT_NAMES, "none"])
def test_one_layer_twice(fmt):
    """C09: a layer used twice in a graph, two micro-batches, and one graph backwarded twice: plain sums."""
    model, _ = pair(32, 32, activation_format=fmt)
    a, b = torch.randn(18, 32), torch.randn(7, 32)

    def gradient(*inputs):
        model.zero_grad()
        sum(model(x).square().sum() for x in inputs).backward()
        return grads(model)["0.weight"]

    ga, gb = gradient(a), gradient(b)
    torch.testing.assert_close(gradient(a, b), ga + gb)
    model.zero_grad()
    for x in (a, b):
        model(x).square().sum().backward()
    torch.testing.assert_close(grads(model)["0.weight"], ga + gb)
    model.zero_grad()
    loss = model(a).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close(grads(model)["0.weight"], 2 * ga)
    twice = leaf(18, 32)
    model.zero_grad()
    model(model(twice)).square().sum().backward()
    assert twice.grad.isfinite().all() and grads(model)["0.weight"].any()


def test_shared_group():
    """C09: ALBERT runs one layer group many times: its gradients are near those of the exact model."""
    from transformers import AlbertConfig, AlbertModel

    config = AlbertConfig(
        vocab_size=50,
        embedding_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_hidden_layers=3,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
    exact = AlbertModel(config, add_pooling_layer=False)
    model = twin(exact)
    apply_hot(model, HOTConfig(activation_format="int8"))
    ids, target = torch.randint(50, (4, 20)), torch.randn(4, 20, 64)
    for m in (model, exact):
        (m(input_ids=ids).last_hidden_state * target).sum().backward()
    for name in grads(exact):
        if not name.endswith("key.bias"):  # zero in exact arithmetic
            assert cosine(grads(model)[name], grads(exact)[name]) > 0.99, name


@pytest.mark.parametrize("shape", [(0, 32), (32,), (1, 1, 32), (2, 3, 4, 32), (2, 0, 32), (1, 32)])
@pytest.mark.parametrize("fmt", [*FORMAT_NAMES, "none"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_input_shapes(shape, fmt, rounding):
    """C36: input-shaped gradients, zeros where there are no tokens, the graph connected."""
    model, exact = pair(32, 24, activation_format=fmt, rounding=rounding)
    x = leaf(*shape)
    x_exact = same_leaf(x)
    y, expected = model(x), exact(x_exact)
    assert torch.equal(y, expected) and y.requires_grad
    upstream = torch.randn_like(y)
    y.backward(upstream)
    expected.backward(upstream)
    assert x.grad.shape == x.shape
    weight_grad = model[0].weight.grad
    assert weight_grad.shape == (24, 32)
    assert torch.equal(model[0].bias.grad, exact[0].bias.grad)
    if x.numel() == 0:
        assert not weight_grad.any()
    elif rounding == "nearest" and fmt in NEAR:
        assert relative_error(weight_grad, exact[0].weight.grad) < max(NEAR[fmt], 0.25)


@pytest.mark.parametrize("labels", [2, 3])
def test_ragged_last_batch(labels):
    """C35: 10 samples at batch 4, two and three labels, heads patched too: padded inside."""
    exact = tiny_bert(1, labels)
    model = twin(exact)
    apply_hot(model, HOTConfig(min_features=1, activation_format="int8"))
    ids, target = torch.randint(97, (10, 7)), torch.randint(labels, (10,))
    for start in range(0, 10, 4):
        for m in (model, exact):
            m(input_ids=ids[start : start + 4], labels=target[start : start + 4]).loss.backward()
    # INT8 everywhere has a cosine of 0.996 in each layer (spec.md, section 8); single biases, sums that nearly cancel,
    # scatter.
    assert cosine(whole(grads(model)), whole(grads(exact))) > 0.99


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("granularity", ["per_token", "lqs"])
def test_in_place_after_the_layer(rounding, granularity):
    """C38: add_ and relu_ right after the layer work and give what the out-of-place operations give."""
    for in_place, plain in ((lambda y: y.add_(1), lambda y: y + 1), (lambda y: y.relu_(), lambda y: y.relu())):
        x = leaf(18, 32)
        weight_grads = []
        for step in (in_place, plain):
            torch.manual_seed(0)
            model, _ = pair(32, 24, rounding=rounding, grad_input_granularity=granularity)
            step(model(x)).square().sum().backward()
            weight_grads.append(model[0].weight.grad)
        assert torch.equal(*weight_grads) and weight_grads[0].any()


def test_hooks_on_the_output():
    """Tensor hooks on the output see and may change the gradient that the layer quantizes."""
    model, _ = pair(32, 24)
    x = leaf(18, 32)
    y = model(x)
    y.register_hook(lambda g: g * 0)
    y.sum().backward()
    assert not x.grad.any() and not model[0].weight.grad.any()


def test_per_token_weights():
    """C14: losses weighted per token by 1e-2 to 1e2."""
    model, exact = pair(64, 48)
    x, weights = torch.randn(128, 64), torch.logspace(-2, 2, 128)[torch.randperm(128)][:, None]
    for m in (model, exact):
        (m(x).square() * weights).sum().backward()
    assert_near(model, exact)


@pytest.mark.parametrize("fmt", FORMAT_NAMES)
@pytest.mark.parametrize("memory_format", ["contiguous", "transposed"])
def test_gradient_strides(fmt, memory_format):
    """C56: weight.grad has the weight's strides, which DDP's buckets ask for."""
    model, _ = pair(32, 24, activation_format=fmt)
    if memory_format == "transposed":
        model[0].weight = nn.Parameter(torch.randn(32, 24).t())
    model(torch.randn(18, 32)).sum().backward()
    assert model[0].weight.grad.stride() == model[0].weight.stride()


def test_other_dtypes_and_devices():
    """C17: mixed dtypes, meta tensors and frozen parts still give all gradients; integers a named error."""
    model, _ = pair(32, 24, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        x = leaf(18, 32)
        model(x).sum().backward()
    assert x.grad.dtype == torch.float32 and model[0].weight.grad.dtype == torch.bfloat16
    model, _ = pair(32, 24)
    model.to("meta")
    x = torch.randn(18, 32, device="meta", requires_grad=True)
    model(x).sum().backward()
    assert x.grad.shape == (18, 32) and model[0].weight.grad.device.type == "meta"
    model, _ = pair(32, 24)
    with pytest.raises(TypeError, match=r"^0: HOT layers take floating-point inputs, got torch.int64.*exclude"):
        model(torch.ones(18, 32, dtype=torch.long))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(18, 31))


HOOKS = {
    "pre": lambda m, f: m.register_forward_pre_hook(lambda *a: f()),
    "forward": lambda m, f: m.register_forward_hook(lambda *a: f()),
    "full backward": lambda m, f: m.register_full_backward_hook(lambda *a: f()),
    "full backward pre": lambda m, f: m.register_full_backward_pre_hook(lambda *a: f()),
    "state_dict": lambda m, f: m.register_state_dict_post_hook(lambda *a: f()),
    "load_state_dict": lambda m, f: m.register_load_state_dict_post_hook(lambda *a: f()),
}


def test_hooks_survive():
    """C26: hooks from before patching, after it and after unpatching fire once each in every state."""
    model = mlp(32, 24)
    fired: dict[tuple, int] = {}

    def register(when):
        for kind, hook in HOOKS.items():
            hook(model[0], lambda key=(when, kind): fired.update({key: fired.get(key, 0) + 1}))

    def check(*expected):
        fired.clear()
        model(leaf(18, 32)).sum().backward()
        model.load_state_dict(model.state_dict())
        assert fired == {(when, kind): 1 for when in expected for kind in HOOKS}

    register("before")
    check("before")
    apply_hot(model, HOTConfig(min_features=1))
    check("before")
    register("after")
    check("before", "after")
    remove_hot(model)
    register("unpatched")
    check("before", "after", "unpatched")


@pytest.mark.parametrize("make", [nn.Linear, lambda i, o: Conv1D(o, i), FalconLinear])
def test_arguments_keep_their_names(make):
    """A caller that passes them by keyword must not notice."""
    layer = make(32, 24)
    names = list(inspect.signature(type(layer).forward).parameters)
    expected = layer(**{names[1]: (x := torch.randn(5, 32))})
    apply_hot(layer, HOTConfig(min_features=1))
    assert list(inspect.signature(type(layer).forward).parameters) == names
    assert isinstance(layer, HOTMixin) and torch.equal(layer(**{names[1]: x}), expected)

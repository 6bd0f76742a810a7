"""The low-rank step in two dimensions: its rows, its gradients, and what it keeps."""

import copy

import pytest
import torch
from torch import nn
from torch.library import opcheck

from hot_hf import HOTConfig, apply_hot, ops
from hot_hf.memory import SavedTensors
from hot_hf.ops.grid import _by_sequency, arrangement, fits, kept_rows, low_pass
from tests.models import grads, relative_error, tiny_vit, twin

GRIDS = [(1, 4, 4), (0, 8, 8), (2, 6, 10), (1, 7, 14), (3, 3, 5), (1, 14, 14)]


def hadamard(n: int) -> torch.Tensor:
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < n:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h / n**0.5


def by_sequency(n: int) -> torch.Tensor:
    h = hadamard(n)
    return h[(h[:, 1:] * h[:, :-1] < 0).sum(1).argsort()]


def low_passed(tokens: torch.Tensor, grid: tuple, rank: int) -> torch.Tensor:
    """What is left of (images, prefix + height * width, features), by hand: tile by tile, prefix tokens as they are."""
    prefix, height, width = grid
    down, across = (4 if n % 4 == 0 else 2 if n % 2 == 0 else 1 for n in (height, width))
    a, b = by_sequency(down), by_sequency(across)
    pairs = sorted(((i, j) for i in range(down) for j in range(across)), key=lambda p: (p[0] + p[1], max(p), p))
    keep = torch.zeros(down, across, 1, dtype=torch.float64)
    for i, j in pairs[: max(1, round(rank * down * across / 16))]:
        keep[i, j] = 1
    out = tokens.clone()
    for image in out:
        patches = image[prefix:].view(height, width, -1)
        for top in range(0, height, down):
            for left in range(0, width, across):
                tile = patches[top : top + down, left : left + across]
                c = torch.einsum("ui,vj,ijf->uvf", a, b, tile) * keep
                tile.copy_(torch.einsum("ui,vj,uvf->ijf", a, b, c))
    return out


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("rank", [4, 8, 12, 16])
def test_gradient(grid, rank):
    """g^T x of what the low-pass leaves, to the rounding of INT8: 1 / 254 of each feature's largest entry on both
    sides, about 1% of products of random numbers."""
    tokens = grid[0] + grid[1] * grid[2]
    x, g = torch.randn(3, tokens, 24).double(), torch.randn(3, tokens, 32).double()
    x, g = x + x.mean(1, keepdim=True) + 1, g + 1
    packed, scale = ops.compress_grid(x.flatten(0, 1), 8, rank, grid, True, "nearest", 0)
    value = ops.grad_weight_grid(
        g.flatten(0, 1), packed, scale, 8, 24, rank, grid, True, "nearest", 0, torch.float64
    )  # fmt: skip
    want = low_passed(g, grid, rank).flatten(0, 1).t() @ low_passed(x, grid, rank).flatten(0, 1)
    assert relative_error(value, want) < 0.02
    assert packed.shape == (kept_rows(3 * tokens, grid, rank), 24)


@pytest.mark.parametrize("bits", [8, 4])
def test_scales_are_of_what_is_kept(bits):
    """A smooth image under a checkerboard a thousand times stronger, which is dropped: only the rows kept count."""
    smooth = torch.randn(2, 1, 1, 5).double() + 3
    checkerboard = ((torch.arange(8)[:, None] + torch.arange(8)) % 2 * 2.0 - 1).double()[None, :, :, None]
    x = (smooth + 1000 * checkerboard).reshape(2 * 64, 5)
    g = torch.rand(2 * 64, 3).double() + 1
    packed, scale = ops.compress_grid(x, bits, 8, [0, 8, 8], True, "nearest", 0)
    value = ops.grad_weight_grid(g, packed, scale, bits, 5, 8, [0, 8, 8], True, "nearest", 0, torch.float64)
    want = low_passed(g.view(2, 64, 3), (0, 8, 8), 8).flatten(0, 1).t() @ smooth.expand(2, 8, 8, 5).reshape(-1, 5)
    # what is left of x is a constant in each image, rounded to half a step: 1 / 14 or 1 / 254 of the larger
    assert relative_error(value, want) < (0.02 if bits == 8 else 0.2)


def test_order_of_rows():
    """Of a 4x4 tile, eight rows: all of sum 0 to 2, and of sum 3 those whose larger sequency is smaller."""
    assert all(_by_sequency(n) == ops.reference.sequency_order(n) for n in (1, 2, 4, 16))
    natural = {(i, j): hadamard(4)[i].outer(hadamard(4)[j]).flatten() for i in range(4) for j in range(4)}
    changes = {i: int((hadamard(4)[i, 1:] * hadamard(4)[i, :-1] < 0).sum()) for i in range(4)}
    kept = {(changes[i], changes[j]) for (i, j) in natural if i * 4 + j in low_pass(4, 4, 8)}
    assert kept == {(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0), (1, 2), (2, 1)}


@pytest.mark.parametrize("grid", GRIDS)
def test_every_token_has_one_place(grid):
    tokens = 5 * (grid[0] + grid[1] * grid[2])
    how = arrangement(tokens, grid, 8, torch.device("cpu"))
    x = torch.randn(tokens, 3)
    assert how.length % 16 == 0 and len(set(how.place.tolist())) == tokens
    assert torch.equal(how.gather(x)[how.place], x[how.source]) and how.gather(x).norm() == pytest.approx(
        x.norm().item()
    )
    assert fits(tokens, grid) and not fits(tokens + 1, grid) and not fits(0, grid) and not fits(5, None)


@pytest.mark.parametrize("bits", [8, 4])
def test_operators(bits):
    """Schemas, fakes and the refusal to be differentiated; images that are not whole."""
    x, g = torch.randn(2 * 17, 21), torch.randn(2 * 17, 9)
    compress = (x, bits, 8, [1, 4, 4], True, "nearest", 0)
    opcheck(ops.compress_grid, compress)
    packed, scale = ops.compress_grid(*compress)
    arguments = (bits, 21, 8, [1, 4, 4], True, "nearest", 3, torch.float32)
    opcheck(ops.grad_weight_grid, (g, packed, scale, *arguments))
    with pytest.raises(ValueError, match=r"33 tokens are no whole images of \(prefix, height, width\) = \[1, 4, 4\]"):
        ops.compress_grid(x[:33], *compress[1:])
    x[3, 2] = torch.nan
    packed, scale = ops.compress_grid(*compress)
    value = ops.grad_weight_grid(g, packed, scale, *arguments)
    assert value[:, 2].isnan().all() and value[:, :2].isfinite().all()


@pytest.mark.parametrize("settings", [{}, {"activation_format": "hla_int4"}, {"grad_weight_granularity": "per_tensor"}])
def test_a_vision_transformer(settings):
    """Wherever tokens are whole images it runs, keeps what it says, shares q/k/v, and is nearer to exact than blocks of
    16 tokens that mix rows, images and CLS; other layers (a classifier that reads CLS) are as without it."""
    exact = tiny_vit()
    batch = {"pixel_values": torch.nn.functional.interpolate(torch.randn(6, 1, 3, 3), 8, mode="bilinear")}
    batch["labels"] = torch.randint(10, (6,))
    exact(**batch).loss.backward()
    errors = {}
    for grid in (None, [1, 4, 4]):
        model = twin(exact)
        model.zero_grad()
        config = HOTConfig(**{"activation_format": "hla_int8", "min_features": 1, **settings}, token_grid=grid)
        apply_hot(model, config)
        assert (" 2-D" in model.vit.layers[0].mlp.fc1.hot.plan.label()) == (grid is not None)
        with SavedTensors(model) as saved:
            loss = model(**batch).loss
        if grid:
            fc1 = next(n for n, m in model.named_modules() if n.endswith("0.mlp.fc1"))
            rows = kept_rows(6 * 17, tuple(grid), 8)
            scales = 4 * (64 if settings.get("grad_weight_granularity") is None else 1)
            assert rows == 6 * 8 + 16
            assert saved.bytes_of([fc1]) == rows * 64 // (2 if "activation_format" in settings else 1) + scales
        loss.backward()
        name = "vit.layers.0.mlp.fc1.weight"
        errors[grid is not None] = relative_error(grads(model)[name], grads(exact)[name])
        again = copy.deepcopy(grads(model))
        model.zero_grad()
        model(**batch).loss.backward()
        assert all(torch.equal(value, again[n]) for n, value in grads(model).items())
    assert errors[True] < errors[False]


@pytest.mark.parametrize("value", [[1, 14], [1, 0, 4], [-1, 4, 4], "14x14", [1, 4.0, 4], [True, 4, 4]])
def test_grids_that_are_none(value):
    with pytest.raises(ValueError, match=r"token_grid=.* must be \[prefix tokens, height, width\]"):
        HOTConfig(token_grid=value)


def test_configuration():
    config = HOTConfig(token_grid=(1, 4, 4), overrides={"*.fc2": {"token_grid": None}})
    assert HOTConfig.from_dict(config.to_dict()) == config and config.plan().token_grid == (1, 4, 4)
    assert config.plan(lambda p: True).token_grid is None and hash(config.plan())


def test_compiled():
    """C12: one graph, and eager mode's gradients."""
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16))
    apply_hot(model, HOTConfig(activation_format="hla_int8", token_grid=[1, 4, 4], min_features=1))
    x = torch.randn(4, 17, 32)
    model(x).square().sum().backward()
    want = grads(model)
    model.zero_grad()
    torch.compile(model, backend="aot_eager", fullgraph=True)(x).square().sum().backward()
    assert all(relative_error(grads(model)[n], value) < 0.02 for n, value in want.items())
    torch.compiler.reset()

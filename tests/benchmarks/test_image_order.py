"""The ways that benchmarks/image_order.py compares: which rows they keep, their gradients, and how they are trained."""

import pytest
import torch

pytest.importorskip("sklearn")

import image_order
from image_order import Format, Projection

from hot_hf import HOTConfig, apply_hot
from tests.models import grads, image_batch, relative_error, twin


def test_low_pass_order():
    """Row k of a 4x4 tile has so many sign changes downwards and across, in the order written out by hand."""
    signs = image_order.low_pass(4).view(16, 4, 4).sign()
    down, across = ((signs.narrow(d, 1, 3) != signs.narrow(d, 0, 3)).sum(d)[:, 0].tolist() for d in (1, 2))
    first = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0), (1, 2), (2, 1), (0, 3), (3, 0)]
    pairs = list(zip(down, across, strict=True))
    assert pairs[:10] == first
    assert sorted(pairs) == [(i, j) for i in range(4) for j in range(4)]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("order", image_order.ROWS)
@pytest.mark.parametrize("rank", [1, 4, 12, 16])
def test_gradient(order, rank, bits):
    """g^T x of what the kept rows span, CLS whole. A normal feature's largest entry is 2 to 4 standard deviations and
    rounding is uniform: 4 / 127 / sqrt(12) = 0.9% of it in INT8, on both sides 1.3%; 4 / 7 / sqrt(12) = 17% in INT4."""
    basis = image_order.ROWS[order][:rank]
    x, g = torch.randn(32, 17, 48, dtype=torch.float64), torch.randn(32, 17, 40, dtype=torch.float64)
    low = basis.t() @ basis @ x[:, 1:]
    exact = torch.einsum("bto,bti->oi", g[:, 1:], low) + g[:, 0].t() @ x[:, 0]
    way = Projection(order, rank, bits)
    packed, scale = way.keep(x)
    assert packed.numel() == (32 * rank + 32) * 48 * bits // 8
    value = way.grad_weight(g, packed, scale, 48)
    assert relative_error(value, exact) < (0.013 if bits == 8 else 0.17)


@pytest.mark.parametrize("name, rank", [("ht_int4", 8), ("int8", 8), ("hla_int8", 4), ("hla_int4", 8)])
def test_patched_as_hot(name, rank):
    """The script's Function with a format of the package is HOT's layer, bit for bit."""
    hot = image_order.small_vit(0)
    own = twin(hot)
    linears = apply_hot(hot, HOTConfig(activation_format=name, rank=rank)).patched
    image_order.patch(own, linears, Format(name, rank))
    batch = image_batch()
    losses = [model(**batch).loss for model in (hot, own)]
    for loss in losses:
        loss.backward()
    assert len(linears) == 24 and torch.equal(*losses)
    expected = grads(hot)
    assert [n for n, grad in grads(own).items() if not torch.equal(grad, expected[n])] == []

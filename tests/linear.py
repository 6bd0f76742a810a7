"""A patched MLP beside its exact twin, for the tests of single layers."""

import torch
from torch import nn

from hot_hf import HOTConfig, apply_hot
from hot_hf.ops import FORMATS
from tests.models import grads, mlp, relative_error, twin

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
FORMAT_NAMES = list(FORMATS)
# Relative error of one gradient of Gaussian data: INT8 per token 0.01 (two operands, 3.5 sigma / 127 / sqrt(12)),
# 4 bits of x 0.12; the low-rank formats drop half of what is random and are not compared here.
NEAR = {"ht_int4": 0.2, "int8": 0.03, "none": 1e-5}
# A product of INT8 operands of Gaussian data: 0.007 each (3 sigma / 127 / sqrt(12)), 0.01 both; twice that.
INT8_PRODUCT = 0.02
# Rounded stochastically, half as much again each. The first of two layers has g from one such product and multiplies it
# in another: sqrt(4) * 0.01, and twice that.
INT8_TWO_LAYERS = 0.04
# Under bfloat16 autocast: 2^-9 an entry more on either side of a product, averaged.
INT8_AUTOCAST = NEAR["int8"]


def pair(*sizes: int, dtype=torch.float32, **settings) -> tuple[nn.Module, nn.Module]:
    """A patched MLP and its exact twin."""
    settings.setdefault("min_features", 1)
    exact = mlp(*sizes, dtype=dtype)
    model = twin(exact)
    apply_hot(model, HOTConfig(**settings))
    return model, exact


def leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype).requires_grad_()


def same_leaf(x):
    return x.detach().clone().requires_grad_()


def assert_near(model, exact, limit=NEAR["ht_int4"]):
    expected = grads(exact)
    assert grads(model).keys() == expected.keys()
    for name, value in grads(model).items():
        assert relative_error(value, expected[name]) < limit, name

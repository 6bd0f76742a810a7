"""The CPU backend: int8 products of torch (oneDNN: AVX-512 VNNI, AMX), integers equal to the reference bit for bit."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from . import reference
from .reference import (  # noqa: F401  primitives taken over as they are
    fold_quantize,
    hadamard,
    hadamard_quantize,
    pack_int4,
    project_quantize,
    unpack_int4,
)


def int_product(a: Tensor, b: Tensor) -> Tensor:
    """int8 (M, K) times int8 (K, N) as int32; any strides, empty axes give zeros."""
    if 0 in (a.shape[0], a.shape[1], b.shape[1]):
        return torch.zeros(a.shape[0], b.shape[1], dtype=torch.int32, device=a.device)
    return torch._int_mm(a, b)


scaled_product = partial(reference.scaled_product, int_product=int_product)

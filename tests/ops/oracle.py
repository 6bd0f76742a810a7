"""spec.md, sections 2 to 5, once more in float64, by explicit matrices, and how far quantization may move a product.

Nothing here calls ``hot_hf``. A quantized product of A (M, K) and B (K, N), whose entries lie on grids of steps ``a``
and ``b`` (broadcast to A and B), is off by ``dA @ B + A @ dB + dA @ dB``, so entrywise by at most
``|dA| @ |B| + |A| @ |dB| + |dA| @ |dB|``. Rounding to nearest moves an entry by at most half a step, with a variance of
step ** 2 / 12; the two other roundings by less than a step, with a mean variance of step ** 2 / 6.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

QMAX = {4: 7, 8: 127}


def sylvester(size: int) -> Tensor:
    """Entries (-1) ** popcount(i & j): the Sylvester-Hadamard matrix, by its closed form."""
    return torch.tensor([[(-1.0) ** bin(i & j).count("1") for j in range(size)] for i in range(size)]).double()


def by_sign_changes(matrix: Tensor) -> Tensor:
    """Rows sorted by their number of sign changes, counted one by one."""
    rows = matrix.tolist()
    return torch.tensor(sorted(rows, key=lambda r: sum(a != b for a, b in pairwise(r)))).double()


def block_matrix(size: int, block: int) -> Tensor:
    """(padded size, size): the orthonormal block transform as one matrix, zero-padding included."""
    blocks = -(-size // block)
    return torch.kron(torch.eye(blocks).double(), sylvester(block) / block**0.5)[:, :size]


def projection_matrix(tokens: int, rank: int) -> Tensor:
    """(ceil(tokens / 16) * rank, tokens): the ``rank`` lowest sequencies of each block of 16 tokens."""
    blocks = -(-tokens // 16)
    return torch.kron(torch.eye(blocks).double(), by_sign_changes(sylvester(16))[:rank] / 4)[:, :tokens]


@dataclass
class Product:
    """A float64 product with its quantization grids; ``after`` (K', N) multiplies the result from the right."""

    a: Tensor
    b: Tensor
    a_step: Tensor
    b_step: Tensor
    rounding: str
    after: Tensor | None = None

    @property
    def value(self) -> Tensor:
        product = self.a @ self.b
        return product if self.after is None else product @ self.after

    def bound(self) -> Tensor:
        """The largest possible error of each entry."""
        width = 0.5 if self.rounding == "nearest" else 1.0
        da, db = (width * self.a_step).expand_as(self.a), (width * self.b_step).expand_as(self.b)
        error = da @ self.b.abs() + self.a.abs() @ db + da @ db
        return error if self.after is None else error @ self.after.abs()

    def expected_error(self) -> float:
        """The expected Frobenius norm of the error; an orthonormal ``after`` leaves it as it is."""
        share = 1 / 12 if self.rounding == "nearest" else 1 / 6
        va, vb = (share * self.a_step**2).expand_as(self.a), (share * self.b_step**2).expand_as(self.b)
        return (va @ self.b**2 + self.a**2 @ vb + va @ vb).sum().sqrt().item()


def _step(v: Tensor, bits: int, dim: int | None) -> Tensor:
    largest = v.abs().amax() if dim is None else v.abs().amax(dim, keepdim=True)
    return largest / QMAX[bits]


def grad_input(g: Tensor, weight: Tensor, bits: int, block: int, per_token: bool, rounding: str) -> Product:
    """spec.md, section 2."""
    transform = block_matrix(g.shape[1], block)
    a, b = g.double() @ transform.T, transform @ weight.double()
    return Product(a, b, _step(a, bits, 1 if per_token else None), _step(b, bits, 0 if per_token else None), rounding)


def grad_weight(g: Tensor, x: Tensor, fmt: str, rank: int, block: int, per_feature: bool, rounding: str) -> Product:
    """spec.md, sections 3 and 5; ``value`` is the product without quantization, projected where that is part of it."""
    g, x = g.double(), x.double()
    if fmt.startswith("hla"):
        project = projection_matrix(g.shape[0], rank)
        a, b = (project @ g).T, project @ x
        x_step = _step(b, int(fmt[-1]), 0 if per_feature else None)
        return Product(a, b, _step(a, 8, 1 if per_feature else None), x_step, rounding)
    transform = block_matrix(x.shape[1], block if fmt == "ht_int4" else 1)
    kept = x @ transform.T
    token_step = _step(kept, int(fmt[-1]), 1)
    a = (g * token_step).T
    b = kept / torch.where(token_step == 0, 1.0, token_step)
    return Product(a, b, _step(a, 8, 1 if per_feature else None), torch.ones(()).double(), rounding, transform)

"""Other ways to compute the gradients of a linear layer, each in the words of its paper.

All keep the forward exact, as HOT does, so that the backward alone is compared; where a paper quantizes its forward as
well, its docstring says so. Integers are simulated: rounded values in float32, multiplied as float32. A Function takes
x (..., in_features), weight (out_features, in_features), bias or None, its settings as a dictionary, and the seed of
its random numbers, and keeps what the method would keep.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hot_hf.ops import reference


def uniform_like(t: Tensor, seed: int) -> Tensor:
    """Numbers on [0, 1) of a generator of their own: the global one belongs to the training."""
    return torch.rand(t.shape, generator=torch.Generator(t.device).manual_seed(seed), device=t.device)


def rounded(v: Tensor, bits: int, scale: Tensor, seed: int | None = None) -> Tensor:
    """``v`` on the symmetric integer grid of ``bits`` bits and step ``scale``, as floats; ``seed`` rounds at random."""
    qmax = 2 ** (bits - 1) - 1
    steps = v / scale.clamp_min(reference.SMALLEST_ABSMAX)
    steps = steps.round() if seed is None else (steps + uniform_like(v, seed)).floor()
    return steps.clamp(-qmax, qmax) * scale


def absmax_scale(v: Tensor, bits: int, dim: int | None = None) -> Tensor:
    """The step with which the largest entry (of each slice along ``dim``) is the largest integer."""
    largest = v.abs().amax() if dim is None else v.abs().amax(dim, keepdim=True)
    return largest / (2 ** (bits - 1) - 1)


class _Linear(torch.autograd.Function):
    """The exact forward; ``keep`` gives what is kept of x (a tuple of tensors), ``gradients`` the two products."""

    @classmethod
    def keep(cls, x: Tensor, settings: dict) -> tuple[Tensor, ...]:
        return (x,)

    @classmethod
    def gradients(cls, g: Tensor, weight: Tensor, kept: tuple[Tensor, ...], needs, settings: dict, seed: int):
        raise NotImplementedError

    @classmethod
    def forward(cls, ctx, x, weight, bias, settings, seed):
        ctx.settings, ctx.seed, ctx.shape = settings, seed, x.shape
        kept = cls.keep(x.reshape(-1, x.shape[-1]), settings) if ctx.needs_input_grad[1] else ()
        ctx.save_for_backward(weight, *kept)
        return F.linear(x, weight, bias)

    @classmethod
    def backward(cls, ctx, grad_output):
        weight, *kept = ctx.saved_tensors
        g = grad_output.reshape(-1, grad_output.shape[-1])
        needs = ctx.needs_input_grad[:2]
        grad_x, grad_weight = cls.gradients(g, weight, tuple(kept), needs, ctx.settings, ctx.seed)
        grad_bias = g.sum(0) if ctx.needs_input_grad[2] else None
        return None if grad_x is None else grad_x.reshape(ctx.shape), grad_weight, grad_bias, None, None


class LowPassWalshHadamard(_Linear):
    """LBP-WHT (Yang et al.: Efficient Low-rank Backpropagation for Vision Transformer Adaptation,
    NeurIPS 2023, arXiv 2309.15275), in both gradients.

    Every 16 tokens become their ``rank`` lowest Walsh-Hadamard coefficients: g_x is computed for those and expanded
    again, g_w is the product of two projections. No quantization. The paper's blocks are squares of image patches; ours
    are 16 neighbours in the flattened sequence, so that text has them too. x is kept projected.
    """

    @classmethod
    def keep(cls, x, settings):
        return (reference.project_tokens(x, settings["rank"]),)

    @classmethod
    def gradients(cls, g, weight, kept, needs, settings, seed):
        low = reference.project_tokens(g, settings["rank"])
        grad_x = expand_tokens(low @ weight, settings["rank"], g.shape[0]) if needs[0] else None
        return grad_x, low.t() @ kept[0] if needs[1] else None


def expand_tokens(low: Tensor, rank: int, tokens: int) -> Tensor:
    """The transpose of ``reference.project_tokens``: (blocks * rank, F) to (tokens, F)."""
    block = reference.TOKEN_BLOCK
    basis = reference.hadamard_matrix(block)[reference.sequency_order()[:rank]] * block**-0.5
    wide = torch.einsum("brf,rt->btf", low.view(-1, rank, low.shape[1]), basis.to(low))
    return wide.reshape(-1, low.shape[1])[:tokens]


class PlainInteger(_Linear):
    """All three operands rounded to ``bits`` bits, one scale per tensor, no transform: what HOT's transform and
    per-token scales are measured against. x is kept as integers, two of 4 bits in a byte; g is rounded at random
    (``stochastic``) or to nearest. Nobody's recipe: the 8-bit training of Banner et al. (NeurIPS 2018, arXiv
    1805.11046) goes this way for g_x, but gives g 16 bits for g_w."""

    @classmethod
    def keep(cls, x, settings):
        q, scale = reference.quantize(x, settings["bits"], None)
        return (reference.pack_int4(q) if settings["bits"] == 4 else q), scale

    @classmethod
    def gradients(cls, g, weight, kept, needs, settings, seed):
        bits = settings["bits"]
        g = rounded(g, bits, absmax_scale(g, bits), seed if settings["stochastic"] else None)
        grad_x = g @ rounded(weight, bits, absmax_scale(weight, bits)) if needs[0] else None
        return grad_x, g.t() @ _unpacked(*kept, bits, weight.shape[1]) if needs[1] else None


def _unpacked(q: Tensor, scale: Tensor, bits: int, features: int) -> Tensor:
    q = reference.unpack_int4(q, features) if bits == 4 else q
    return q.to(scale.dtype) * scale


class LogarithmicUnbiased(_Linear):
    """LUQ (Chmiel, Banner, Hoffer, Ben-Yaacov, Soudry: Accurate Neural Training with 4-bit Matrix Multiplications at
    Standard Formats, ICLR 2023, arXiv 2112.10769): g in FP4 without mantissa, 1 sign and 3 exponent bits, unbiased.

    W and x are INT4 with SAWB's scale (Choi et al., arXiv 1807.06964), as in the paper's forward; here the forward
    is exact and they serve the two products of the backward. Without the paper's repeated sampling of g (SMP) and
    its last epochs in high precision.
    """

    @classmethod
    def keep(cls, x, settings):
        q = rounded(x, 4, scale := sawb_scale(x)) / scale.clamp_min(reference.SMALLEST_ABSMAX)
        return reference.pack_int4(q.round().to(torch.int8)), scale

    @classmethod
    def gradients(cls, g, weight, kept, needs, settings, seed):
        g = logarithmic(g, settings["exponent_bits"], seed)
        grad_x = g @ rounded(weight, 4, sawb_scale(weight)) if needs[0] else None
        return grad_x, g.t() @ _unpacked(*kept, 4, weight.shape[1]) if needs[1] else None


def sawb_scale(v: Tensor) -> Tensor:
    """SAWB's clipping value for 4 bits, from the first two moments, as a step; never beyond the largest entry."""
    clip = 12.68 * v.square().mean().sqrt() - 12.80 * v.abs().mean()
    largest = v.abs().amax()
    # The fit is for bell-shaped values; far from those it may leave the range it should lie in.
    return torch.where((clip > 0) & (clip < largest), clip, largest) / 7


def logarithmic(g: Tensor, exponent_bits: int, seed: int) -> Tensor:
    """LUQ of ``g``: powers of two times alpha, the largest of which is max|g|; every entry keeps its expectation.

    Below alpha an entry becomes alpha with probability |g| / alpha, else 0 (stochastic underflow); between two levels
    it goes up with the probability that makes it right on average (logarithmic stochastic rounding).
    """
    largest = g.abs().amax()
    alpha = (largest / 2 ** (2**exponent_bits - 2)).clamp_min(reference.SMALLEST_ABSMAX)
    size = g.abs() / alpha
    low = torch.where(size < 1, torch.zeros_like(size), torch.exp2(torch.frexp(size).exponent.to(size.dtype) - 1))
    high = torch.where(size < 1, torch.ones_like(size), 2 * low)
    up = uniform_like(g, seed) * (high - low) < size - low
    return torch.where(up, high, low) * alpha * g.sign()


class SwitchBack(_Linear):
    """SwitchBack (Wortsman et al.: Stable and low-precision training for large-scale vision-language models,
    NeurIPS 2023, arXiv 2304.13013): g_x in INT8 with a scale per row of g and one for W, g_w in full precision from x
    as it is. The paper's forward is INT8 as well (row-wise x, tensor-wise W); here it is exact."""

    @classmethod
    def gradients(cls, g, weight, kept, needs, settings, seed):
        grad_x = None
        if needs[0]:
            grad_x = rounded(g, 8, absmax_scale(g, 8, 1)) @ rounded(weight, 8, absmax_scale(weight, 8))
        return grad_x, g.t() @ kept[0] if needs[1] else None


FUNCTIONS = {
    "lbp_wht": LowPassWalshHadamard,
    "plain_integer": PlainInteger,
    "luq": LogarithmicUnbiased,
    "switchback": SwitchBack,
}

"""What a block keeps, one tensor and one function at a time: codecs, bits, dropout, ReLU, attention."""

import pytest
import torch
import torch.nn.functional as F

from hot_hf.block.functions import BitDropout, BitReLU, RecomputedAttention
from hot_hf.block.hold import Groups, Layout, bits_of, mask_of
from hot_hf.block.kinds import Codec

INT8 = Codec("int8", 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codec", [INT8, Codec("int8", 16), Codec("ht_int4", 32)])
def test_groups_round_within_half_a_step(dtype, codec):
    """Values, shape, strides and type come back, within half a step of each group's scale."""
    base = torch.randn(3, 5, 7, 64).to(dtype) * 10 ** torch.randn(3, 5, 7, 1).to(dtype)
    for x in (base, base.transpose(1, 2), base.permute(3, 0, 2, 1), base[:, :, 1:5], base[0, 0, :3, :33]):
        held = Groups(x, codec, None)
        back = held.value()
        assert back.shape == x.shape and back.dtype == dtype
        assert x.numel() != 3 * 5 * 7 * 64 or back.stride() == x.stride()
        order = torch.as_strided(x, (x.numel(),), (1,), 0) if x.numel() == base.numel() else x.reshape(-1)
        flat = F.pad(order.double(), (0, -x.numel() % codec.group)).view(-1, codec.group)
        # half a step of absmax/127 or, rotated by an orthonormal H of 16, of 4 * absmax / 7 at most; then the scale's
        # own 2^-9 and the result's rounding to its type
        largest = flat.abs().amax(1, keepdim=True)
        step_size = largest / 127 if codec.format == "int8" else 4 * largest * 4 / 7
        unordered = back.as_strided((x.numel(),), (1,)) if x.numel() == base.numel() else back.reshape(-1)
        off = F.pad(unordered.double(), (0, -x.numel() % codec.group)).view(-1, codec.group) - flat
        slack = largest * (2**-8 + torch.finfo(dtype).eps)
        assert bool((off.abs() <= step_size / 2 + slack).all())


def test_groups_keep_zeros_and_show_non_finite_values():
    """C04: a zero group is exactly zero. An overflow stays visible for a GradScaler."""
    x = torch.randn(4, 64)
    x[0] = 0
    x[1, 3], x[2, 40] = float("inf"), float("nan")
    back = Groups(x, INT8, None).value()
    assert torch.equal(back[0], x[0])
    assert not back[1, :32].isfinite().all() and not back[2, 32:].isfinite().all()
    assert back[1, 32:].isfinite().all() and back[3].isfinite().all()


@pytest.mark.parametrize("shape", [(1,), (7,), (8,), (3, 5, 11)])
def test_bits(shape):
    mask = torch.rand(shape) < 0.5
    bits = bits_of(mask)
    assert bits.numel() == -(-mask.numel() // 8) and torch.equal(mask_of(bits, mask.shape), mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_and_relu_are_those_of_torch(dtype, seed):
    """Same values, same random numbers, same gradients, bit for bit (C30: a recompute repeats itself)."""
    x = torch.randn(64, 65, dtype=dtype, requires_grad=True)
    g = torch.randn(64, 65, dtype=dtype)
    for mine, its in (
        (lambda: BitDropout.apply(x, 0.3), lambda: F.dropout(x, 0.3)),
        (lambda: BitReLU.apply(x), lambda: F.relu(x)),
    ):
        results = []
        for function in (mine, its):
            torch.manual_seed(seed)
            y = function()
            results.append((y.detach(), torch.autograd.grad(y, x, g)[0], torch.rand(1)))
        assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][2], results[1][2])
        torch.testing.assert_close(results[0][1], results[1][1])  # 1/(1-p) in float64 here, in dtype there


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"enable_gqa": True}, {"dropout_p": 0.2}, {"mask": True}])
def test_attention_gradient_is_exact_at_what_was_kept(options, seed):
    """Its backward is that of attention at the unpacked q, k, v: probabilities and values agree with each other."""
    options = dict(options)
    mask = None
    if options.pop("mask", False):
        mask = torch.randn(2, 1, 40, 40).masked_fill(torch.rand(2, 1, 40, 40) < 0.3, float("-inf"))
        mask[..., 0] = 0
        mask.requires_grad_()  # a learned bias
    heads = 2 if options.get("enable_gqa") else 4
    q, k, v = (torch.randn(2, h, 40, 32, requires_grad=True) for h in (4, heads, heads))
    call = {"dropout_p": 0.0, "is_causal": False, **options}
    near = [(lambda t: t[0].unpack(*t[1:]))(Layout.pack(t, INT8)).requires_grad_() for t in (q, k, v)]
    g = torch.randn(2, 4, 40, 32)
    torch.manual_seed(seed)
    expected_out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **call)
    torch.manual_seed(seed)
    at_near = F.scaled_dot_product_attention(*near, attn_mask=mask, **call)
    torch.manual_seed(seed)
    out = RecomputedAttention.apply(q, k, v, mask, INT8, call)
    drawn = torch.rand(1)
    assert torch.equal(out, expected_out)
    torch.manual_seed(seed + 1)  # the recompute uses the random state of its forward and gives this one back
    wanted = [q, k, v] + ([mask] if mask is not None else [])
    found = torch.autograd.grad(out, wanted, g)
    assert torch.equal(torch.rand(1), (torch.manual_seed(seed + 1), torch.rand(1))[1]) and drawn is not None
    expected = torch.autograd.grad(at_near, near + wanted[3:], g)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)

"""A checkpoint inside a compressed block: what its forward runs is what its recompute runs."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from hot_hf import HOTConfig, apply_hot
from hot_hf.block import HOTBlockMixin, boundaries
from hot_hf.block.context import BlockContext
from hot_hf.logits import heads
from hot_hf.logits.deferred import DeferredLogits
from tests.models import grads, tiny_llama, token_batch, whole_error

EXACT_LAYERS = {"grad_input_bits": None, "activation_format": "none"}
NEAR = 0.05  # int8 in groups of 32 of what norms and products outside the checkpoints keep: 0.003 to 0.02 was seen


def attention(x):
    q = x.view(x.shape[0], x.shape[1], 2, -1).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).reshape(x.shape)


INNER = {
    "relu": torch.relu,
    "dropout": lambda x: F.dropout(x, 0.2, True),
    "attention": attention,
    "attention with dropout": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1),
    "silu and product": lambda x: F.silu(x) * x,
    "norm": lambda x: F.layer_norm(x, x.shape[-1:]) * torch.sigmoid(x),
    "pow": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
}


class Block(nn.Module):
    def __init__(self, inner, reentrant, checkpointed=True):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up, self.down, self.out = (nn.Linear(64, 64) for _ in range(3))
        self.inner, self.reentrant, self.checkpointed = inner, reentrant, checkpointed

    def run(self, x):
        return self.down(self.inner(self.up(x)))

    def forward(self, x):
        x = self.norm(x)
        run = partial(checkpoint, self.run, use_reentrant=self.reentrant) if self.checkpointed else self.run
        return x + self.out(F.relu(F.dropout(run(x), 0.1, True)))


def backward(model, x):
    torch.manual_seed(3)
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach(), grads(model)


@pytest.mark.parametrize("mode", ["block", "checkpoint"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inner", INNER)
def test_functions_inside_a_checkpoint(inner, reentrant, mode, monkeypatch):
    monkeypatch.setattr(boundaries, "SMALLEST", 1)
    model = nn.Sequential(*(Block(INNER[inner], reentrant) for _ in range(3))).train()
    exact = copy.deepcopy(model)
    apply_hot(model, HOTConfig(compress=mode, **EXACT_LAYERS))
    x = torch.randn(4, 64, 64, requires_grad=True)
    (loss, found), (exact_loss, wanted) = backward(model, x), backward(exact, x)
    assert torch.equal(loss, exact_loss)
    assert whole_error(found, wanted) < NEAR


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_a_compressed_block(reentrant):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block(torch.relu, reentrant, checkpointed=False) for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    model = Outer().train()
    exact = copy.deepcopy(model)
    apply_hot(model, HOTConfig(compress="block", **EXACT_LAYERS))
    x = torch.randn(4, 64, 64, requires_grad=True)
    (loss, found), (exact_loss, wanted) = backward(model, x), backward(exact, x)
    assert torch.equal(loss, exact_loss)
    assert whole_error(found, wanted) < 1e-6  # checkpointed by somebody else: nothing is packed


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_a_context_of_its_own(reentrant):
    """A checkpoint hands out each tensor once: copies that several nodes hold are not for it."""

    def inner(x):
        with BlockContext():
            h = x * 1.0
            return F.silu(h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).pow(2) * h + torch.relu(h)

    found, wanted = (torch.randn(64, 128, requires_grad=True) for _ in range(2))
    wanted.data.copy_(found)
    weights = torch.randn(64, 128)
    with BlockContext():
        y = checkpoint(inner, found * 1.0, use_reentrant=reentrant) * 2
    (y * weights).sum().backward()
    (inner(wanted) * 2 * weights).sum().backward()
    assert whole_error({"x": found.grad}, {"x": wanted.grad}) < NEAR


def test_a_root_that_is_a_block_makes_no_logits(monkeypatch):
    """Its function mode sees deferred logits pass by, and asks none of them for their memory."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.linear = nn.Embedding(97, 64), nn.Linear(64, 64)
            self.lm_head = nn.Linear(64, 97, bias=False)

        def get_output_embeddings(self):
            return self.lm_head

        def forward(self, ids):
            hidden = F.gelu(self.linear(self.embed(ids))) * 2
            logits = (torch.tanh(self.lm_head(hidden) / 30.0) * 30.0 * torch.tensor(2.0)).float()
            return F.cross_entropy(logits[:, :-1].reshape(-1, 97), ids[:, 1:].reshape(-1))

    monkeypatch.setattr(heads, "SMALLEST_BYTES", 1)
    monkeypatch.setattr(DeferredLogits, "real", lambda self: pytest.fail("the logits were made"))
    model = Model().train()
    exact = copy.deepcopy(model)
    apply_hot(model, HOTConfig(compress="block", **EXACT_LAYERS))
    ids = torch.randint(97, (4, 64))
    for m in (model, exact):
        m(ids).backward()
    assert isinstance(model, HOTBlockMixin) and whole_error(grads(model), grads(exact)) < NEAR


def opt():
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=97, hidden_size=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=64,
        max_position_embeddings=128, dropout=0.1, attention_dropout=0.1,
    )  # fmt: skip
    return OPTForCausalLM(config)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_only_attention_is_checkpointed(family):
    """With dropout in attention; keyword arguments, which these models pass, are not for reentrant checkpoints."""
    model = tiny_llama(attention_dropout=0.1) if family == "llama" else opt()
    model.train()
    for layer in model.model.layers if family == "llama" else model.model.decoder.layers:
        attention = layer.self_attn
        attention.forward = partial(checkpoint, attention.forward, use_reentrant=False)
    exact = copy.deepcopy(model)
    for layer in exact.model.layers if family == "llama" else exact.model.decoder.layers:
        del layer.self_attn.forward
        layer.self_attn.forward = partial(checkpoint, layer.self_attn.forward, use_reentrant=False)
    apply_hot(model, HOTConfig(compress="block", **EXACT_LAYERS))
    batch = token_batch(4, 64)
    losses = []
    for m in (model, exact):
        torch.manual_seed(5)
        loss = m(**batch).loss
        loss.backward()
        losses.append(loss.detach())
    assert torch.equal(*losses)
    assert whole_error(grads(model), grads(exact)) < NEAR


def test_other_hooks_inside_a_block_see_what_they_would():
    """``save_on_cpu`` around a part of a block: what is saved there is its own."""
    seen = []

    def inner(x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.append(t.shape), t)[1], lambda t: t):
            return torch.relu(x)

    model = nn.Sequential(Block(inner, True, checkpointed=False)).train()
    apply_hot(model, HOTConfig(compress="block", **EXACT_LAYERS))
    backward(model, torch.randn(4, 64, 64))
    assert seen == [(4, 64, 64)]  # relu's own result, not bits

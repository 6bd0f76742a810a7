"""Tiny random models for the tests, and the few measures they are compared with."""

import copy
from itertools import pairwise

import torch
from torch import Tensor, nn

from hot_hf import HOTConfig, apply_hot
from hot_hf.layers import HOTMixin


def tiny_llama(layers: int = 2, hidden: int = 64, tie: bool = False, **settings):
    """A Llama of 64 features, 4 heads, 97 tokens: every projection is at least 64 wide."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {
        "vocab_size": 97,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tie,
        "use_cache": False,
    }
    return LlamaForCausalLM(LlamaConfig(**{**config, **settings}))


def tiny_vit(layers: int = 2, labels: int = 10, **settings):
    """A ViT on 8x8 grey images with patches of 2x2: 16 patches and CLS, 64 features."""
    from transformers import ViTConfig, ViTForImageClassification

    config = {
        "image_size": 8,
        "patch_size": 2,
        "num_channels": 1,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_labels": labels,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    return ViTForImageClassification(ViTConfig(**{**config, **settings}))


def tiny_bert(layers: int = 2, labels: int = 2, **settings):
    """A BERT classifier of 64 features and 97 tokens, without dropout."""
    from transformers import BertConfig, BertForSequenceClassification

    config = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "num_labels": labels,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    return BertForSequenceClassification(BertConfig(**{**config, **settings}))


def mlp(*sizes: int, **factory) -> nn.Sequential:
    """Linear layers of ``sizes`` with GELU between them."""
    layers: list[nn.Module] = []
    for inner, outer in pairwise(sizes):
        layers += [nn.Linear(inner, outer, **factory), nn.GELU()]
    return nn.Sequential(*layers[:-1])


def twin(model: nn.Module) -> nn.Module:
    """A deep copy: the exact model that a patched one is compared with."""
    return copy.deepcopy(model)


def token_batch(rows: int = 2, length: int = 24, vocab: int = 97) -> dict[str, Tensor]:
    """Random ``input_ids`` and equal ``labels``, (rows, length)."""
    ids = torch.randint(vocab, (rows, length))
    return {"input_ids": ids, "labels": ids.clone()}


def image_batch(rows: int = 4, labels: int = 10) -> dict[str, Tensor]:
    """Random ``pixel_values`` (rows, 1, 8, 8) and ``labels`` for ``tiny_vit``."""
    return {"pixel_values": torch.randn(rows, 1, 8, 8), "labels": torch.randint(labels, (rows,))}


def grads(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all gradients by parameter name."""
    return {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}


def relative_error(value: Tensor, exact: Tensor) -> float:
    """Frobenius norm of the difference over that of ``exact``, in float64."""
    value, exact = value.detach().double(), exact.detach().double()
    return ((value - exact).norm() / exact.norm()).item()


def whole_error(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Relative error of all gradients of a model as one vector: steadier than that of its smallest matrix."""
    return relative_error(*(torch.cat([gradients[name].flatten() for name in want]) for gradients in (got, want)))


def whole(gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    """All gradients of a model as one vector."""
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


def cosine(value: Tensor, exact: Tensor) -> float:
    """Cosine of the angle between two tensors of one shape, in float64."""
    value, exact = value.detach().double().flatten(), exact.detach().double().flatten()
    return (value @ exact / (value.norm() * exact.norm())).item()


def patched_names(model: nn.Module) -> list[str]:
    return [n for n, m in model.named_modules() if isinstance(m, HOTMixin)]


def equal_states(a: nn.Module, b: nn.Module) -> bool:
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def patched(model: nn.Module, config: HOTConfig | None = None) -> nn.Module:
    apply_hot(model, config)
    return model

"""Fused mixture-of-experts layers: every module that follows the experts interface of transformers 5.

The interface is a contract on the module (``use_experts_implementation``): 3-D weights named ``gate_up_proj`` or
``up_proj`` and ``down_proj``, flags for their layout, and a forward of (hidden_states, top_k_index, top_k_weights).
``hot_experts_forward`` is one more implementation of it. A patched layer calls it directly: registered and chosen
through ``config._experts_implementation`` it would reach every model that shares the config object.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .layers import HOTMixin, hot_linear

_FLAGS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated")


def follows_interface(module: nn.Module) -> bool:
    """Whether ``module`` is an experts layer of the interface, with its weights in place."""
    if not all(hasattr(module, flag) for flag in _FLAGS):
        return False
    weights = (getattr(module, first_projection(module), None), getattr(module, "down_proj", None))
    return all(isinstance(w, Tensor) and len(_shape(w)) == 3 for w in weights)


def _shape(weight: Tensor) -> tuple[int, ...]:
    """The shape of a weight; of the whole one where ZeRO-3 shows a placeholder."""
    return tuple(getattr(weight, "ds_shape", weight.shape))


def first_projection(module: nn.Module) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


def first_weight(module: nn.Module) -> Tensor:
    """(experts, out, in), or (experts, in, out) where the layer is transposed."""
    return getattr(module, first_projection(module))


def features(module: nn.Module) -> tuple[int, int]:
    """(out, in) of one expert's first product."""
    shape = _shape(first_weight(module))
    return (shape[2], shape[1]) if module.is_transposed else (shape[1], shape[2])


def _products(module: nn.Module, x: Tensor, name: str, counts: list[int]) -> Tensor:
    """x (S, in), rows sorted by expert, times each expert's own weight: (S, out)."""
    # unbind and split put the gradient together once; indexing would build a full-size one per expert.
    weights = getattr(module, name).unbind(0)
    biases = getattr(module, f"{name}_bias").unbind(0) if module.has_bias else [None] * len(weights)
    out = []
    for e, rows in enumerate(x.split(counts)):
        if counts[e] == 0:
            continue
        weight = weights[e].t() if module.is_transposed else weights[e]
        y = hot_linear(module.hot, rows, weight, None, f"{name}.{e}")
        out.append(y if biases[e] is None else y + biases[e])
    if not out:
        return x.new_zeros(0, weights[0].shape[1 if module.is_transposed else 0])
    return torch.cat(out)


def hot_experts_forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts interface with HOT's backward: one exact product per expert that was sent tokens.

    Args:
        hidden_states: (tokens, hidden); top_k_index, top_k_weights: (tokens, k), the experts of each token and the
            weights of their outputs.

    Returns:
        (tokens, hidden) in the type of ``hidden_states``.
    """
    tokens, k = top_k_index.shape
    experts, order = torch.sort(top_k_index.reshape(-1), stable=True)
    counts = torch.bincount(experts, minlength=self.num_experts).tolist()
    y = _products(self, hidden_states[order // k], first_projection(self), counts)
    y = self._apply_gate(y) if self.has_gate else self.act_fn(y)
    y = _products(self, y, "down_proj", counts)
    if self.has_post_expert_norm:
        y = self.post_expert_norm(y)
    y = y * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    # Back in token order and summed there, as grouped_mm does: index_add_ is not deterministic on CUDA.
    y = y[torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))]
    return y.view(tokens, k, y.shape[-1]).sum(1).to(hidden_states.dtype)


class HOTExpertsMixin(HOTMixin):
    """A patched experts layer. Without gradients, and under expert parallelism, its own implementation runs."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        self.hot.enter()
        if self.hot.plan.exact or self.hot.paused or not torch.is_grad_enabled() or self._is_expert_parallel:
            return super(HOTMixin, self).forward(hidden_states, top_k_index, top_k_weights)
        return hot_experts_forward(self, hidden_states, top_k_index, top_k_weights)

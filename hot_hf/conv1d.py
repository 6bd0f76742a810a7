"""Layers whose product is nn.Linear's but whose forward is written otherwise; each stays bit-identical to its own."""

from __future__ import annotations

from torch import Tensor

from .layers import HOTMixin, hot_linear


class HOTConv1DMixin(HOTMixin):
    """transformers' Conv1D (GPT-2 and its kin): the weight is (in, out). Its addmm of two matrices, then a view."""

    def forward(self, x: Tensor) -> Tensor:
        self.hot.enter()
        # The transposed weight is a view: the gradient comes back through it in the Parameter's own layout.
        y = hot_linear(self.hot, x.reshape(-1, x.shape[-1]), self.matrix, self.bias)
        return y.view(*x.shape[:-1], self.nf)

    @property
    def matrix(self) -> Tensor:
        return self.weight.t()

    def extra_repr(self) -> str:
        return f"nf={self.nf}, nx={self.nx}, hot={self.hot.plan.label()}"

    def __repr__(self) -> str:
        return f"HOTConv1D({self.extra_repr()})"


class HOTFalconMixin(HOTMixin):
    """FalconLinear: the bias is added after the product has been rounded, which differs in half precision."""

    def forward(self, input: Tensor) -> Tensor:
        self.hot.enter()
        y = hot_linear(self.hot, input, self.weight, None)
        return y if self.bias is None else y + self.bias

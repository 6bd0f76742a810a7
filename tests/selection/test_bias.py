"""What the error of one gradient does not see: bias, which adds up over steps."""

import math

import torch
from torch import nn

from hot_hf import HOTConfig, SelectedPlan, apply_hot, fix_selection
from hot_hf.selection.candidates import GRAD_INPUTS, KEPT_INPUTS, GradInput, KeptInput
from tests.models import relative_error

TOKENS, IN, OUT = 256, 64, 96


def slow_noise_and_a_fast_signal(signal: tuple) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs of 16 equal random tokens, other ones in every micro-batch, which the low-rank step keeps whole; and a small
    signal of alternating sign along the tokens, the same in every micro-batch, which it drops whole."""
    x = torch.randn(TOKENS // 16, IN).repeat_interleave(16, 0)
    g = torch.randn(TOKENS // 16, OUT).repeat_interleave(16, 0)
    sign = torch.ones(TOKENS, 1)
    sign[1::2] = -1
    return x + sign * signal[0], g + sign * signal[1]


def a_signal() -> tuple:
    """Its gradient, TOKENS * outer(g, x), is a tenth of that of the noise, sqrt(16 * TOKENS * IN * OUT)."""
    scale = math.sqrt(0.1 * math.sqrt(16 * TOKENS) / TOKENS)
    return scale * torch.randn(IN), scale * torch.randn(OUT)


def measured(batches: int, data, max_error: float = 0.15, **settings) -> nn.Linear:
    layer = nn.Linear(IN, OUT)
    apply_hot(layer, HOTConfig(selection="budget", max_grad_error=max_error, lqs_batches=batches, **settings))
    for _ in range(batches):
        x, g = data()
        layer(x.requires_grad_()).backward(g)
    return layer


def test_a_bias_under_the_noise_is_seen():
    """The low-rank step's single error, about 0.1, is within a budget of 0.15: all of it is the signal that every
    micro-batch repeats. By the sum of 16 it is 0.4 and the format is refused; one micro-batch would have taken it."""
    signal = a_signal()
    chosen = {}
    for batches in (1, 16):
        layer = measured(batches, lambda: slow_noise_and_a_fast_signal(signal))
        probe = layer.hot.probe
        score = probe.weight_sums.score(KEPT_INPUTS.index(KeptInput("hla_int8", 8)), batches)
        assert 0.05 < score.error < 0.14
        if batches == 16:
            # sum of K: signal K * 0.1 against sqrt(K + (K * 0.1)^2) of noise and signal = 0.37
            assert 0.25 < score.accumulated < 0.5 and score.repeated > 0.8
            unbiased = probe.weight_sums.score(KEPT_INPUTS.index(KeptInput("ht_int4", block_size=16)), batches)
            assert unbiased.accumulated < 0.15 and unbiased.repeated < 0.3
        chosen[batches] = fix_selection(layer)["root" if "root" in layer.hot.name else ""].activation_format
    assert chosen[1].startswith("hla") and not chosen[16].startswith("hla")


def test_the_chosen_plan_follows_the_signal_and_the_biased_one_never_does():
    """Over 64 fresh micro-batches, with the layer's real gradients: the sum of the plan that was chosen stays within
    the budget; that of the low-rank step has lost the signal."""
    signal = a_signal()
    layer = measured(16, lambda: slow_noise_and_a_fast_signal(signal))
    fix_selection(layer)
    biased = nn.Linear(IN, OUT)
    biased.load_state_dict(layer.state_dict())
    apply_hot(biased, HOTConfig(activation_format="hla_int8"))
    sums = {"exact": torch.zeros(OUT, IN).double()}
    for _ in range(64):
        x, g = slow_noise_and_a_fast_signal(signal)
        sums["exact"] += g.t().double() @ x.double()
        for name, m in (("chosen", layer), ("biased", biased)):
            m.weight.grad = None
            m(x).backward(g)
            sums[name] = sums.get(name, 0) + m.weight.grad.double()
    direction = torch.outer(signal[1], signal[0]).double()
    direction /= direction.norm()
    assert relative_error(sums["chosen"], sums["exact"]) < 0.15
    assert relative_error(sums["biased"], sums["exact"]) > 0.4
    along = {name: (value * direction).sum() for name, value in sums.items()}
    assert along["chosen"] > 0.9 * along["exact"] and along["biased"] < 0.1 * along["exact"]


def test_unbiased_errors_average_out():
    """Stochastic rounding on the same micro-batch 16 times: errors of single gradients stay, in the sum they fall as
    1 / sqrt(16); nearest rounding and the low-rank step repeat theirs."""
    x, g = torch.randn(TOKENS, IN), torch.randn(TOKENS, OUT)
    x_candidate, w_candidate = (
        GRAD_INPUTS.index(GradInput(4, "per_token", 16)),
        KEPT_INPUTS.index(KeptInput("ht_int4", 8, 16)),
    )
    for rounding in ("stochastic", "nearest"):
        probe = measured(16, lambda: (x.clone(), g), rounding=rounding).hot.probe
        for sums, index in ((probe.input_sums, x_candidate), (probe.weight_sums, w_candidate)):
            score = sums.score(index, 16)
            if rounding == "stochastic":
                assert score.accumulated < 0.6 * score.error and score.repeated < 0.2
            else:
                assert score.repeated > 0.99
        low_rank = probe.weight_sums.score(KEPT_INPUTS.index(KeptInput("hla_int8", 8)), 16)
        # Half of each block's white noise is gone in every micro-batch, as a matrix and in length: sqrt(1/2) and 1/2.
        assert low_rank.repeated > 0.9 and 0.6 < low_rank.error < 0.8 and -0.6 < low_rank.shrinkage < -0.4


def test_shrinkage_by_scales_that_round_to_zero():
    """One scale for tokens of very different sizes rounds most of g to zero: gradients of x come out too short."""
    size = torch.logspace(0, 2, TOKENS)[:, None]
    probe = measured(2, lambda: (torch.randn(TOKENS, IN) / size, torch.randn(TOKENS, OUT) * size)).hot.probe
    shrinkage = [
        probe.input_sums.score(GRAD_INPUTS.index(GradInput(4, granularity, 16)), 2).shrinkage
        for granularity in ("per_tensor", "per_token")
    ]
    accumulated = [
        probe.input_sums.score(GRAD_INPUTS.index(GradInput(4, granularity, 16)), 2).accumulated
        for granularity in ("per_tensor", "per_token")
    ]
    assert shrinkage[0] < -0.01 > shrinkage[1] - 0.02
    assert accumulated[0] > 2 * accumulated[1]


def test_the_plan_says_so():
    """Both errors of what was chosen are in the plan, and within the budget."""
    signal = a_signal()
    layer = measured(8, lambda: slow_noise_and_a_fast_signal(signal), max_error=0.2)
    fix_selection(layer)
    (chosen,) = SelectedPlan.of(layer).layers.values()
    assert chosen.batches == 8
    assert max(chosen.grad_weight.bound, chosen.grad_input.bound) <= 0.2

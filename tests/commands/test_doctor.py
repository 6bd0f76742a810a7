"""hot-hf doctor: what it prints, and that it notices a wrong operator."""

import pytest
import torch
from torch.library import CustomOpDef

from hot_hf import apply_hot, cli, ops
from hot_hf.commands import doctor
from hot_hf.commands import widths as tune
from hot_hf.ops.cpu import BACKEND as cpu


def test_the_report_names_devices_backends_and_operators(capsys):
    """C60, on whatever machine this runs."""
    assert cli.main(["doctor", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    for word in (
        "torch " + torch.__version__.split("+")[0],
        "triton",
        "cpu:",
        "grad_both ht_int4",
        "all operators agree",
    ):
        assert word in out
    assert out.count(" ok") == len(doctor.self_check(torch.device("cpu")))


@pytest.mark.parametrize(
    ("compiled", "tiles", "fast", "words"),
    [
        (True, True, True, "int8 products on AMX tiles"),
        (True, False, True, "by torch"),
        (True, False, False, "products in float32: this CPU has no fast int8 product"),
        (False, False, True, "plain torch instead"),
    ],
)
def test_what_serves_the_cpu_is_named(monkeypatch, compiled, tiles, fast, words):
    monkeypatch.setattr(cpu, "warm_up", lambda: compiled)
    monkeypatch.setattr(doctor.products, "has_amx", lambda: tiles)
    monkeypatch.setattr(doctor.products, "int_mm_serves", lambda: fast)
    assert words in doctor.kernels_for(torch.device("cpu"))


def test_a_wrong_operator_is_found(monkeypatch, capsys):
    right = cpu.hadamard_quantize

    def wrong(*args, **kwargs):
        q, scale = right(*args, **kwargs)
        q[0, 0] += 1
        return q, scale

    monkeypatch.setattr(cpu, "hadamard_quantize", wrong)
    rows = doctor.self_check(torch.device("cpu"))
    assert {name: verdict for name, _, verdict in rows}["compress int8"].startswith("WRONG")
    assert cli.main(["doctor", "--device", "cpu"]) == 1
    assert "give wrong results" in capsys.readouterr().out


def test_an_operator_that_raises_is_reported(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(cpu, "scaled_product", broken)
    verdicts = [verdict for name, _, verdict in doctor.self_check(torch.device("cpu")) if name.startswith("grad_input")]
    assert verdicts and all("no kernel image" in v for v in verdicts)


def test_a_device_that_does_not_exist_is_a_message(capsys):
    assert cli.main(["doctor", "--device", "nonsense"]) == 2
    assert "nonsense" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ("mps", "cuda"))
def test_every_kind_of_accelerator_is_listed(monkeypatch, kind):
    """C66: devices come from torch.accelerator, not from torch.cuda."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert [str(d) for d in doctor.devices()] == ["cpu", f"{kind}:0", f"{kind}:1"]


def test_a_device_without_kernels_is_named_with_the_reason(monkeypatch, capsys):
    """C63: an old GPU is served by plain torch, and the report says why."""
    device = torch.device("cuda", 1)
    monkeypatch.setattr(doctor, "devices", lambda: [torch.device("cpu"), device])
    monkeypatch.setattr(doctor, "describe", str)
    monkeypatch.setattr(doctor, "self_check", lambda device: [("compress int8", "reference", "ok")])
    reason = "compute capability 7.5: Triton compiles no int8 product below 8.0"
    monkeypatch.setattr(doctor.dispatch, "why_no_kernels", lambda kind, index: (reason, None)[index != 1])
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert f"cuda:1: cuda:1\n  plain torch instead of kernels: {reason}" in out and "no accelerator" not in out
    assert "compress int8" in out and "reference" in out


def test_every_operator_and_format_is_checked():
    """Whatever hot_hf.ops registers with torch is checked: what is not in the report cannot be called right."""
    names = " ".join(name for name, _, _ in doctor.self_check(torch.device("cpu")))
    for op in ("compress", "grad_weight", "grad_both"):
        assert all(f"{op} {fmt}" in names for fmt in ops.FORMATS)
    assert all(f"grad_input INT{bits} {scales}" in names for bits in (4, 8) for scales in ("per_token", "per_tensor"))
    checked = {op for _, op, *_ in doctor._cases(torch.randn(8, 16), torch.randn(8, 16), torch.randn(16, 16))}
    assert checked == set(ops.OPERATORS) == {op for op in vars(ops).values() if isinstance(op, CustomOpDef)}


def timing(width: int, ratio: float) -> tune.Timing:
    return tune.Timing(width, exact=ratio, hot=1.0, ratio=ratio)


def test_the_crossover_is_the_width_from_which_on_hot_was_never_slower():
    assert (
        tune.crossover([timing(64, 0.4), timing(128, 1.1), timing(256, 0.9), timing(512, 1.0), timing(1024, 2)]) == 512
    )
    assert tune.crossover([timing(64, 1.2), timing(128, 1.3)]) == 64
    assert tune.crossover([timing(64, 1.2), timing(128, 0.9)]) is None
    assert "for memory" in tune.report([timing(64, 0.9)], "")


def test_tune_times_patched_layers_and_names_the_setting(monkeypatch, capsys):
    monkeypatch.setattr(tune, "ROUNDS", 2)
    patched = []
    monkeypatch.setattr(
        tune, "apply_hot", lambda layer, config: patched.append(layer.in_features) or real(layer, config)
    )
    real = apply_hot
    assert cli.main(["doctor", "--device", "cpu", "--tune", "--tokens", "32", "--preset", "paper"]) == 0
    out = capsys.readouterr().out
    assert patched == list(tune.WIDTHS)
    assert "32 tokens, float32, paper" in out
    assert "HOTConfig(min_features=" in out or "for memory, not for speed" in out


def test_tune_with_a_wrong_preset_or_number_is_a_message(capsys):
    assert cli.main(["doctor", "--device", "cpu", "--tune", "--preset", "quick"]) == 2
    assert "'quick'" in capsys.readouterr().err
    assert cli.main(["doctor", "--device", "cpu", "--tune", "--tokens", "0"]) == 2
    assert "--tokens" in capsys.readouterr().err

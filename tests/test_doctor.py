"""hot-hf doctor: what it prints, and that it notices a wrong operator."""

import pytest
import torch

from hot_hf import cli, doctor
from hot_hf.ops import cpu


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

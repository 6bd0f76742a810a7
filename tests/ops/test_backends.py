"""Dispatch by device, and installations of Triton that do not work. Devices that are not here are stood in for."""

import logging
import subprocess
import sys
import types

import pytest
import torch

from hot_hf.ops import REFERENCE, dispatch
from hot_hf.ops.cpu import BACKEND


@pytest.fixture(autouse=True)
def no_cache():
    dispatch._backend.cache_clear()
    yield
    dispatch._backend.cache_clear()


def tensor_on(device: str):
    return types.SimpleNamespace(device=torch.device(device))


@pytest.fixture
def devices(monkeypatch):
    """Stands in for CUDA devices: capability by index."""
    pytest.importorskip("triton")
    from hot_hf.ops import triton
    from hot_hf.ops.triton import tuning

    capabilities = {0: (9, 0), 1: (7, 5), 2: (7, 0), 3: (8, 0)}

    def properties(index):
        major, minor = capabilities[index]
        return types.SimpleNamespace(major=major, minor=minor)

    module = types.SimpleNamespace(get_device_properties=properties)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(triton.driver, "_active", types.SimpleNamespace(get_current_target=lambda: "sm_90"))
    tuning.family_of_device.cache_clear()
    yield triton
    tuning.family_of_device.cache_clear()


def test_the_cpu_has_its_own():
    assert dispatch.backend_for(torch.zeros(2)) is BACKEND


def test_meta_computes_nothing_and_says_nothing(caplog):
    assert dispatch.backend_for(tensor_on("meta")) is REFERENCE
    assert not caplog.records


@pytest.mark.parametrize("kind", ("mps", "xpu", "hpu"))
def test_other_devices_take_the_torch_path_with_one_line(kind, caplog, monkeypatch):
    """C66: nothing of torch.cuda is asked about a device of another kind."""
    monkeypatch.setattr(torch, "cuda", None)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert dispatch.backend_for(tensor_on(f"{kind}:0")) is REFERENCE
    assert len(caplog.records) == 1 and kind in caplog.text and "plain torch" in caplog.text


def test_every_device_is_judged_by_itself(devices, caplog):
    """C63: sm_70 and sm_75 take the torch path beside a newer device in the same machine."""
    with caplog.at_level(logging.WARNING):
        assert dispatch.backend_for(tensor_on("cuda:0")) is devices.BACKEND
        assert dispatch.backend_for(tensor_on("cuda:1")) is REFERENCE
        assert dispatch.backend_for(tensor_on("cuda:2")) is REFERENCE
        assert dispatch.backend_for(tensor_on("cuda:3")) is devices.BACKEND
    first, second = (record.getMessage() for record in caplog.records)
    assert "cuda:1" in first and "7.5" in first and "cuda:2" in second and "7.0" in second


def test_a_driver_that_breaks_gives_one_message(devices, caplog, monkeypatch):
    """C60: Triton imports, its driver look-up raises."""

    class Broken:
        def get_current_target(self):
            raise RuntimeError("0 active drivers ([]). There should only be one.")

    monkeypatch.setattr(devices.driver, "_active", Broken())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert dispatch.backend_for(tensor_on("cuda:0")) is REFERENCE
    assert len(caplog.records) == 1 and "0 active drivers" in caplog.text


@pytest.mark.parametrize(
    "source, message, trains",
    (
        ("raise ImportError('no module named triton')", "pip install", True),
        # Torch itself cannot run custom operators beside these two; importing and dispatch must still work.
        ("raise OSError('libtriton.so: undefined symbol')", "undefined symbol", False),
        ("jit = None  # a module of the same name, without the rest", "cannot be imported", False),
    ),
)
def test_without_a_working_triton_everything_imports(tmp_path, source, message, trains):
    """C60: no Triton, or one that breaks while it is imported: hot_hf imports and trains, one message on use."""
    (tmp_path / "triton.py").write_text(source)
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import torch
import hot_hf
from hot_hf.ops import REFERENCE, dispatch
layer = torch.nn.Linear(64, 64)
hot_hf.apply_hot(layer)
if {trains}:
    layer(torch.randn(4, 64)).sum().backward()
    assert layer.weight.grad.abs().sum() > 0
assert dispatch._backend("cuda", 0) is REFERENCE and dispatch._backend("cuda", 0) is REFERENCE
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    lines = [line for line in run.stderr.splitlines() if "hot_hf" in line and "cuda" in line]
    assert len(lines) == 1 and message in lines[0], run.stderr


def test_importing_hot_hf_does_not_import_triton():
    """C60: the import of Triton, seconds long, waits for a tensor that needs it."""
    program = "import hot_hf.ops, sys; assert 'hot_hf.ops.triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_launches_happen_on_the_tensors_device(monkeypatch):
    """C65: the tensor's device is current during the launch, whatever was current before."""
    pytest.importorskip("triton")
    from hot_hf.ops.triton import launch

    current, seen = ["cuda:0"], []

    class OnDevice:
        def __init__(self, device):
            self.device = str(device)

        def __enter__(self):
            current.append(self.device)

        def __exit__(self, *exception):
            current.pop()

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: seen.append((grid, current[-1], options["enable_fp_fusion"]))

    monkeypatch.setattr(torch, "get_device_module", lambda device: types.SimpleNamespace(device=OnDevice))
    launch.launch(Kernel(), (3,), tensor_on("cuda:1"), warps=4)
    assert seen == [((3,), "cuda:1", False)] and current == ["cuda:0"]

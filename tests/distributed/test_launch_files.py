"""scripts/launch: Accelerate reads every file as meant, and what a machine without a GPU can run is run."""

import json
import sys
from importlib.util import find_spec

import pytest
import torch
import yaml

from hot_hf import HOTConfig
from tests.models import tiny_llama

from .launch_files import FOLDER, NAMES, environment, launch_arguments
from .launcher import ROOT, run_command, torchrun

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize("name", NAMES)
def test_accelerate_loads_it(name):
    """With accelerate's loader, which refuses keys it does not know; the README shows the command."""
    from accelerate.commands.config.config_args import load_config_from_file

    path = FOLDER / f"{name}.yaml"
    config = load_config_from_file(str(path))
    written = yaml.safe_load(path.read_text())
    assert str(config.distributed_type.value) == written["distributed_type"]
    assert config.mixed_precision == "bf16" and not config.use_cpu
    assert f"--config_file scripts/launch/{name}.yaml" in (FOLDER / "README.md").read_text()


def test_every_file_is_listed():
    assert {p.stem for p in FOLDER.glob("*.yaml")} == set(NAMES)


def test_processes_of_several_nodes():
    """The README's line for two nodes: eight processes each, rendezvous at the first."""
    from accelerate.utils import launch

    arguments, _ = launch_arguments(
        "fsdp2", "--num_machines", "2", "--num_processes", "16", "--machine_rank", "1",
        "--main_process_ip", "10.0.0.1", "--main_process_port", "29500",
    )  # fmt: skip
    launch.prepare_multi_gpu_env(arguments)
    assert (arguments.nnodes, arguments.nproc_per_node, arguments.node_rank) == ("2", "8", 1)
    assert arguments.rdzv_endpoint == "10.0.0.1:29500"


def test_fsdp2_environment():
    """What reaches the training processes makes an FSDP2 plugin that reshards and reads the blocks off the model."""
    env = environment("fsdp2")
    assert env["ACCELERATE_USE_FSDP"] == "true" and env["FSDP_VERSION"] == "2"
    assert env["FSDP_RESHARD_AFTER_FORWARD"] == "true"
    assert env["FSDP_AUTO_WRAP_POLICY"] == "TRANSFORMER_BASED_WRAP"
    assert env["ACCELERATE_MIXED_PRECISION"] == "bf16"


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed (pip install deepspeed)")
def test_deepspeed_environment():
    env = environment("deepspeed_zero3")
    assert env["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert env["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
    assert env["ACCELERATE_DEEPSPEED_ZERO3_INIT"] == "true"


@pytest.fixture
def arguments(tmp_path):
    """Arguments of scripts/finetune_lm.py for two steps of a tiny Llama on a text of whole words."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0} | {f"w{i}": i for i in range(1, 97)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(tmp_path / "model")
    tiny_llama(layers=1).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("\n".join(" ".join(f"w{i}" for i in range(1, 40)) for _ in range(60)))
    settings = {
        "model": tmp_path / "model",
        "train_file": tmp_path / "text.txt",
        "block_size": 16,
        "output_dir": tmp_path / "out",
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "report_to": "none",
    }
    return [str(a) for name, value in settings.items() for a in (f"--{name}", value)] + ["--do_train", "--use_cpu"]


def losses(folder) -> list[float]:
    log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in log if "loss" in entry]


def test_one_machine_runs(arguments, tmp_path):
    """The README's command with ``--cpu``."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(FOLDER / "one_machine.yaml")]
    script = str(ROOT / "scripts" / "finetune_lm.py")
    code, output = run_command([*command, "--cpu", script, *arguments], tmp_path, timeout=300)
    assert code == 0, output
    assert len(losses(tmp_path / "out")) == 2
    assert HOTConfig.from_pretrained(tmp_path / "out") == HOTConfig()


def test_two_processes_run(arguments, tmp_path):
    """The README's command for two processes without a GPU: one state is written, for twice the rows of a process."""
    script = str(ROOT / "scripts" / "finetune_lm.py")
    code, output = run_command([*torchrun(2, script), *arguments], tmp_path, timeout=300)
    assert code == 0, output
    assert len(losses(tmp_path / "out")) == 2
    assert all(torch.isfinite(torch.tensor(losses(tmp_path / "out"))))
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert state["train_batch_size"] == 2

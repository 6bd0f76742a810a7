"""Every fenced Python block of the README and of docs runs, block after block of a page, as it stands.

What a block loads from a hub stands in folders of the same names: tiny models and a few lines of text.
"""

import re
from pathlib import Path

import pytest
import torch

from tests.models import tiny_llama, tiny_vit, token_batch

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "scripts/launch/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
TEXT = "A page about a library says what it does, what it costs and when to use something else instead. " * 3
LANGUAGE_MODELS = ["HuggingFaceTB/SmolLM2-135M"]
TEXTS = {"Salesforce/wikitext": "wikitext-2-raw-v1"}


def blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text())


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A working directory in which the names of hub repositories are folders."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<|endoftext|>"]
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=97, special_tokens=special))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0], bos_token=special[0])
    for name in LANGUAGE_MODELS:
        tiny_llama().save_pretrained(tmp_path / name)
        fast.save_pretrained(tmp_path / name)
    for name, configuration in TEXTS.items():
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "train.txt").write_text(f"{TEXT}\n" * 40)
        files = "  data_files:\n  - split: train\n    path: train.txt\n"
        (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {configuration}\n{files}---\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.relative_to(ROOT).as_posix())
def test_blocks_run(page, hub):
    """``model`` and ``batch`` are there for pages that speak of yours."""
    torch.manual_seed(0)
    given = {"__name__": "__main__", "model": tiny_llama().train(), "batch": token_batch(), "vision_model": tiny_vit()}
    for number, block in enumerate(blocks(page), 1):
        exec(compile(block, f"{page.name}, block {number}", "exec"), given)


def test_no_code_is_hidden_from_the_run():
    """Code in pages is fenced: what is indented by four spaces is output or shell."""
    hidden = re.compile(r"^    (?:from \w[\w.]* import|import \w+)", re.M)
    assert [page.name for page in PAGES if hidden.search(BLOCK.sub("", page.read_text()))] == []

"""Every test draws its own random inputs; a failure prints the seed, and HOT_TEST_SEED=... repeats it."""

import os
import random

import pytest
import torch
import transformers

import hot_hf
from hot_hf import callback

from .models import tiny_llama


@pytest.fixture(autouse=True)
def seed(request):
    """Seeds torch and random before each test; the value is in the captured output of a failure."""
    value = int(os.environ.get("HOT_TEST_SEED", random.SystemRandom().randrange(2**31)))
    print(f"HOT_TEST_SEED={value}")
    torch.manual_seed(value)
    random.seed(value)
    return value


@pytest.fixture
def installed():
    hot_hf.install()
    yield
    hot_hf.uninstall()


@pytest.fixture(params=["hot_hf", "transformers"])
def auto(request):
    """Both ways to ``hot_config=``: hot_hf's Auto classes, and transformers' own after install()."""
    if request.param == "hot_hf":
        return hot_hf
    request.getfixturevalue("installed")
    return transformers


@pytest.fixture
def llama_dir(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def said(monkeypatch) -> list[str]:
    """What HOTCallback warns of, without the logger's memory of what it has said before."""
    seen: list[str] = []
    monkeypatch.setattr(callback.logger, "warning", seen.append)
    monkeypatch.setattr(callback.logger, "log", lambda level, text: level >= 30 and seen.append(text))
    return seen

"""The demo's two data sets, both found on the machine: scikit-learn's digits and Python's own standard library."""

from __future__ import annotations

import importlib.util
import random
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

ROW_TOKENS = 256
ROWS_PER_FILE = 4  # the first 1,024 tokens of a file: many files and styles, not a few long ones
CHARACTERS_PER_FILE = 8_000  # enough for 1,024 tokens of Python, and what is tokenized stays short
HELD_OUT_EVERY = 8  # one file in eight is never trained on
SKIPPED_FOLDERS = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "turtledemo", "__pycache__"}


def require(module: str, remedy: str) -> str:
    """The folder or file of an optional module, found without importing it.

    Raises:
        ImportError: when it is not installed, with the command that installs it.
    """
    spec = importlib.util.find_spec(module)
    if spec is None:
        raise ImportError(f"hot-hf demo needs the package {module!r}, which is not installed: run `{remedy}`.")
    return spec.submodule_search_locations[0] if spec.submodule_search_locations else spec.origin


def digits() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """scikit-learn's 1,797 digits, a stratified quarter of them held out.

    Returns:
        training and held-out examples: ``pixel_values`` (1, 8, 8) float32 in [-1, 1] and ``labels`` 0 to 9.
    """
    require("sklearn", "pip install scikit-learn")
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1  # 0..16 to [-1, 1]
    parts = train_test_split(range(len(labels)), test_size=0.25, random_state=0, stratify=labels)
    train, held_out = ([{"pixel_values": pixels[i], "labels": int(labels[i])} for i in part] for part in parts)
    return train, held_out


def standard_library() -> list[Path]:
    """The standard library's modules and its packages' modules, in one fixed shuffled order (per Python version).

    Raises:
        FileNotFoundError: where Python came without its sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p.relative_to(root) for pattern in ("*.py", "*/*.py") for p in root.glob(pattern))
    files = [p for p in files if not SKIPPED_FOLDERS & set(p.parts[:-1])]
    if len(files) < HELD_OUT_EVERY:
        raise FileNotFoundError(
            f"hot-hf demo --task text trains on the sources of Python's standard library, but {str(root)!r} holds "
            f"{len(files)} of them; use a Python that ships its sources, or --task vision."
        )
    random.Random(0).shuffle(files)  # a Random of its own: the global generator belongs to the training
    return [root / p for p in files]


def pack(texts: Iterable[str], tokenizer, rows: int, rows_per_text: int = ROWS_PER_FILE) -> list[list[int]]:
    """The first ``rows`` rows of ROW_TOKENS token ids; a row never crosses texts, remainders are dropped."""
    packed: list[list[int]] = []
    for text in texts:
        if len(packed) >= rows:
            break
        ids = tokenizer(text, verbose=False)["input_ids"]
        full = min(len(ids) // ROW_TOKENS, rows_per_text)
        packed += [ids[i * ROW_TOKENS : (i + 1) * ROW_TOKENS] for i in range(full)]
    return packed[:rows]


def read_sources(files: Iterable[Path]) -> Iterator[str]:
    """The beginning of each file."""
    return (path.read_text(encoding="utf-8", errors="replace")[:CHARACTERS_PER_FILE] for path in files)


def python_sources(tokenizer, train_rows: int, held_out_rows: int):
    """Rows of Python source, split by file: (train, held out) as ``datasets.Dataset`` of input_ids and labels."""
    require("datasets", "pip install datasets")
    from datasets import Dataset

    files = standard_library()
    held_out = files[::HELD_OUT_EVERY]
    train = [p for i, p in enumerate(files) if i % HELD_OUT_EVERY]
    parts = (
        pack(read_sources(train), tokenizer, train_rows),
        pack(read_sources(held_out), tokenizer, held_out_rows),
    )
    return tuple(Dataset.from_dict({"input_ids": rows, "labels": rows}) for rows in parts)

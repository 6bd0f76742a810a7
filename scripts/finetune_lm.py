"""Fine-tune a causal language model with HOT.

    # the model and the text that come as Python packages: SmolLM2-135M on the sources of Python's standard library
    python scripts/finetune_lm.py --output_dir out --do_train --do_eval --max_steps 60 --learning_rate 3e-5
    # a model of your own, LoRA, your own text
    python scripts/finetune_lm.py --model HuggingFaceTB/SmolLM2-360M --train_file my.txt --lora_r 8 --output_dir out \\
        --do_train

A second call with the same --output_dir goes on from its last checkpoint. All arguments: --help; they may also stand in
one JSON or YAML file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

from common import HOTArguments, LoraArguments, begin, parse, run
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, default_data_collator


@dataclass
class ModelArguments:
    """The model to start from."""

    model: str = field(
        default="smollm2", metadata={"help": "A folder, a name on the hub, or smollm2: the packaged SmolLM2-135M."}
    )
    tokenizer: str | None = field(default=None, metadata={"help": "Where the tokenizer is, if not with the model."})
    dtype: str = field(default="float32", metadata={"help": "Type of the weights: float32, bfloat16, float16, auto."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with the model."})


@dataclass
class DataArguments:
    """The text, cut into rows of ``block_size`` tokens."""

    dataset: str | None = field(
        default=None,
        metadata={"help": "A dataset on the hub or a folder. Without it and train_file: Python's sources."},
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of the dataset."})
    train_file: str | None = field(default=None, metadata={"help": "A .txt, .json(l), .csv or .parquet file."})
    validation_file: str | None = field(default=None, metadata={"help": "The same for evaluation."})
    text_column: str = field(default="text", metadata={"help": "The column with the text."})
    validation_percent: int = field(
        default=5, metadata={"help": "Held out of the training text where there is no other."}
    )
    block_size: int = field(default=256, metadata={"help": "Tokens per row."})
    max_train_rows: int | None = field(default=None, metadata={"help": "Train on so many rows at most."})
    max_eval_rows: int | None = field(default=64, metadata={"help": "Evaluate on so many rows at most."})


def load_model(arguments: ModelArguments):
    """(model, tokenizer)."""
    if arguments.model == "smollm2":
        from hot_hf.demo.models import smollm2

        return smollm2()
    options = {"trust_remote_code": arguments.trust_remote_code}
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer or arguments.model, **options)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=arguments.dtype, **options)
    model.config.use_cache = False
    return model, tokenizer


def load_rows(arguments: DataArguments, tokenizer, train_rows: int):
    """(train, evaluation) datasets of ``input_ids`` and equal ``labels``; ``train_rows`` suffice of packaged text."""
    limits = {"train": arguments.max_train_rows, "validation": arguments.max_eval_rows}
    if arguments.dataset is None and arguments.train_file is None:
        from hot_hf.demo.data import python_sources

        return python_sources(tokenizer, limits["train"] or train_rows, limits["validation"] or 64)
    from datasets import load_dataset

    if arguments.dataset is not None:
        raw = load_dataset(arguments.dataset, arguments.dataset_config)
    else:
        files = {"train": arguments.train_file, "validation": arguments.validation_file}
        files = {name: path for name, path in files.items() if path is not None}
        kind = arguments.train_file.rsplit(".", 1)[-1]
        raw = load_dataset({"txt": "text", "jsonl": "json"}.get(kind, kind), data_files=files)
    if "validation" not in raw:
        raw = raw["train"].train_test_split(arguments.validation_percent / 100, shuffle=False)
        raw["validation"] = raw.pop("test")

    def cut(batch: dict) -> dict:
        ids = list(chain.from_iterable(tokenizer(batch[arguments.text_column])["input_ids"]))
        size = arguments.block_size
        rows = [ids[i : i + size] for i in range(0, len(ids) - size + 1, size)]
        return {"input_ids": rows, "labels": rows}

    out = []
    for name, limit in limits.items():
        rows = raw[name].map(cut, batched=True, remove_columns=raw[name].column_names, desc=f"tokenizing {name}")
        if not len(rows):
            raise ValueError(
                f"The {name} text is shorter than one row of {arguments.block_size} tokens (--block_size)."
            )
        out.append(rows.select(range(min(limit or len(rows), len(rows)))))
    return tuple(out)


def main() -> None:
    model_args, data_args, hot_args, lora_args, args = parse(
        ModelArguments, DataArguments, HOTArguments, LoraArguments, TrainingArguments
    )
    begin(args)
    model, tokenizer = load_model(model_args)
    steps = args.max_steps if args.max_steps > 0 else 500
    wanted = steps * args.train_batch_size * args.gradient_accumulation_steps
    train, evaluation = load_rows(data_args, tokenizer, wanted)
    trainer = Trainer(
        lora_args.wrap(model, "CAUSAL_LM"),
        args,
        train_dataset=train,
        eval_dataset=evaluation,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        callbacks=hot_args.callbacks(),
    )
    start = "HuggingFaceTB/SmolLM2-135M-Instruct" if model_args.model == "smollm2" else model_args.model
    run(trainer, {"tasks": "text-generation", "dataset": data_args.dataset, "tags": ["hot"], "finetuned_from": start})


if __name__ == "__main__":
    main()

"""Fine-tune an image classifier with HOT.

    # a small ViT from scratch on scikit-learn's digits: nothing to download
    python scripts/finetune_vit.py --output_dir out --do_train --do_eval --max_steps 300 --learning_rate 1e-3
    # a model and images of your own (one folder per class), LoRA
    python scripts/finetune_vit.py --model google/vit-base-patch16-224-in21k --train_dir photos --lora_r 8 \\
        --output_dir out --do_train --do_eval

A second call with the same --output_dir goes on from its last checkpoint. All arguments: --help.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from common import HOTArguments, LoraArguments, begin, parse, run
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification, Trainer, TrainingArguments


@dataclass
class ModelArguments:
    """The model to start from."""

    model: str = field(
        default="small-vit", metadata={"help": "A folder, a name on the hub, or small-vit: for the digits, untrained."}
    )
    dtype: str = field(default="float32", metadata={"help": "Type of the weights: float32, bfloat16, float16, auto."})
    from_scratch: bool = field(default=False, metadata={"help": "Use the model's configuration, not its weights."})


@dataclass
class DataArguments:
    """The images."""

    dataset: str | None = field(
        default=None, metadata={"help": "A dataset on the hub. Without it and train_dir: scikit-learn's digits."}
    )
    train_dir: str | None = field(default=None, metadata={"help": "A folder with one folder of images per class."})
    validation_dir: str | None = field(default=None, metadata={"help": "The same for evaluation."})
    image_column: str = field(default="image", metadata={"help": "The column with the images."})
    label_column: str = field(default="label", metadata={"help": "The column with the classes."})
    validation_percent: int = field(
        default=15, metadata={"help": "Held out of the training images where there are none."}
    )
    flip: bool = field(default=True, metadata={"help": "Mirror training images at random (not the digits)."})
    max_train_images: int | None = field(default=None, metadata={"help": "Train on so many images at most."})
    max_eval_images: int | None = field(default=None, metadata={"help": "Evaluate on so many images at most."})


def load_images(arguments: DataArguments):
    """The train and validation splits, each an image dataset with a ``ClassLabel`` column."""
    from datasets import ClassLabel, load_dataset

    if arguments.dataset is not None:
        raw = load_dataset(arguments.dataset)
    else:
        raw = load_dataset("imagefolder", data_dir=arguments.train_dir)
        if arguments.validation_dir is not None:
            raw["validation"] = load_dataset("imagefolder", data_dir=arguments.validation_dir)["train"]
    if not isinstance(raw["train"].features[arguments.label_column], ClassLabel):
        raw = raw.class_encode_column(arguments.label_column)
    if "validation" not in raw and "test" in raw:
        raw["validation"] = raw["test"]
    if "validation" not in raw:
        parts = raw["train"].train_test_split(
            arguments.validation_percent / 100, stratify_by_column=arguments.label_column, seed=0
        )
        raw["train"], raw["validation"] = parts["train"], parts["test"]
    splits = []
    for name, limit in (("train", arguments.max_train_images), ("validation", arguments.max_eval_images)):
        rows = raw[name].shuffle(seed=0)
        splits.append(rows.select(range(min(limit or len(rows), len(rows)))))
    return splits


def with_pixels(rows, processor, arguments: DataArguments, flip: bool):
    """``rows`` that turn into ``pixel_values`` and ``labels`` as they are read."""

    def transform(batch: dict) -> dict:
        images = [image.convert("RGB") for image in batch[arguments.image_column]]
        pixels = processor(images, return_tensors="pt")["pixel_values"]
        if flip:
            pixels = torch.stack([p.flip(-1) if torch.rand(()) < 0.5 else p for p in pixels])
        return {"pixel_values": pixels, "labels": batch[arguments.label_column]}

    return rows.with_transform(transform)


def load(model_args: ModelArguments, data_args: DataArguments):
    """(model, processor or None, train, evaluation)."""
    if data_args.dataset is None and data_args.train_dir is None:
        if model_args.model != "small-vit":
            raise ValueError("The digits are 8x8 pixels, for --model small-vit: give --train_dir or --dataset as well.")
        from hot_hf.demo.data import digits
        from hot_hf.demo.models import small_vit

        train, evaluation = digits()
        train, evaluation = train[: data_args.max_train_images], evaluation[: data_args.max_eval_images]
        return small_vit(), None, train, evaluation
    if model_args.model == "small-vit":
        raise ValueError("small-vit is for the 8x8 digits: give --model for images of your own.")
    train, evaluation = load_images(data_args)
    names = train.features[data_args.label_column].names
    labels = {"id2label": dict(enumerate(names)), "label2id": {n: i for i, n in enumerate(names)}}
    processor = AutoImageProcessor.from_pretrained(model_args.model)
    config = AutoConfig.from_pretrained(model_args.model, num_labels=len(names), **labels)
    if model_args.from_scratch:
        model = AutoModelForImageClassification.from_config(config)
    else:
        model = AutoModelForImageClassification.from_pretrained(
            model_args.model, config=config, dtype=model_args.dtype, ignore_mismatched_sizes=True
        )
    return (
        model,
        processor,
        with_pixels(train, processor, data_args, data_args.flip),
        with_pixels(evaluation, processor, data_args, False),
    )


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": torch.stack([row["pixel_values"] for row in rows]),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


def accuracy(prediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main() -> None:
    model_args, data_args, hot_args, lora_args, args = parse(
        ModelArguments, DataArguments, HOTArguments, LoraArguments, TrainingArguments
    )
    args.remove_unused_columns = False  # the image column is what the pixels are made of
    begin(args)
    model, processor, train, evaluation = load(model_args, data_args)
    trainer = Trainer(
        lora_args.wrap(model, None, modules_to_save=["classifier"]),
        args,
        train_dataset=train,
        eval_dataset=evaluation,
        processing_class=processor,
        data_collator=collate,
        compute_metrics=accuracy,
        callbacks=hot_args.callbacks(),
    )
    card = {"tasks": "image-classification", "dataset": data_args.dataset, "tags": ["hot"]}
    run(trainer, {**card, "finetuned_from": None if model_args.model == "small-vit" else model_args.model})


if __name__ == "__main__":
    main()

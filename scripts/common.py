"""What finetune_lm.py and finetune_vit.py share: HOT and LoRA arguments, the run itself, what is written at its end."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

from transformers import HfArgumentParser, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from hot_hf import HOTCallback, HOTConfig, config_of


@dataclass
class HOTArguments:
    """How HOT is applied."""

    hot: str = field(
        default="default",
        metadata={"help": "A preset (default, paper, fast, smallest), a folder with hot_config.json, or none."},
    )
    hot_settings: str = field(
        default="{}", metadata={"help": "Fields of HOTConfig to change, as JSON: '{\"rank\": 12}'. --lora_r sets lora."}
    )
    hot_error_every: int = field(
        default=100,
        metadata={"help": "Steps between measurements of gradient errors, where a reporter is on; 0: never."},
    )

    def config(self) -> HOTConfig | None:
        """The HOTConfig, or None for exact training."""
        if self.hot == "none":
            return None
        settings = json.loads(self.hot_settings)
        if Path(self.hot).is_dir():
            return HOTConfig.from_dict({**HOTConfig.from_pretrained(self.hot).to_dict(), **settings})
        return HOTConfig.from_preset(self.hot, **settings)

    def callbacks(self) -> list[HOTCallback]:
        config = self.config()
        return [] if config is None else [HOTCallback(config, error_every=self.hot_error_every)]


@dataclass
class LoraArguments:
    """LoRA through PEFT; without it all weights are trained."""

    lora_r: int = field(default=0, metadata={"help": "Rank of the adapters; 0 trains all weights."})
    lora_alpha: int = field(default=16, metadata={"help": "Scale of the adapters."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout before the adapters."})
    lora_targets: str = field(
        default="all-linear", metadata={"help": "Names of layers to adapt, separated by commas, or all-linear."}
    )

    def wrap(self, model, task_type: str | None, modules_to_save: list[str] | None = None):
        """``model`` under adapters, or as it is where ``lora_r`` is 0."""
        if not self.lora_r:
            return model
        from peft import LoraConfig, get_peft_model

        targets = self.lora_targets if self.lora_targets == "all-linear" else self.lora_targets.split(",")
        return get_peft_model(
            model,
            LoraConfig(
                r=self.lora_r,
                lora_alpha=self.lora_alpha,
                lora_dropout=self.lora_dropout,
                target_modules=targets,
                task_type=task_type,
                modules_to_save=modules_to_save,
            ),
        )


def parse(*kinds):
    """The argument dataclasses from the command line, or from one JSON or YAML file named there."""
    parser = HfArgumentParser(kinds)
    if len(sys.argv) == 2 and sys.argv[1].endswith((".json", ".yaml")):
        read = parser.parse_json_file if sys.argv[1].endswith(".json") else parser.parse_yaml_file
        return read(sys.argv[1])
    return parser.parse_args_into_dataclasses()


def begin(args: TrainingArguments) -> None:
    """Seed before the model is made."""
    set_seed(args.seed)


def run(trainer: Trainer, card: dict) -> None:
    """Train (from the last checkpoint where there is one), evaluate, and save model, metrics, state and model card.

    Args:
        card: arguments of ``Trainer.create_model_card``.
    """
    args = trainer.args
    for callback in [c for c in trainer.callback_handler.callbacks if isinstance(c, HOTCallback)]:
        callback.report_through(trainer)
    if args.do_train:
        checkpoint = args.resume_from_checkpoint
        if checkpoint is None and Path(args.output_dir).is_dir():
            checkpoint = get_last_checkpoint(args.output_dir)
        result = trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model()
        config = config_of(trainer.model)
        if config is not None and trainer.is_world_process_zero():
            config.save_pretrained(args.output_dir)
        trainer.log_metrics("train", result.metrics)
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
    if args.do_eval:
        metrics = trainer.evaluate()
        if "eval_accuracy" not in metrics:
            metrics["perplexity"] = math.exp(min(metrics["eval_loss"], 700.0))
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    if args.do_train and trainer.is_world_process_zero():
        trainer.create_model_card(**{k: v for k, v in card.items() if v is not None})
        _complete_card(Path(args.output_dir) / "README.md", config_of(trainer.model))


def _complete_card(path: Path, config: HOTConfig | None) -> None:
    """Say how the gradients were computed, and that a model without a predecessor was trained from scratch."""
    text = path.read_text().replace("a fine-tuned version of [](https://huggingface.co/)", "trained from scratch")
    if config is not None:
        text += (
            "\n### HOT\n\nThe forward was exact; the gradients of linear layers were computed on Hadamard-transformed "
            f"integers and packed inputs with this configuration:\n\n```json\n{json.dumps(config.to_dict(), indent=2)}"
            "\n```\n"
        )
    path.write_text(text)

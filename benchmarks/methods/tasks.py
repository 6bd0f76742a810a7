"""The tasks: the demo's, and those beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import nn

from hot_hf.demo import tasks as demo
from hot_hf.demo.tasks import Task

from . import data

CACHE = Path("outputs") / "data"  # what pip downloads
BYTES = 128  # a row of the byte model
SENTENCE = 32  # tokens; seven in ten of the sentences are no longer


@dataclass(frozen=True)
class Entry:
    """``make(steps)`` builds the task; ``pre_trained`` tells fine-tuning from training from scratch."""

    what: str
    make: Callable[[int | None], Task]
    steps: int
    lora: bool = False
    pre_trained: bool = True
    criterion: str = "held_out_loss"


def sentences(steps: int | None = None) -> Task:
    """all-MiniLM-L6-v2 with a new classifier: is a sentence of a film review positive? 16 x 32 tokens a step."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed
    from transformers.utils import logging

    folder, batch = data.minilm_folder(), 16
    tokenizer = AutoTokenizer.from_pretrained(folder)
    train, held_out = data.sentences(CACHE, tokenizer, SENTENCE, batch * (steps or TASKS["minilm"].steps), 2000)

    def make_model(seed: int) -> nn.Module:
        set_seed(seed)
        told = logging.get_verbosity()
        logging.set_verbosity_error()  # that the classifier is new need not be said before every run
        try:
            return AutoModelForSequenceClassification.from_pretrained(
                folder, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
            )
        finally:
            logging.set_verbosity(told)

    return Task(
        "minilm",
        f"all-MiniLM-L6-v2 on sentences of film reviews that people rated positive or negative ({len(train)} of "
        f"{SENTENCE} tokens, {len(held_out)} held out)",
        train,
        held_out,
        make_model,
        {
            "max_steps": TASKS["minilm"].steps,
            "per_device_train_batch_size": batch,
            "per_device_eval_batch_size": 100,
            "learning_rate": 1e-4,
            "warmup_steps": 10,
            "lr_scheduler_type": "linear",
        },
        accuracy=True,
    )


def scratch(steps: int | None = None) -> Task:
    """A Llama of 4 layers, 192 wide, from scratch on bytes of Python; 8 x 128 tokens a step."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    batch = 8
    train, held_out = data.source_bytes(BYTES, batch * (steps or TASKS["llama"].steps), 128)

    def make_model(seed: int) -> nn.Module:
        set_seed(seed)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=256,
                hidden_size=192,
                intermediate_size=512,
                num_hidden_layers=4,
                num_attention_heads=6,
                num_key_value_heads=6,
                max_position_embeddings=BYTES,
                bos_token_id=None,
                eos_token_id=None,
                use_cache=False,
            )
        )

    return Task(
        "llama",
        f"a Llama of 4 layers, 192 wide, from scratch on bytes of the standard library's sources ({len(train)} rows of "
        f"{BYTES}, {len(held_out)} held out)",
        train,
        held_out,
        make_model,
        {
            "max_steps": TASKS["llama"].steps,
            "per_device_train_batch_size": batch,
            "per_device_eval_batch_size": 16,
            "learning_rate": 1e-3,
            "weight_decay": 0.05,
            "warmup_steps": 50,
            "lr_scheduler_type": "cosine",
        },
        accuracy=False,
    )


def _prose(lora: bool, steps: int | None = None) -> Task:
    return demo.text(lora, steps, data.documentation, "the Python language reference")


TASKS = {
    "digits": Entry(
        "ViT from scratch, digits", lambda steps: demo.vision(), demo.VISION_STEPS, False, False, "held_out_accuracy"
    ),
    "minilm": Entry("MiniLM, sentences of film reviews", sentences, 150, criterion="held_out_accuracy"),
    "llama": Entry("Llama from scratch, bytes of Python", scratch, 500, pre_trained=False),
    "code-lora": Entry("SmolLM2-135M LoRA, Python sources", partial(demo.text, True), demo.TEXT_STEPS, lora=True),
    "prose-lora": Entry("SmolLM2-135M LoRA, documentation", partial(_prose, True), demo.TEXT_STEPS, lora=True),
    "code": Entry("SmolLM2-135M, Python sources", partial(demo.text, False), demo.TEXT_STEPS),
    "prose": Entry("SmolLM2-135M, documentation", partial(_prose, False), demo.TEXT_STEPS),
}

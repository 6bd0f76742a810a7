"""Tiny random models of many architectures, with a batch each: 64 features or more, so that projections are patched."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers
from torch import Tensor

_TEXT = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
_DECODER = {**_TEXT, "intermediate_size": 128, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1}
_DECODER |= {"eos_token_id": 2, "max_position_embeddings": 64}
_ENCODER = {**_TEXT, "intermediate_size": 128, "max_position_embeddings": 64, "pad_token_id": 0}
_IMAGE = {"image_size": 16, "patch_size": 4, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
_IMAGE |= {"intermediate_size": 128}
_MOE = {**_DECODER, "num_experts_per_tok": 2, "router_jitter_noise": 0.0}
_CLIP = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
_CLIP_TEXT = {**_CLIP, "vocab_size": 97, "max_position_embeddings": 32, "projection_dim": 64, "pad_token_id": 0}
_CLIP_TEXT |= {"eos_token_id": 2, "bos_token_id": 1}
_CLIP_IMAGE = {**_CLIP, "image_size": 16, "patch_size": 4, "projection_dim": 64}
_SPEECH = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
_SPEECH |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}


def _tokens(rows: int = 2, length: int = 16) -> Tensor:
    return torch.randint(3, 97, (rows, length))


def _lm() -> dict:
    ids = _tokens()
    return {"input_ids": ids, "labels": ids.clone()}


def _seq2seq() -> dict:
    return {"input_ids": _tokens(), "labels": _tokens(length=8)}


def _class() -> dict:
    return {"input_ids": _tokens(), "labels": torch.randint(2, (2,))}


def _image(size: int = 16, **more) -> dict:
    return {"pixel_values": torch.randn(2, 3, size, size), **more}


def _image_class() -> dict:
    return _image(labels=torch.randint(2, (2,)))


def _pairs() -> dict:
    return {"input_ids": _tokens(length=8), **_image(), "return_loss": True}


def _detection() -> dict:
    labels = [{"class_labels": torch.tensor([1]), "boxes": torch.tensor([[0.5, 0.5, 0.2, 0.3]])} for _ in range(2)]
    return _image(64, labels=labels)


def _segmentation() -> dict:
    return _image(32, labels=torch.randint(2, (2, 32, 32)))


# name: (model class, configuration, batch). The configuration class is the model class's own.
ARCHITECTURES: dict[str, tuple[str, dict, Callable[[], dict]]] = {
    "Llama": ("LlamaForCausalLM", _DECODER, _lm),
    "Qwen2": ("Qwen2ForCausalLM", _DECODER, _lm),
    "Qwen3": ("Qwen3ForCausalLM", {**_DECODER, "head_dim": 32}, _lm),
    "Gemma": ("GemmaForCausalLM", {**_DECODER, "head_dim": 32}, _lm),
    "Gemma 2": ("Gemma2ForCausalLM", {**_DECODER, "head_dim": 32}, _lm),
    "Mistral": ("MistralForCausalLM", _DECODER, _lm),
    "Phi": ("PhiForCausalLM", _DECODER, _lm),
    "Phi-3": ("Phi3ForCausalLM", _DECODER, _lm),
    "GPT-2": ("GPT2LMHeadModel", {"vocab_size": 97, "n_embd": 64, "n_layer": 1, "n_head": 2, "n_positions": 64}, _lm),
    "GPT-NeoX": ("GPTNeoXForCausalLM", {**_ENCODER}, _lm),
    "Falcon": ("FalconForCausalLM", _TEXT, _lm),
    "OPT": ("OPTForCausalLM", {**_ENCODER, "ffn_dim": 128, "word_embed_proj_dim": 64}, _lm),
    "Bloom": ("BloomForCausalLM", {"vocab_size": 97, "hidden_size": 64, "n_layer": 1, "n_head": 2}, _lm),
    "Mamba": ("MambaForCausalLM", {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 1}, _lm),
    "Mixtral": ("MixtralForCausalLM", {**_MOE, "num_local_experts": 4}, _lm),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", {**_MOE, "num_experts": 4, "moe_intermediate_size": 64, "head_dim": 32}, _lm),
    "GPT-OSS": ("GptOssForCausalLM", {**_MOE, "num_local_experts": 4, "head_dim": 32}, _lm),
    "T5": (
        "T5ForConditionalGeneration",
        {
            "vocab_size": 97,
            "d_model": 64,
            "d_kv": 32,
            "d_ff": 128,
            "num_layers": 1,
            "num_heads": 2,
            "decoder_start_token_id": 0,
        },
        _seq2seq,
    ),
    "BART": ("BartForConditionalGeneration", {"vocab_size": 97, **_SPEECH, "max_position_embeddings": 64}, _seq2seq),
    "BERT": ("BertForSequenceClassification", _ENCODER, _class),
    "RoBERTa": ("RobertaForSequenceClassification", _ENCODER, _class),
    "DeBERTa v2": ("DebertaV2ForSequenceClassification", _ENCODER, _class),
    "ALBERT": ("AlbertForSequenceClassification", {**_ENCODER, "embedding_size": 64, "num_hidden_layers": 2}, _class),
    "DistilBERT": (
        "DistilBertForSequenceClassification",
        {"vocab_size": 97, "dim": 64, "hidden_dim": 128, "n_layers": 1, "n_heads": 2},
        _class,
    ),
    "ModernBERT": ("ModernBertForSequenceClassification", {**_ENCODER, "cls_token_id": 1, "sep_token_id": 2}, _class),
    "ViT": ("ViTForImageClassification", _IMAGE, _image_class),
    "DeiT": ("DeiTForImageClassification", _IMAGE, _image_class),
    "BEiT": ("BeitForImageClassification", _IMAGE, _image_class),
    "DINOv2": ("Dinov2ForImageClassification", _IMAGE, _image_class),
    "Swin": (
        "SwinForImageClassification",
        {"image_size": 16, "patch_size": 2, "embed_dim": 64, "depths": [1], "num_heads": [2], "window_size": 4},
        _image_class,
    ),
    "SegFormer": (
        "SegformerForSemanticSegmentation",
        {
            "num_encoder_blocks": 2,
            "hidden_sizes": [64, 64],
            "depths": [1, 1],
            "num_attention_heads": [1, 2],
            "sr_ratios": [2, 1],
            "strides": [4, 2],
            "patch_sizes": [7, 3],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 64,
        },
        _segmentation,
    ),
    "DETR": (
        "DetrForObjectDetection",
        {
            **_SPEECH,
            "num_queries": 5,
            "use_timm_backbone": False,
            "use_pretrained_backbone": False,
            "backbone": None,
            "backbone_config": {
                "model_type": "resnet",
                "embedding_size": 16,
                "hidden_sizes": [16, 16],
                "depths": [1, 1],
                "layer_type": "basic",
                "out_features": ["stage2"],
            },
        },
        _detection,
    ),
    "CLIP": (
        "CLIPModel",
        {"text_config": _CLIP_TEXT, "vision_config": _CLIP_IMAGE, "projection_dim": 64},
        _pairs,
    ),
    "SigLIP": ("SiglipModel", {"text_config": _CLIP_TEXT, "vision_config": _CLIP_IMAGE}, _pairs),
    "Whisper": (
        "WhisperForConditionalGeneration",
        {
            "vocab_size": 97,
            **_SPEECH,
            "num_mel_bins": 16,
            "max_source_positions": 16,
            "max_target_positions": 32,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
            "apply_spec_augment": False,
        },
        lambda: {"input_features": torch.randn(2, 16, 32), "labels": _tokens(length=8)},
    ),
    "Wav2Vec2": (
        "Wav2Vec2ForCTC",
        {
            **_ENCODER,
            "conv_dim": [32, 64],
            "conv_stride": [4, 4],
            "conv_kernel": [8, 4],
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
            "apply_spec_augment": False,
            "layerdrop": 0.0,
            "ctc_loss_reduction": "mean",
        },
        lambda: {"input_values": torch.randn(2, 800), "labels": _tokens(length=8)},
    ),
    "WavLM": (
        "WavLMForSequenceClassification",
        {
            **_ENCODER,
            "conv_dim": [32, 64],
            "conv_stride": [4, 4],
            "conv_kernel": [8, 4],
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
            "apply_spec_augment": False,
            "layerdrop": 0.0,
        },
        lambda: {"input_values": torch.randn(2, 800), "labels": torch.randint(2, (2,))},
    ),
}


def build(name: str):
    """A fresh random model of the architecture."""
    class_name, settings, _ = ARCHITECTURES[name]
    cls = getattr(transformers, class_name)
    return cls(cls.config_class(**settings))


def batch(name: str) -> dict:
    """A random batch for it, with what its loss needs."""
    return ARCHITECTURES[name][2]()

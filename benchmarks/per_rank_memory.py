"""Memory per rank on one GPU, under DDP and under FSDP2 or ZeRO-3: ``hot-hf estimate`` divided over the ranks.

    python benchmarks/per_rank_memory.py                       # the table of docs/distributed.md: Llama-3.2-1B's shape
    python benchmarks/per_rank_memory.py --model config.json --batch 2 --length 4096 --ranks 8 64

Activations are the same on every rank of every engine: each runs the whole model on its own rows. What FSDP2 and ZeRO-3
split are parameters, gradients and optimizer states; of the gathered parameters two blocks are counted, the one that
runs and the one that is prefetched, and one whole gradient. Computed, not measured.
"""

from __future__ import annotations

import argparse

from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from hot_hf.memory import estimate

LLAMA_1B = {
    "vocab_size": 128_256,
    "hidden_size": 2_048,
    "intermediate_size": 8_192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "architectures": ["LlamaForCausalLM"],
}


def largest_block(config) -> int:
    """Parameters of the largest block that engines gather at once."""
    import torch

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    blocks = [m for m in model.modules() if type(m).__name__ in (model._no_split_modules or [])]
    return max(sum(p.numel() for p in b.parameters()) for b in blocks)


def rows(config, batch: int, length: int, ranks: list[int], methods: list[str], dtype: str):
    """(engine, ranks, method, states, gathered, activations, total) in GiB."""
    gathered = 3 * largest_block(config) * {"float32": 4}.get(dtype, 2)
    for method in methods:
        found = estimate(config, batch, length, method, dtype=dtype, device="cuda")
        states = found.parameters + found.gradients + found.optimizer
        activations = found.activations + found.recompute
        for engine, count in [("one GPU or DDP", 1), *(("FSDP2, ZeRO-3", r) for r in ranks)]:
            parts = (states / count, gathered if count > 1 else 0, activations)
            yield (engine, count if count > 1 else "any", method, *(b / 2**30 for b in (*parts, sum(parts))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, config.json or hub name (default: the shape of Llama-3.2-1B)")
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--methods", nargs="+", default=["exact", "hot", "checkpointing", "hot+block"])
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    config = AutoConfig.from_pretrained(arguments.model) if arguments.model else LlamaConfig(**LLAMA_1B)
    print("| engine | ranks | method | parameters, gradients, AdamW | gathered blocks | activations | GiB per rank |")
    print("|---|---|---|---|---|---|---|")
    settings = (arguments.batch, arguments.length, arguments.ranks, arguments.methods, arguments.dtype)
    for engine, count, method, *gib in rows(config, *settings):
        print(f"| {engine} | {count} | {method} | " + " | ".join(f"{value:.2f}" for value in gib) + " |")


if __name__ == "__main__":
    main()

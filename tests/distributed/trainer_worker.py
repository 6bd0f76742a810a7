"""The Trainer and a plain Accelerate loop on two ranks, as ``torchrun`` starts them on a machine without a GPU."""

import copy
import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from hot_hf import HOTCallback, HOTConfig, apply_hot
from tests.models import tiny_llama

from .worker import Scenarios, assert_close, assert_same_on_all_ranks, weights

scenario = Scenarios()

EXACT = HOTConfig(grad_input_bits=None, activation_format="none")


def rows(seed: int, count: int = 32, length: int = 24) -> list[dict]:
    """The same training rows in every process."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(97, (count, length), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def train(config, seed: int, folder: str, rows_per_step: int = 8, **settings):
    """Three steps of the Trainer with plain SGD; (final weights, callback)."""
    from transformers import Trainer, TrainingArguments

    world = dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(seed)
    model, callback = tiny_llama(layers=1), HOTCallback(config)
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=3,
        per_device_train_batch_size=rows_per_step // world // 2,
        gradient_accumulation_steps=2,
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        seed=seed % 1000,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **settings,
    )
    Trainer(model, arguments, train_dataset=rows(seed), callbacks=[callback]).train()
    return weights(model), callback


def trained_here(config, seed: int, **settings):
    folder = os.path.join(os.environ["HOT_TEST_FOLDER"], "trainer")
    found, callback = train(config, seed, folder, **settings)
    assert_same_on_all_ranks(found)
    return found, callback


@scenario
def trainer_exact(seed):
    return trained_here(EXACT, seed)[0]


@scenario
def trainer_hot(seed):
    return trained_here(HOTConfig(), seed, gradient_checkpointing=True)[0]


@scenario
def trainer_selects(seed):
    """C58 through the callback: lqs ends on all ranks together and with the same choices."""
    found, callback = trained_here(HOTConfig.paper(lqs_batches=2), seed)
    assert all(torch.isfinite(t).all() for t in found.values())
    return callback.selection


@scenario
def accelerate_loop(seed):
    """A loop of one's own: prepare, accumulate (no_sync inside), clip; equal to one process with the ranks' average."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert accelerator.num_processes == dist.get_world_size()
    torch.manual_seed(seed)
    model = tiny_llama(layers=1)
    apply_hot(model, HOTConfig())
    single = copy.deepcopy(model)
    loader = DataLoader(rows(seed, count=16), batch_size=2)
    every = list(DataLoader(rows(seed, count=16), batch_size=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(wrapped):
            accelerator.backward(wrapped(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    plain = torch.optim.SGD(single.parameters(), lr=0.1)
    world = accelerator.num_processes
    for start in range(0, len(every), 2 * world):  # the batches of all ranks in one step, one after the other
        for batch in every[start : start + 2 * world]:
            (single(**batch).loss / (2 * world)).backward()
        torch.nn.utils.clip_grad_norm_(single.parameters(), 1.0)
        plain.step()
        plain.zero_grad()
    assert_same_on_all_ranks(weights(model))
    return assert_close(weights(model), weights(single), tolerance=1e-3)


if __name__ == "__main__":
    scenario.main()

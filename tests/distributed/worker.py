"""What every worker module shares: a list of scenarios, run in order on each rank, and exact comparisons."""

import faulthandler
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Sums of gradients are added in another order than in one process: float32 products and an all-reduce of two ranks
# differ by a few units in the last place (1.2e-7) of the largest entry of a tensor.
FLOAT_TOLERANCE = 1e-5


class Scenarios(dict):
    """Functions by name; each takes a seed and returns what the test wants to know (or None)."""

    def __call__(self, function: Callable) -> Callable:
        self[function.__name__] = function
        return function

    def main(self) -> None:
        """Run all on this rank and save results and tracebacks; the first failure ends the run."""
        folder, seed = Path(os.environ["HOT_TEST_FOLDER"]), int(os.environ["HOT_TEST_SEED"])
        (folder / f"{os.getpid()}.pid").write_text(str(os.getpgid(0)))
        torch.set_num_threads(1)
        faulthandler.dump_traceback_later(280, exit=True)  # a hang says where
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        rank = dist.get_rank()
        results, errors = {}, {}
        for name, function in self.items():
            torch.manual_seed(seed)
            try:
                results[name] = function(seed)
            except BaseException:
                errors[name] = traceback.format_exc()
                break
        torch.save({"results": results, "errors": errors}, folder / f"rank{rank}.pt")
        if errors:
            sys.stderr.write("".join(errors.values()))
            os._exit(1)  # the other rank may be waiting for this one: no clean-up together
        faulthandler.cancel_dump_traceback_later()
        dist.barrier()
        dist.destroy_process_group()


def whole(tensor: Tensor) -> Tensor:
    """A plain copy of a tensor that may be sharded over the ranks."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients by parameter name, without the prefixes of wrappers."""
    return {plain(n): whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Whole parameters by name, without the prefixes of wrappers."""
    return {plain(n): whole(p) for n, p in model.named_parameters()}


def plain(name: str) -> str:
    return name.replace("module.", "").replace("_checkpoint_wrapped_", "").replace("_orig_mod.", "")


def mean_over_ranks(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The average of each tensor over all ranks."""
    mean = {}
    for name, tensor in tensors.items():
        mean[name] = tensor.clone()
        dist.all_reduce(mean[name])
        mean[name] /= dist.get_world_size()
    return mean


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference over all tensors, each relative to its largest expected entry; same names required."""
    assert found.keys() == expected.keys(), set(found) ^ set(expected)
    errors = [0.0]
    for name, value in expected.items():
        scale = value.double().abs().max().item()
        difference = (found[name].double() - value.double()).abs().max().item()
        assert scale > 0 or difference == 0, f"{name}: expected zeros, off by {difference}"
        errors.append(difference / scale if scale else 0.0)
    return max(errors)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = FLOAT_TOLERANCE) -> float:
    error = worst(found, expected)
    assert error <= tolerance, f"off by {error:.2e} of the largest entry, {tolerance:.0e} allowed"
    return error


def assert_same_on_all_ranks(tensors: dict[str, Tensor]) -> None:
    """Bit for bit."""
    for name, tensor in tensors.items():
        copies = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, tensor.contiguous())
        assert all(torch.equal(copies[0], c) for c in copies), f"{name} differs between ranks"

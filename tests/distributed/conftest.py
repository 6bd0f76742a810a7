"""Two processes for a whole test module: each worker module is launched once, its scenarios are tests of their own."""

import os
import random

import pytest
import torch.distributed as dist

from .launcher import launch


@pytest.fixture(scope="module")
def outcome(request, tmp_path_factory):
    """The outcome of the worker module that ``WORKER`` of the test module names."""
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch without gloo")
    seed = int(os.environ.get("HOT_TEST_SEED", random.SystemRandom().randrange(2**31)))
    print(f"HOT_TEST_SEED={seed}")
    return launch(request.module.WORKER, tmp_path_factory.mktemp(request.module.WORKER), seed)

"""Every test draws its own random inputs; a failure prints the seed, and HOT_TEST_SEED=... repeats it."""

import os
import random

import pytest
import torch


@pytest.fixture(autouse=True)
def seed(request):
    """Seeds torch and random before each test; the value is in the captured output of a failure."""
    value = int(os.environ.get("HOT_TEST_SEED", random.SystemRandom().randrange(2**31)))
    print(f"HOT_TEST_SEED={value}")
    torch.manual_seed(value)
    random.seed(value)
    return value

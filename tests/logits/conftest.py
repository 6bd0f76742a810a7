"""Heads that defer at any size, in chunks of a few tokens, and a count of the logits that were made all the same."""

import pytest

from hot_hf.logits import cross_entropy, heads
from hot_hf.logits.deferred import DeferredLogits


@pytest.fixture
def deferring(monkeypatch):
    """The number of times that whole logits were made, as a list that grows."""
    monkeypatch.setattr(heads, "SMALLEST_BYTES", 0)
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 4 * 97 * 5)
    made, real = [], DeferredLogits.real

    def counted(self):
        if self.made is None and self.origin is None:
            made.append(self.shape)
        return real(self)

    monkeypatch.setattr(DeferredLogits, "real", counted)
    return made

"""Memory that one thread's backward uses again and again: first touches cost more than the work done in them.

A page fault takes 0.5 us, in a busy virtual machine 2 to 3: 12 MB of fresh integers cost 1.5 to 9 ms, quantizing into
memory that is in place 2.4. glibc gives large blocks back to the system when they are freed.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

# What one thread keeps. The default preset's operands of one 4096 x 4096 layer with 2,048 tokens are 42 MB.
POOL_BYTES = 64 << 20
SMALLEST = 256 << 10  # below this the allocator's own free lists serve

_use_count = getattr(torch._C, "_storage_Use_Count", None)


def _uses(buffer: Tensor) -> int:
    return _use_count(buffer.untyped_storage()._cdata)


class _Pool(threading.local):
    def __init__(self) -> None:
        self.buffers: list[Tensor] = []  # the longest unused first

    def take(self, size: int) -> Tensor:
        for i, buffer in enumerate(self.buffers):
            if size <= buffer.numel() <= 2 * size and _uses(buffer) == _FREE:
                self.buffers.append(self.buffers.pop(i))
                return buffer
        # Made once for good: an inference tensor could not be written outside inference mode.
        with torch.inference_mode(False):
            buffer = torch.empty(size, dtype=torch.uint8)
        self.buffers.append(buffer)
        while sum(b.numel() for b in self.buffers) > POOL_BYTES:
            self.buffers.pop(0)
        return buffer


_pool = _Pool()
_FREE = 0 if _use_count is None else _uses(torch.empty(1, dtype=torch.uint8))


def temporary(rows: int, columns: int, dtype: torch.dtype = torch.int8) -> Tensor:
    """An uninitialized matrix for a short life: its memory is taken again once nothing refers to it any more."""
    size = rows * columns * dtype.itemsize
    if _use_count is None or not SMALLEST <= size <= POOL_BYTES // 2:
        return torch.empty(rows, columns, dtype=dtype)
    return _pool.take(size)[:size].view(dtype).view(rows, columns)

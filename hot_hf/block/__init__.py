"""What a whole block keeps for its backward: packed in int8 where its consumers allow, or its packed input alone."""

from .find import find_blocks
from .module import (
    HOTBlockMixin,
    compress_blocks,
    compressed_blocks,
    notes_on_blocks,
    restore_blocks,
    set_mode,
    unmatched_blocks,
)

__all__ = [
    "HOTBlockMixin",
    "compress_blocks",
    "compressed_blocks",
    "find_blocks",
    "notes_on_blocks",
    "restore_blocks",
    "set_mode",
    "unmatched_blocks",
]

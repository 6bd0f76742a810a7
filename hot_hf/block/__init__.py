"""Block compression: what a whole transformer block keeps for its backward, in int8 where its consumers allow."""

from .find import find_blocks
from .module import HOTBlockMixin, compress_blocks, restore_blocks

__all__ = ["HOTBlockMixin", "compress_blocks", "find_blocks", "restore_blocks"]

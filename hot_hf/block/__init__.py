"""Block compression: what a whole transformer block keeps for its backward, in int8 where its consumers allow."""

from .find import find_blocks
from .module import HOTBlockMixin, changed_block, compress_blocks, restore_blocks

__all__ = ["HOTBlockMixin", "changed_block", "compress_blocks", "find_blocks", "restore_blocks"]

"""Block compression: what a whole transformer block keeps for its backward, in int8 where its consumers allow."""

from .find import find_blocks

__all__ = ["find_blocks"]

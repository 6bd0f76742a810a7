"""The loss without the logits: an output head whose logits are made in chunks of tokens, unless somebody looks."""

from .heads import HOTHeadMixin, defer_heads, notes_on_heads, restore_heads

__all__ = ["HOTHeadMixin", "defer_heads", "notes_on_heads", "restore_heads"]

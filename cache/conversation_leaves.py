"""Where the conversations of a model without state end in the tree, so that closing one frees its pages first.

Such a model has no snapshots and needs no branches: its pages are ranked by their last use alone, until somebody says
that a conversation will not return.
"""

from __future__ import annotations

from collections import OrderedDict

from turnkeep.cache.page_node import PageNode
from turnkeep.cache.reclaim import Reclaimer

MAX_LEAVES = 4  # lines of one conversation remembered side by side


class ConversationLeaves:
    """The last pages of the last `max_conversations` conversations that finished a turn."""

    def __init__(self, reclaimer: Reclaimer, max_conversations: int = 4096) -> None:
        self._reclaimer = reclaimer
        self._max_conversations = max_conversations
        self._leaves: OrderedDict[tuple[str, str], list[PageNode]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._leaves)

    def finished(self, conversation: tuple[str, str], leaf: PageNode) -> None:
        """A turn ended in this page."""
        others = [other for other in self._leaves.pop(conversation, []) if other is not leaf and other.is_attached]
        self._leaves[conversation] = [*others[1 - MAX_LEAVES :], leaf]
        if len(self._leaves) > self._max_conversations:
            self._leaves.popitem(last=False)

    def close(self, conversation: tuple[str, str]) -> None:
        """The pages that lead to its ends, up to where another line leaves them, become the first victims."""
        for leaf in self._leaves.pop(conversation, []):
            while leaf.absorbed_into is not None:
                leaf = leaf.absorbed_into
            if leaf.is_attached and not leaf.children:
                self._supersede_line(leaf)

    def _supersede_line(self, node: PageNode) -> None:
        while node.parent is not None and not node.num_pins and len(node.children) <= 1:
            self._reclaimer.supersede_page(node)
            node = node.parent

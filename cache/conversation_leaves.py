"""Where the turns of conversations ended in the tree: the next prompt is compared with that, instead of looked up page
by page, and closing a conversation of a model without state frees its pages first.

Hints only: a leaf gives the search a place to start at, which the tokens prove to be on the prompt's path.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from turnkeep.cache.encoded_tokens import common_tokens
from turnkeep.cache.page_node import PageNode
from turnkeep.cache.reclaim import Reclaimer
from turnkeep.cache.sequence_cache import SequenceCache

MAX_LEAVES = 4  # lines of one conversation remembered side by side
MIN_REMEMBERED_TOKENS = 1 << 20

ConversationKey = tuple[str, str | None]  # cache root, conversation id; of None there is never a leaf


@dataclass(slots=True, frozen=True, eq=False)
class Leaf:
    """node: the page a turn ended in, after num_tokens tokens, with which `encoded` begins (others may go on filling
    the page). page_ids: the full pages of its path, from the root (none in models without attention). digests: of its
    prefixes by pages, the empty one first (empty where the eviction policy needs none)."""

    node: PageNode
    num_tokens: int
    encoded: bytes | bytearray
    page_ids: npt.NDArray[np.int32]
    digests: Sequence[int]


@dataclass(slots=True, frozen=True)
class KnownPath:
    """A node of full pages that a prompt runs through, its pages from the root, and digests of it and of what
    followed."""

    node: PageNode
    page_ids: npt.NDArray[np.int32]
    digests: Sequence[int]


class ConversationLeaves:
    """Of the conversations that finished a turn last, so many that their leaves have `max_tokens` tokens together."""

    def __init__(self, reclaimer: Reclaimer, *, max_conversations: int = 4096) -> None:
        self._reclaimer = reclaimer
        self._page_size = reclaimer.tree.page_size
        self._max_conversations = max_conversations
        # In the order of what the pool holds, so that leaves of what was evicted stay small beside the tree.
        self._max_tokens = max(2 * reclaimer.pages.num_usable * self._page_size, MIN_REMEMBERED_TOKENS)
        self._num_tokens = 0
        self._leaves: OrderedDict[ConversationKey, list[Leaf]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._leaves)

    def find(self, conversation: ConversationKey, encoded: bytes | bytearray, limit: int) -> KnownPath | None:
        """The deepest place on the path of the prompt's first `limit` tokens that a leaf proves; None: walk.

        One comparison of memory for each leaf, the newest first; then up the pages that the prompt does not repeat
        or the tree does not hold any more.
        """
        best, best_common = None, 0
        for leaf in reversed(self._leaves.get(conversation, ())):
            common = common_tokens(leaf.encoded, encoded, min(limit, leaf.num_tokens))
            if common > best_common:
                best, best_common = leaf, common
            if common == leaf.num_tokens:
                break
        if best is None:
            return None
        node = best.node
        while node.end > best_common or node.end % self._page_size or not node.is_attached:
            if node.parent is None:
                return None
            node = node.parent
        num_pages = node.end // self._page_size if self._reclaimer.has_pages else 0
        return KnownPath(node, best.page_ids[:num_pages], best.digests) if node.parent is not None else None

    def finished(self, conversation: ConversationKey, seq: SequenceCache) -> None:
        """A turn ended where `seq` is committed to. Its tokens must not change any more, except at their end."""
        node = seq.tail or seq.path
        if node.parent is None:
            return
        pages = seq.page_ids[: seq.path.end // self._page_size].copy()
        new = Leaf(node, node.end, seq.encoded, pages, seq.digests)
        others = self._forget(conversation)
        kept = [other for other in others if other.node is not node and not _is_continued(other, new)]
        self._remember(conversation, [*kept[1 - MAX_LEAVES :], new])
        while len(self._leaves) > self._max_conversations or self._num_tokens > self._max_tokens:
            self._forget(next(iter(self._leaves)))

    def close(self, conversation: ConversationKey) -> None:
        """The pages that lead to its ends, up to where another line leaves them, become the first victims."""
        for leaf in self._forget(conversation):
            node = leaf.node
            while node.absorbed_into is not None:
                node = node.absorbed_into
            if not self._reclaimer.has_state and node.is_attached and not node.children:
                self._supersede_line(node)

    def _remember(self, conversation: ConversationKey, leaves: list[Leaf]) -> None:
        self._leaves[conversation] = leaves
        self._num_tokens += sum(leaf.num_tokens for leaf in leaves)

    def _forget(self, conversation: ConversationKey) -> Sequence[Leaf]:
        leaves = self._leaves.pop(conversation, [])
        self._num_tokens -= sum(leaf.num_tokens for leaf in leaves)
        return leaves

    def _supersede_line(self, node: PageNode) -> None:
        while node.parent is not None and not node.num_pins and len(node.children) <= 1:
            self._reclaimer.supersede_page(node)
            node = node.parent


def _is_continued(old: Leaf, new: Leaf) -> bool:
    """Whether the new leaf proves all that the old one does."""
    return common_tokens(old.encoded, new.encoded, min(old.num_tokens, new.num_tokens)) == old.num_tokens

"""Where something was evicted lately, to tell "evicted" from "never cached" in reports. Decides nothing.

Positions are remembered by a digest of their prefix, bounded in number; a digest that collides can only mislead a
report.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from turnkeep.cache.encoded_tokens import TOKEN_BYTES
from turnkeep.cache.page_node import PageNode

MAX_SUFFIXES = 4  # per page: a page rarely holds more snapshots


class EvictionMemory:
    """The last `max_pages` pages that carried something evicted."""

    def __init__(self, page_size: int, max_pages: int = 8192) -> None:
        self._page_bytes = page_size * TOKEN_BYTES
        self._max_pages = max_pages
        self._suffixes: OrderedDict[int, tuple[bytes, ...]] = OrderedDict()  # digest of the pages before -> suffixes

    def remember(self, parent: PageNode, suffix: bytes) -> None:
        """The prefix of `parent` plus `suffix` could be resumed from and cannot any more. O(1)."""
        self._remember(parent.digest, suffix)

    def remember_position(self, node: PageNode, encoded: bytes | bytearray, position: int) -> None:
        """The same for a position after `node`, whose tokens `encoded` begins with. O(pages after `node`)."""
        digest, width = node.digest, self._page_bytes
        offset, end = node.end * TOKEN_BYTES, position * TOKEN_BYTES
        while offset + width < end:
            digest = hash((digest, bytes(encoded[offset : offset + width])))
            offset += width
        self._remember(digest, bytes(encoded[offset:end]))

    def _remember(self, digest: int, suffix: bytes) -> None:
        known = self._suffixes.pop(digest, None)
        if known is None:
            self._suffixes[digest] = (suffix,)
        else:
            others = tuple(other for other in known if other != suffix)
            self._suffixes[digest] = (*others[1 - MAX_SUFFIXES :], suffix)
        if len(self._suffixes) > self._max_pages:
            self._suffixes.popitem(last=False)

    def deepest(self, digests: Sequence[int], encoded: bytes | bytearray, start: int, limit: int) -> int:
        """Deepest remembered position in (start, limit] of a prompt, 0 if none.

        digests: of the prompt's first `start` tokens, a whole number of pages, and of each full page more. O(those).
        """
        if not self._suffixes:
            return 0
        deepest, width = 0, self._page_bytes
        for place in [place for place, digest in enumerate(digests) if digest in self._suffixes]:
            offset = start * TOKEN_BYTES + place * width
            for suffix in self._suffixes[digests[place]]:
                end = offset + len(suffix)
                if end <= limit * TOKEN_BYTES and encoded.startswith(suffix, offset):
                    deepest = max(deepest, end // TOKEN_BYTES)
        return deepest

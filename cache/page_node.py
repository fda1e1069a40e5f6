"""A page of the prefix tree: its tokens, its place, the snapshots that stand inside it, and what keeps it there.

Its key is those tokens in bytes (encoded_tokens.py). Structure only; PrefixTree changes it.
"""

from __future__ import annotations

from bisect import bisect_left
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from turnkeep.cache.encoded_tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from turnkeep.cache.sequence_cache import SequenceCache
    from turnkeep.cache.snapshot import Snapshot

# What all nodes without children or snapshots share: an empty container of each one's own would cost a long prompt more
# than all the rest, and as much again whenever the interpreter looks for cycles.
_NONE: Any = MappingProxyType({})
_NO_KEYS: Any = ()


class PageNode:
    """Tokens [start, end) of every prompt that runs through here; 1 to page_size of them, only full ones have children.

    children: key -> node, full and partly filled ones; no child's key is a prefix of another's.
    order: the children's keys, sorted, to find the child with the longest common prefix by bisection.
    snapshots: position -> snapshot carried by this node's page.
    suffixes: tokens after `end` -> snapshot carried by one of the children; one entry per distinct prefix, so an equal
    snapshot is found whichever child carries it.
    passable: the parent, of a node that has one child with no snapshot in it: a walk up a long prompt passes thousands
    of those. None of any other, and of roots.
    num_pins: own pins (a sequence's path or tail, a pinned snapshot, a copy that reads the page) plus one per child
    that is itself pinned. Only unpinned nodes can be evicted.
    """

    __slots__ = (
        "absorbed_into",
        "children",
        "digest",
        "end",
        "is_attached",
        "is_superseded",
        "key",
        "last_used_s",
        "num_pins",
        "order",
        "page",
        "parent",
        "passable",
        "snapshots",
        "start",
        "suffixes",
        "tier_key",
        "writer",
    )

    def __init__(self, parent: PageNode | None, key: bytes, page: int, start: int, digest: int) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.start = start
        self.end = start + len(key) // TOKEN_BYTES
        self.digest = digest  # of the whole prefix, for the memory of what was evicted; never decides a match
        self.children: dict[bytes, PageNode] = _NONE
        self.order: list[bytes] = _NO_KEYS
        self.snapshots: dict[int, Snapshot] = _NONE
        self.suffixes: dict[bytes, Snapshot] = _NONE
        self.passable: PageNode | None = None
        self.num_pins = 0
        self.writer: SequenceCache | None = None  # the sequence that goes on filling this page
        self.last_used_s = 0.0
        self.is_superseded = False
        self.is_attached = True
        self.absorbed_into: PageNode | None = None
        self.tier_key: bytes | None = None  # of a full page, once colder tiers have asked for it (cache/tiers/keys.py)

    def link(self, key: bytes, child: PageNode) -> None:
        """A child more."""
        if not self.children:
            self.children, self.order = {key: child}, [key]
        else:
            self.children[key] = child
            self.order.insert(bisect_left(self.order, key), key)
        self._look()

    def unlink(self, key: bytes) -> None:
        """A child fewer."""
        if len(self.children) == 1:
            self.children, self.order, self.passable = _NONE, _NO_KEYS, None
        else:
            del self.children[key]
            del self.order[bisect_left(self.order, key)]
            self._look()

    def carry(self, snapshot: Snapshot) -> None:
        """Let `snapshot` stand in this page."""
        if self.snapshots:
            self.snapshots[snapshot.num_tokens] = snapshot
        else:
            self.snapshots = {snapshot.num_tokens: snapshot}

    def forget_snapshots(self) -> None:
        """Another page carries them now."""
        self.snapshots = _NONE

    def index_suffix(self, suffix: bytes, snapshot: Snapshot) -> None:
        """Let `snapshot`, which a child carries, be found by the tokens after this page."""
        if self.suffixes:
            self.suffixes[suffix] = snapshot
        else:
            self.suffixes = {suffix: snapshot}
        self.passable = None

    def drop_suffix(self, suffix: bytes) -> None:
        """No child carries that snapshot any more."""
        del self.suffixes[suffix]
        self._look()

    def _look(self) -> None:
        self.passable = self.parent if len(self.children) == 1 and not self.suffixes else None

    def suffix(self, position: int) -> bytes:
        """Key of the tokens of this page before `position`."""
        return self.key[: (position - self.start) * TOKEN_BYTES]

    def page_path(self, start: int = 0) -> list[int]:
        """Pages of the path down to this node, those of tokens from `start` on (a page's first)."""
        pages: list[int] = []
        node = self
        while node.parent is not None and node.start >= start:
            pages.append(node.page)
            node = node.parent
        pages.reverse()
        return pages


class RootNode(PageNode):
    """Where the prefixes of one cache root begin. Holds no tokens and no page."""

    __slots__ = ("cache_root",)

    def __init__(self, cache_root: str) -> None:
        super().__init__(None, b"", 0, 0, hash(cache_root))
        self.cache_root = cache_root

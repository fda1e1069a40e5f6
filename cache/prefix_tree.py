"""Radix tree of pages over token ids: finds prefixes, takes in committed pages, knows which nodes something holds.

Owns structure and pins. Which unpinned node goes, and when, is decided elsewhere (reclaim.py); the observer is told
when an unpinned leaf appears or disappears.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Protocol

import numpy as np
import numpy.typing as npt

from turnkeep.cache.encoded_tokens import TOKEN_BYTES
from turnkeep.cache.page_node import PageNode, RootNode
from turnkeep.cache.page_pool import PagePool
from turnkeep.cache.snapshot import Snapshot


class TreeObserver(Protocol):
    """Told about leaves only: nothing else can be removed from the tree."""

    def leaf_unpinned(self, node: PageNode) -> None: ...

    def leaf_taken(self, node: PageNode) -> None: ...


class PrefixTree:
    """One tree per cache root. pages is None for models without attention: nodes then hold tokens only.

    num_nodes and num_pinned count page nodes (roots hold no page); their difference is what eviction can free.
    """

    def __init__(self, page_size: int, pages: PagePool | None, observer: TreeObserver) -> None:
        self.page_size = page_size
        self.num_nodes = 0
        self.num_pinned = 0
        self.roots: dict[str, RootNode] = {}
        self._page_bytes = page_size * TOKEN_BYTES
        self._pages = pages
        self._observer = observer

    def root(self, cache_root: str) -> RootNode:
        """The root, made when absent; it goes again with its last child and pin."""
        root = self.roots.get(cache_root)
        if root is None:
            root = self.roots[cache_root] = RootNode(cache_root)
        return root

    # Finding

    def descend(self, node: PageNode, encoded: bytes | bytearray, limit: int) -> PageNode:
        """The deepest node of full pages below `node` (or itself) that tokens [node.end, limit) run through."""
        width = self._page_bytes
        offset = node.end * TOKEN_BYTES
        while offset + width <= limit * TOKEN_BYTES:
            child = node.children.get(bytes(encoded[offset : offset + width]))
            if child is None:
                break
            node = child
            offset += width
        return node

    def closest_child(self, node: PageNode, key: bytes) -> tuple[PageNode | None, int]:
        """The child that shares most leading tokens with `key`, and how many; (None, 0) when none shares any."""
        order = node.order
        index = bisect_left(order, key)
        best, best_length = None, 0
        for neighbour in order[max(index - 1, 0) : index + 1]:
            length = num_common_tokens(neighbour, key)
            if length > best_length:
                best, best_length = node.children[neighbour], length
        return best, best_length

    def covering_child(self, node: PageNode, key: bytes) -> PageNode | None:
        """The child whose tokens start with `key`, if any."""
        index = bisect_left(node.order, key)
        if index < len(node.order) and node.order[index].startswith(key):
            return node.children[node.order[index]]
        return None

    def deepest_snapshot(self, node: PageNode, encoded: bytes | bytearray, limit: int) -> Snapshot | None:
        """The deepest snapshot at most at `limit` on the prompt's path; `node` is where `descend` ended."""
        rest = bytes(encoded[node.end * TOKEN_BYTES : min(limit, node.end + self.page_size) * TOKEN_BYTES])
        found = _longest_suffix(node.suffixes, rest)
        while found is None and node.parent is not None:
            found = _longest_suffix(node.parent.suffixes, node.key)
            node = node.parent
        return found

    def find_snapshot(self, node: PageNode, encoded: bytes | bytearray, position: int) -> Snapshot | None:
        """The snapshot exactly at `position` of the tokens that run through `node`, position > node.end."""
        parent = self.descend(node, encoded, (position - 1) // self.page_size * self.page_size)
        if position - parent.end > self.page_size:
            return None
        return parent.suffixes.get(bytes(encoded[parent.end * TOKEN_BYTES : position * TOKEN_BYTES]))

    # Changing

    def insert(self, parent: PageNode, key: bytes, page: int) -> PageNode:
        """A new child, which holds `page` from now on. No child may cover `key`; `parent` must be pinned.

        A child whose tokens are a prefix of `key` is absorbed.
        """
        node = PageNode(parent, key, page, parent.end, hash((parent.digest, key)))
        if self._pages is not None:
            self._pages.retain(page)
        index = bisect_left(parent.order, key)
        shorter = parent.order[index - 1] if index else None
        parent.link(key, node)
        self.num_nodes += 1
        if shorter is not None and key.startswith(shorter):
            self.absorb(parent.children[shorter], node)
        return node

    def insert_chain(self, parent: PageNode, encoded: bytes | bytearray, pages: npt.NDArray[np.int32]) -> PageNode:
        """So many full pages of a prompt below `parent`, which has no children and is pinned; returns the last of them.

        A pin on `parent` that the caller owns moves on to the last one.
        """
        node, width = parent, self._page_bytes
        offset = parent.end * TOKEN_BYTES
        for page in pages.tolist():
            key = bytes(encoded[offset : offset + width])
            child = PageNode(node, key, page, node.end, hash((node.digest, key)))
            child.num_pins = 1
            node.children, node.order, node.passable = {key: child}, [key], node.parent
            node = child
            offset += width
        self.num_nodes += len(pages)
        self.num_pinned += len(pages)
        if self._pages is not None:
            self._pages.retain_all(pages)
        return node

    def extend(self, node: PageNode, key: bytes) -> None:
        """Let a partly filled page's node cover more tokens: `key` starts with its present key; no child covers it.

        No sibling's key can be a prefix of `key`, or it would have been one of the node's present key.
        """
        parent = node.parent
        assert parent is not None
        parent.unlink(node.key)
        node.key = key
        node.end = node.start + len(key) // TOKEN_BYTES
        node.digest = hash((parent.digest, key))
        parent.link(key, node)

    def absorb(self, node: PageNode, into: PageNode) -> None:
        """Replace a partly filled node by a sibling that holds the same tokens and more, with snapshots and pins.

        A writer of the absorbed page keeps it as its own; pins of copies that read it move along (absorbed_into).
        """
        num_own_pins = node.num_pins
        if node.writer is not None:
            node.writer.tail = None
            node.writer = None
            num_own_pins -= 1
        for snapshot in node.snapshots.values():
            snapshot.node = into
            into.carry(snapshot)
        node.forget_snapshots()
        for _ in range(num_own_pins):
            self.pin(into)
        while node.num_pins:
            self.unpin(node, node.last_used_s)
        into.last_used_s = max(into.last_used_s, node.last_used_s)
        node.absorbed_into = into
        self.remove(node)

    def remove(self, node: PageNode) -> None:
        """Take out an unpinned node without children or snapshots, and release its page."""
        parent = node.parent
        assert parent is not None
        assert not node.children
        assert not node.num_pins
        assert not node.snapshots
        self._observer.leaf_taken(node)
        parent.unlink(node.key)
        node.is_attached = False
        self.num_nodes -= 1
        if self._pages is not None:
            self._pages.release(node.page)
        if not parent.children and not parent.num_pins:
            # Whoever used the child came through the parent.
            parent.last_used_s = max(parent.last_used_s, node.last_used_s)
            self._became_free(parent)

    def prune(self, node: PageNode) -> None:
        """Take out `node` and those above it for as long as they have no children, pins or snapshots. O(those).

        For models with state only: nobody is told of leaves.
        """
        pages: list[int] = []
        parent = node.parent
        while parent is not None and not (node.children or node.num_pins or node.snapshots):
            parent.unlink(node.key)
            node.is_attached = False
            pages.append(node.page)
            if not parent.children and not parent.num_pins:
                parent.last_used_s = max(parent.last_used_s, node.last_used_s)
            node, parent = parent, parent.parent
        self.num_nodes -= len(pages)
        if self._pages is not None and pages:
            self._pages.release_all(np.array(pages[::-1], np.int32))
        if pages and not node.children and not node.num_pins:
            self._became_free(node)

    def pin(self, node: PageNode) -> None:
        """Keep a node, and with it its path, in the tree. O(nodes that were not pinned before)."""
        if not node.num_pins and not node.children and node.parent is not None:
            self._observer.leaf_taken(node)
        above: PageNode | None = node
        num_new = -1
        while above is not None:  # all that opening a long conversation does page by page
            num_new += 1
            num_pins = above.num_pins
            above.num_pins = num_pins + 1
            if num_pins:
                break
            above = above.parent
        self.num_pinned += num_new

    def unpin(self, node: PageNode, now_s: float) -> None:
        """Give back one pin. The node may have been absorbed since."""
        while node.absorbed_into is not None:
            node = node.absorbed_into
        node.last_used_s = now_s
        above: PageNode | None = node
        num_freed = -1
        while above is not None:
            num_freed += 1
            num_pins = above.num_pins - 1
            above.num_pins = num_pins
            if num_pins:
                assert num_pins > 0
                break
            above.is_superseded = False
            above = above.parent
        self.num_pinned -= num_freed
        if not node.num_pins and not node.children:  # no node above is without children
            self._became_free(node)

    def _became_free(self, node: PageNode) -> None:
        if isinstance(node, RootNode):
            node.is_attached = False
            self.roots.pop(node.cache_root, None)
        else:
            self._observer.leaf_unpinned(node)


def num_common_tokens(first: bytes, second: bytes) -> int:
    """Leading tokens that two keys share."""
    length = min(len(first), len(second))
    difference = int.from_bytes(first[:length], "big") ^ int.from_bytes(second[:length], "big")
    num_equal_bytes = length - (difference.bit_length() + 7) // 8
    return num_equal_bytes // TOKEN_BYTES


def _longest_suffix(suffixes: dict[bytes, Snapshot], key: bytes) -> Snapshot | None:
    if suffixes:
        for end in range(len(key), 0, -TOKEN_BYTES):
            found = suffixes.get(key[:end])
            if found is not None:
                return found
    return None

"""Names of prefixes that hold beyond one process: SHA-256 over everything that defines the bytes behind them.

The key of a page is a digest of the key before it and of its own tokens; the first is the root's, a digest of the
layout (model, types, shapes, versions) and of the cache root. Equal keys are therefore equal tokens of one tenant on
one model, and no look-up by key can cross either.
"""

from __future__ import annotations

from hashlib import sha256

from turnkeep.cache.page_node import PageNode, RootNode

KEY_BYTES = 32


def root_key(layout: bytes, cache_root: str) -> bytes:
    """Key of the empty prefix of one cache root."""
    return sha256(b"root:" + layout + cache_root.encode("utf-8", "surrogatepass")).digest()


def page_key(parent: bytes, tokens: bytes) -> bytes:
    """Key of a prefix that is one full page longer; tokens encoded as tree keys."""
    return sha256(b"page:" + parent + tokens).digest()


def snapshot_key(parent: bytes, suffix: bytes) -> bytes:
    """Key of the state after `suffix`, less than a page of tokens, behind the page `parent`."""
    return sha256(b"snapshot:" + parent + suffix).digest()


def owner_key(cache_root: str, conversation_id: str | None) -> bytes:
    """Names a conversation without showing its id; empty without one."""
    if conversation_id is None:
        return b""
    root, name = (text.encode("utf-8", "surrogatepass") for text in (cache_root, conversation_id))
    return sha256(b"owner:%d:" % len(root) + root + name).digest()[:16]


def node_key(layout: bytes, node: PageNode) -> bytes:
    """Key of the prefix that ends with a full page's node, or of a root. Kept on the node: its tokens never change."""
    unnamed: list[PageNode] = []
    while node.tier_key is None and node.parent is not None:
        unnamed.append(node)
        node = node.parent
    if node.tier_key is None:
        assert isinstance(node, RootNode)
        node.tier_key = root_key(layout, node.cache_root)
    key = node.tier_key
    for below in reversed(unnamed):
        key = below.tier_key = page_key(key, below.key)
    return key

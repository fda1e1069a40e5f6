"""What of a prompt the cache holds, why no more of it can be used, and the search that finds out. Changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from turnkeep.cache.conversation_leaves import KnownPath
from turnkeep.cache.encoded_tokens import TOKEN_BYTES, TokenIds, encode_tokens, page_digests
from turnkeep.cache.eviction_memory import EvictionMemory
from turnkeep.cache.loss_reason import LossReason
from turnkeep.cache.page_node import PageNode
from turnkeep.cache.prefix_tree import PrefixTree
from turnkeep.cache.snapshot import Snapshot

MIN_BRANCH_TOKENS = 32  # fewer computed again are not worth a snapshot


@dataclass(slots=True, frozen=True, eq=False)
class PrefixMatch:
    """The longest usable prefix; at least one token of a prompt is always left to compute.

    path: node of the last full page used (None: the root, wherever it is). tail: node of the page used in part.
    """

    cache_root: str
    token_ids: TokenIds  # the caller's own object
    encoded: bytes | bytearray
    num_tokens: int = 0  # computation starts here
    num_matched_tokens: int = 0  # what the pages alone match
    num_evicted_tokens: int = 0  # deepest position known to have been usable until it was evicted; 0: none known
    num_skipped_tokens: int = 0  # deepest position whose snapshot found no row; 0: none known
    num_cold_tokens: int = 0  # position that a colder tier had and that could not be brought here; 0: none
    snapshot: Snapshot | None = None
    path: PageNode | None = None
    tail: PageNode | None = None
    known_pages: npt.NDArray[np.int32] | None = None  # the first pages of the path, where they are at hand
    known_digests: Sequence[int] = ()  # those of the path's prefixes by pages; ones behind it may follow
    next_digests: Sequence[int] = ()  # of the path, and of all full pages of the prompt behind it

    @property
    def num_lost_tokens(self) -> int:
        """Tokens that were computed before, as far as the cache knows, and must be computed again."""
        known = (self.num_cold_tokens, self.num_evicted_tokens, self.num_skipped_tokens, self.num_matched_tokens)
        return max(known) - self.num_tokens

    @property
    def loss_reason(self) -> LossReason:
        if self.num_cold_tokens > self.num_tokens:
            return "tier"
        if self.num_evicted_tokens > self.num_tokens:
            return "evicted"
        if self.num_skipped_tokens > self.num_tokens:
            return "capacity"
        return "no_snapshot" if self.num_matched_tokens > self.num_tokens else "none"

    @property
    def branch_position(self) -> int | None:
        """Where the prompt leaves what is cached, if a snapshot there would have saved enough to be worth a row."""
        is_worth = self.num_matched_tokens - self.num_tokens >= MIN_BRANCH_TOKENS
        return self.num_matched_tokens if is_worth else None

    @property
    def is_current(self) -> bool:
        """False once something that this match relies on left the tree."""
        return (
            (self.snapshot is None or self.snapshot.is_attached)
            and (self.path is None or self.path.is_attached)
            and (self.tail is None or self.tail.is_attached)
        )

    @property
    def can_adopt_tail(self) -> bool:
        """Whether the sequence may go on writing the tail page itself: nobody else does, and it ends exactly here."""
        return self.tail is not None and self.tail.writer is None and self.tail.end == self.num_tokens


class PrefixSearch:
    """Finds matches in one tree. needs_snapshot: the model has state, so a match must end at a snapshot."""

    def __init__(
        self, tree: PrefixTree, memory: EvictionMemory, skipped: EvictionMemory, *, needs_snapshot: bool
    ) -> None:
        self._tree = tree
        self._memory = memory
        self._skipped = skipped
        self._needs_snapshot = needs_snapshot

    def find(
        self, cache_root: str, token_ids: TokenIds, encoded: bytes | bytearray, known: KnownPath | None = None
    ) -> PrefixMatch:
        """O(prompt): one dictionary look-up per page, one bisection, one walk up to the deepest snapshot.

        known: a place on the prompt's path; only the pages after it are looked up.
        """
        limit = max(len(encoded) // TOKEN_BYTES - 1, 0)
        root = self._tree.roots.get(cache_root)
        if root is None:
            digests = page_digests(hash(cache_root), encoded, 0, self._tree.page_size)
            num_evicted = self._memory.deepest(digests, encoded, 0, limit)
            num_skipped = self._skipped.deepest(digests, encoded, 0, limit)
            return PrefixMatch(
                cache_root,
                token_ids,
                encoded,
                num_evicted_tokens=num_evicted,
                num_skipped_tokens=num_skipped,
                next_digests=digests,
            )
        node = self._tree.descend(root if known is None else known.node, encoded, limit)
        rest = bytes(encoded[node.end * TOKEN_BYTES : min(limit, node.end + self._tree.page_size) * TOKEN_BYTES])
        tail, num_common = self._tree.closest_child(node, rest)
        num_matched = num_tokens = node.end + num_common
        snapshot: Snapshot | None = None
        path: PageNode = node
        if self._needs_snapshot:
            snapshot = self._tree.deepest_snapshot(node, encoded, limit)
            path, tail = (root, None) if snapshot is None else self._place(snapshot)
            num_tokens = 0 if snapshot is None else snapshot.num_tokens
        digests = page_digests(path.digest, encoded, path.end, self._tree.page_size)
        num_evicted = self._memory.deepest(digests, encoded, path.end, limit)
        num_skipped = self._skipped.deepest(digests, encoded, path.end, limit)
        return PrefixMatch(
            cache_root,
            token_ids,
            encoded,
            num_tokens,
            num_matched,
            num_evicted,
            num_skipped,
            snapshot=snapshot,
            path=path,
            tail=tail,
            known_pages=None if known is None else known.page_ids,
            known_digests=() if known is None else known.digests,
            next_digests=digests,
        )

    def refreshed(self, match: PrefixMatch, token_ids: TokenIds) -> PrefixMatch:
        """`match` for these tokens, found again when something it relies on is gone.

        Raises ValueError when token_ids do not start with the tokens that were matched.
        """
        encoded = match.encoded
        if token_ids is not match.token_ids or len(token_ids) * TOKEN_BYTES != len(encoded):
            encoded = encode_tokens(token_ids)
            matched = match.num_tokens * TOKEN_BYTES
            if len(encoded) < matched or encoded[:matched] != match.encoded[:matched]:
                raise ValueError(f"these tokens do not start with the {match.num_tokens} tokens that were matched")
            match = replace(match, token_ids=token_ids, encoded=encoded, next_digests=())
        if match.is_current:
            return match
        return self.find(match.cache_root, token_ids, encoded)

    def _place(self, snapshot: Snapshot) -> tuple[PageNode, PageNode | None]:
        """Full pages before a snapshot's end, and the page that it uses in part."""
        node = snapshot.node
        assert node.parent is not None
        if snapshot.num_tokens % self._tree.page_size == 0:
            return node, None
        return node.parent, node

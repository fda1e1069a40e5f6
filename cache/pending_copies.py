"""Copies that open sequences wait for: collected while a step is planned, carried out before it computes.

At most one page and one row per sequence. A source stays pinned, and its page referenced, until the copy is handed
out; a sequence that closes before takes its copies with it, so no target is ever written for an owner that is gone.
Sources are committed, targets private: no copy reads what another one writes, and all may run as one batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from turnkeep.cache.copies import PageCopy, RowCopy
from turnkeep.cache.page_node import PageNode
from turnkeep.cache.reclaim import Reclaimer
from turnkeep.cache.sequence_cache import SequenceCache
from turnkeep.cache.snapshot import Snapshot


@dataclass(slots=True)
class _Waiting:
    page: tuple[PageCopy, PageNode] | None = None
    row: tuple[RowCopy, Snapshot] | None = None


class PendingCopies:
    """In the order they were planned."""

    def __init__(self, reclaimer: Reclaimer) -> None:
        self._reclaimer = reclaimer
        self._waiting: dict[SequenceCache, _Waiting] = {}

    def __contains__(self, seq: SequenceCache) -> bool:
        return seq in self._waiting

    def copy_page(self, seq: SequenceCache, source: PageNode, target: int, num_tokens: int) -> None:
        """Copy the first slots of a node's page to a page of `seq`."""
        self._reclaimer.tree.pin(source)
        self._reclaimer.pages.retain(source.page)
        copy = PageCopy(source.page, target, num_tokens)
        self._waiting.setdefault(seq, _Waiting()).page = (copy, source)

    def copy_row(self, seq: SequenceCache, source: Snapshot, target: int) -> None:
        """Copy a snapshot's row to the live row of `seq`."""
        self._reclaimer.pin(source)
        self._waiting.setdefault(seq, _Waiting()).row = (RowCopy(source.row, target), source)

    def cancel(self, seq: SequenceCache) -> None:
        """`seq` closes: nobody waits for its copies."""
        waiting = self._waiting.pop(seq, None)
        if waiting is not None:
            self._release(waiting)

    def drain(self) -> tuple[tuple[PageCopy, ...], tuple[RowCopy, ...]]:
        """Hand out everything; the sources may change hands once the copies ran, which is before the next step."""
        if not self._waiting:
            return (), ()
        all_waiting, self._waiting = list(self._waiting.values()), {}
        for waiting in all_waiting:
            self._release(waiting)
        return (
            tuple(waiting.page[0] for waiting in all_waiting if waiting.page is not None),
            tuple(waiting.row[0] for waiting in all_waiting if waiting.row is not None),
        )

    def page_sources(self) -> list[int]:
        """For conservation checks: pages held by copies that wait."""
        return [waiting.page[0].source for waiting in self._waiting.values() if waiting.page is not None]

    def pinned_snapshots(self) -> list[Snapshot]:
        """For conservation checks."""
        return [waiting.row[1] for waiting in self._waiting.values() if waiting.row is not None]

    def pinned_nodes(self) -> list[PageNode]:
        """For conservation checks: nodes whose page a copy reads, as they stand in the tree now."""
        nodes = []
        for waiting in self._waiting.values():
            if waiting.page is not None:
                node = waiting.page[1]
                while node.absorbed_into is not None:
                    node = node.absorbed_into
                nodes.append(node)
        return nodes

    def _release(self, waiting: _Waiting) -> None:
        if waiting.page is not None:
            copy, node = waiting.page
            self._reclaimer.pages.release(copy.source)
            self._reclaimer.release(node)
        if waiting.row is not None:
            self._reclaimer.unpin(waiting.row[1])

"""Recomputes what the cache believes about itself: every reference, pin, count and order, from the holders up.

For tests and for a debug switch of the engine; O(everything). A failed check names the thing and both numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from turnkeep.cache.encoded_tokens import TOKEN_BYTES
from turnkeep.cache.page_node import PageNode, RootNode
from turnkeep.cache.pending_copies import PendingCopies
from turnkeep.cache.reclaim import Reclaimer
from turnkeep.cache.retention import Retention
from turnkeep.cache.sequence_cache import SequenceCache
from turnkeep.cache.snapshot import PRIVATE_KINDS, Snapshot
from turnkeep.cache.tiers.cold_tiers import ColdTiers


def check_conservation(
    reclaimer: Reclaimer,
    retention: Retention,
    copies: PendingCopies,
    sequences: Iterable[SequenceCache],
    tiers: ColdTiers | None = None,
) -> None:
    """Raises AssertionError with what is wrong."""
    sequences = list(sequences)
    nodes = _walk(reclaimer.tree.roots.values())
    _check_pages(reclaimer, copies, sequences, nodes)
    _check_rows(reclaimer, sequences)
    _check_structure(reclaimer, nodes)
    handed_over = [] if tiers is None else tiers.loader.pinned_nodes()
    _check_pins(reclaimer, copies, sequences, nodes, handed_over)
    _check_snapshots(reclaimer, copies, sequences, nodes)
    _check_retention(reclaimer, retention, sequences)
    for seq in sequences:
        _check_sequence(reclaimer, seq)


def _require(is_true: bool, message: str) -> None:
    if not is_true:
        raise AssertionError(message)


def _walk(roots: Iterable[RootNode]) -> list[PageNode]:
    """All page nodes, parents first."""
    nodes: list[PageNode] = []
    waiting: list[PageNode] = list(roots)
    while waiting:
        node = waiting.pop()
        if not isinstance(node, RootNode):
            nodes.append(node)
        waiting.extend(node.children.values())
    return nodes


def _check_pages(
    reclaimer: Reclaimer, copies: PendingCopies, sequences: list[SequenceCache], nodes: list[PageNode]
) -> None:
    pool = reclaimer.pages
    holders: Counter[int] = Counter(copies.page_sources())
    if reclaimer.has_pages:
        holders.update(node.page for node in nodes)
        for seq in sequences:
            holders.update(seq.page_ids.tolist())
    _require(holders[0] == 0, "the reserved page 0 is in use")
    free = pool.free_ids()
    _require(len(set(free)) == len(free), "a page is in the free list twice")
    for page in range(1, pool.num_usable + 1):
        counted = pool.num_references(page)
        _require(counted == holders[page], f"page {page} has {counted} references and {holders[page]} holders")
    idle = {page for page in range(1, pool.num_usable + 1) if holders[page] == 0}
    _require(set(free) == idle, f"free pages {sorted(free)} differ from those nobody holds {sorted(idle)}")


def _check_rows(reclaimer: Reclaimer, sequences: list[SequenceCache]) -> None:
    pool = reclaimer.rows
    holders: Counter[int] = Counter(snapshot.row for snapshot in reclaimer.snapshots)
    for seq in sequences:
        if seq.state_row is not None:
            holders[seq.state_row] += 1
        holders.update(export.row for export in seq.exports if export.row is not None)
        _require((seq.state_row is not None) == reclaimer.has_state, "an open sequence has no live row")
    _require(holders[0] == 0, "the reserved row 0 is in use")
    _require(all(number <= 1 for number in holders.values()), "a state row has two owners")
    free = pool.free_ids()
    _require(len(set(free)) == len(free), "a row is in the free list twice")
    for row in range(1, pool.num_usable + 1):
        counted = pool.num_references(row)
        _require(counted == holders[row], f"row {row} has {counted} references and {holders[row]} holders")
        _require((row in free) == (counted == 0), f"row {row} with {counted} references is wrongly listed as free")


def _check_structure(reclaimer: Reclaimer, nodes: list[PageNode]) -> None:
    page_bytes = reclaimer.tree.page_size * TOKEN_BYTES
    for parent in [*reclaimer.tree.roots.values(), *nodes]:
        _require(parent.is_attached, "a node of the tree says it left it")
        _require(sorted(parent.children) == list(parent.order), f"children of the node at {parent.start} out of order")
        for first, second in zip(parent.order, parent.order[1:], strict=False):
            _require(not second.startswith(first), f"below {parent.end} a page is a prefix of its sibling")
        for key, child in parent.children.items():
            _require(child.parent is parent and child.key == key, f"broken link at {parent.end}")
            _require(child.start == parent.end, f"a page starts at {child.start}, its parent ends at {parent.end}")
            _require(child.end == child.start + len(key) // TOKEN_BYTES, f"wrong end of the page at {child.start}")
            _require(0 < len(key) <= page_bytes, f"the page at {child.start} has {len(key) // TOKEN_BYTES} tokens")
            _require(len(key) == page_bytes or not child.children, "a partly filled page has children")
    for node in nodes:
        is_usable = bool(node.children or node.num_pins or node.snapshots) or not reclaimer.has_state
        _require(is_usable, f"the page [{node.start}, {node.end}) is kept although nothing can use it")
    for name, root in reclaimer.tree.roots.items():
        _require(bool(root.children or root.num_pins), f"the root {name!r} is kept although nothing is below it")
    _require(reclaimer.tree.num_nodes == len(nodes), f"{reclaimer.tree.num_nodes} nodes counted, {len(nodes)} found")


def _check_pins(
    reclaimer: Reclaimer,
    copies: PendingCopies,
    sequences: list[SequenceCache],
    nodes: list[PageNode],
    handed_over: list[PageNode],
) -> None:
    pins: Counter[PageNode] = Counter([*copies.pinned_nodes(), *handed_over])
    pins.update(seq.path for seq in sequences)
    pins.update(seq.tail for seq in sequences if seq.tail is not None)
    pins.update(snapshot.node for snapshot in reclaimer.snapshots if snapshot.num_pins)
    num_pinned = 0
    for node in reversed(nodes):  # children before parents
        expected = pins[node]
        _require(node.num_pins == expected, f"page [{node.start}, {node.end}): {node.num_pins} pins, not {expected}")
        if node.num_pins:
            num_pinned += 1
            assert node.parent is not None
            pins[node.parent] += 1
        is_free_leaf = not node.num_pins and not node.children
        if reclaimer.has_pages and is_free_leaf:
            references = reclaimer.pages.num_references(node.page)
            _require(references == 1, f"evicting page {node.page} would not free it: {references} references")
    for root in reclaimer.tree.roots.values():
        _require(root.num_pins == pins[root], f"root: {root.num_pins} pins, not {pins[root]}")
    _require(reclaimer.tree.num_pinned == num_pinned, f"{reclaimer.tree.num_pinned} pins counted, not {num_pinned}")


def _check_snapshots(
    reclaimer: Reclaimer, copies: PendingCopies, sequences: list[SequenceCache], nodes: list[PageNode]
) -> None:
    carried = [snapshot for node in nodes for snapshot in node.snapshots.values()]
    _require(set(carried) == reclaimer.snapshots, "snapshots on pages differ from those that are known")
    num_indexed = sum(len(node.suffixes) for node in [*reclaimer.tree.roots.values(), *nodes])
    _require(num_indexed == len(carried), f"{num_indexed} snapshots can be found, {len(carried)} are there")
    pins: Counter[Snapshot] = Counter(copies.pinned_snapshots())
    pins.update(seq.resumed_from for seq in sequences if seq.resumed_from is not None)
    for snapshot in carried:
        node, position = snapshot.node, snapshot.num_tokens
        _require(node.snapshots.get(position) is snapshot, f"the snapshot at {position} is carried elsewhere")
        _require(node.start < position <= node.end, f"a snapshot at {position} on page [{node.start}, {node.end})")
        assert node.parent is not None
        found = node.parent.suffixes.get(node.suffix(position))
        _require(found is snapshot, f"the snapshot at {position} cannot be found by its tokens")
        _require(snapshot.num_pins == pins[snapshot], f"snapshot at {position}: {snapshot.num_pins} pins")
    for node in nodes:
        passable = node.parent if len(node.children) == 1 and not node.suffixes else None
        _require(node.passable is passable, f"the page at {node.start} is wrong about what is below it")
    num_pinned = sum(snapshot.num_pins > 0 for snapshot in carried)
    _require(reclaimer.num_pinned_snapshots == num_pinned, f"{num_pinned} snapshots pinned, count is wrong")
    num_evictable = len(carried) - num_pinned
    if not reclaimer.has_state:
        num_evictable = sum(not node.num_pins and not node.children for node in nodes)
    known = reclaimer.num_items_of_policy
    _require(known in (None, num_evictable), f"the policy knows {known} victims, there are {num_evictable}")


def _check_retention(reclaimer: Reclaimer, retention: Retention, sequences: list[SequenceCache]) -> None:
    branches = list(retention.branches())
    active: Counter[object] = Counter(seq.branch for seq in sequences if seq.branch is not None)
    for branch in branches:
        _require(bool(branch.num_active or branch.snapshots()), "a branch keeps nothing")
        _require(branch.num_active == active[branch], "a branch counts its sequences wrongly")
        for snapshot in branch.snapshots():
            _require(snapshot.is_attached, f"a branch keeps a snapshot at {snapshot.num_tokens} that is gone")
            _require(branch in snapshot.keepers, f"the snapshot at {snapshot.num_tokens} does not know its keeper")
    known = set(branches)
    for snapshot in reclaimer.snapshots:
        for branch in snapshot.keepers:
            _require(branch in known, f"the snapshot at {snapshot.num_tokens} has a keeper that is gone")
            kept = any(other is snapshot for other in branch.snapshots())
            _require(kept, f"the snapshot at {snapshot.num_tokens} has a keeper that does not keep it")
        is_left = snapshot.kind in PRIVATE_KINDS and not snapshot.keepers
        _require(
            snapshot.is_superseded == is_left, f"{snapshot.kind} at {snapshot.num_tokens}: wrongly (not) superseded"
        )


def _check_sequence(reclaimer: Reclaimer, seq: SequenceCache) -> None:
    lengths = (seq.num_committed_tokens, seq.num_computed_tokens, seq.capacity_tokens)
    _require(lengths == tuple(sorted(lengths)), f"committed, computed, capacity are out of order: {lengths}")
    _require(seq.path.is_attached, "an open sequence's path left the tree")
    _require(seq.path.end <= seq.num_committed_tokens, "the path goes beyond what is committed")
    if reclaimer.has_pages:
        page_size = reclaimer.tree.page_size
        _require(seq.capacity_tokens == seq.num_pages * page_size, "capacity differs from the pages owned")
        shared = seq.page_ids[: seq.path.end // page_size].tolist()
        _require(shared == seq.path.page_path(), "the page table differs from the pages committed")
        if seq.tail is not None:
            _require(seq.tail.page == seq.page_ids[seq.tail.start // page_size], "the tail page is not the sequence's")
    if seq.tail is not None:
        _require(seq.tail.writer is seq and seq.tail.parent is seq.path, "the tail is not where the sequence writes")
        _require(seq.tail.end <= seq.num_computed_tokens, "the tail holds tokens that are not computed")

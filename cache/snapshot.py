"""A snapshot: everything needed to go on from one token position, as one object with one lifetime.

It stands at an exact offset inside the page of a tree node, which it keeps in the tree, and owns one state row. Plain
data: the reclaimer makes, pins and drops snapshots, retention decides which of them are superseded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from turnkeep.cache.boundary import BoundaryKind

if TYPE_CHECKING:
    from turnkeep.cache.page_node import PageNode
    from turnkeep.cache.retention import Branch

# Kinds that belong to one branch of one conversation. The others are shared and never superseded.
PRIVATE_KINDS: frozenset[BoundaryKind] = frozenset({"turn_start", "turn_end", "suspended"})


@dataclass(slots=True, eq=False)
class Snapshot:
    """The recurrent state after `num_tokens` tokens, in state row `row`; the pages are those of `node`'s path.

    num_pins: open sequences that resumed here and copies that read the row; pinned snapshots are not evicted.
    keepers: branches that count this as one of theirs; when the last one lets go, the snapshot is superseded.
    """

    node: PageNode  # node.start < num_tokens <= node.end
    num_tokens: int
    row: int
    kind: BoundaryKind
    last_used_s: float
    num_pins: int = 0
    num_hits: int = 0
    num_prepared_tokens: int = 0  # computed for it in idle time, before anybody asked
    is_superseded: bool = False
    is_attached: bool = True
    keepers: list[Branch] = field(default_factory=list)

"""Disk -> host memory -> device: finds what colder tiers have of a prompt, reads it, hands it over when it is whole.

A request waits for its load while others run; reading is done in the background, handing over a few milliseconds at a
time. A load that fails (a file that cannot be read, no room) costs time only: the request goes on with what the device
has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from turnkeep.cache.encoded_tokens import TOKEN_BYTES
from turnkeep.cache.page_node import PageNode
from turnkeep.cache.prefix_match import PrefixMatch
from turnkeep.cache.reclaim import Reclaimer
from turnkeep.cache.retention import ConversationKey
from turnkeep.cache.tiers.cold_index import ColdIndex, ColdMatch
from turnkeep.cache.tiers.disk_tier import DiskTier
from turnkeep.cache.tiers.keys import node_key, owner_key, root_key
from turnkeep.cache.tiers.offloader import Offloader
from turnkeep.cache.tiers.record import Bytes, Record
from turnkeep.cache.tiers.takeover import Arrival, Landing, Takeover, TakeoverError
from turnkeep.cache.tiers.tier_counters import TierCounters

MIN_LOAD_TOKENS = 32  # fewer are computed sooner than they are found
SLICE_S = 0.005  # of handing over, before the loop does anything else

LoadState = Literal["nothing", "started", "waiting", "done"]


@dataclass(slots=True, eq=False)
class Load:
    """What several requests may wait for. tier: the coldest it comes from. num_gained_tokens: beyond the match of the
    device. num_unread: records whose reading has not ended. landing: what is on the device of it, once it is handed
    over."""

    key: bytes
    arrival: Arrival
    records: tuple[Record, ...]
    tier: str
    num_gained_tokens: int
    num_unread: int
    is_readable: bool = True
    is_done: bool = False
    landing: Landing | None = None


class Loader:
    """Works for one cache, in the engine's thread."""

    def __init__(
        self,
        layout: bytes,
        *,
        index: ColdIndex,
        disk: DiskTier | None,
        reclaimer: Reclaimer,
        takeover: Takeover,
        offloader: Offloader,
        counters: TierCounters,
        clock: Callable[[], float],
    ) -> None:
        self._layout = layout
        self._clock = clock
        self._index = index
        self._disk = disk
        self._reclaimer = reclaimer
        self._takeover = takeover
        self._offloader = offloader
        self._counters = counters
        self._loads: dict[bytes, Load] = {}
        self._readers: dict[Record, list[Load]] = {}
        self._whole: deque[Load] = deque()  # read, and to be handed over, first one first
        self._num_ended = 0

    @property
    def is_loading(self) -> bool:
        return bool(self._loads)

    @property
    def is_handing_over(self) -> bool:
        return bool(self._whole)

    def take_num_ended(self) -> int:
        """Loads that ended since the last call: whoever waited for one may look again."""
        number, self._num_ended = self._num_ended, 0
        return number

    def find(self, match: PrefixMatch) -> ColdMatch | None:
        """What colder tiers hold beyond a match of the device, if it is worth a load. O(pages beyond the match)."""
        if self._index.is_empty:
            return None
        node: PageNode | None = match.path
        if node is None or not node.is_attached:
            node = self._reclaimer.tree.roots.get(match.cache_root)
        key = root_key(self._layout, match.cache_root) if node is None else node_key(self._layout, node)
        limit = len(match.encoded) // TOKEN_BYTES - 1
        return self._index.deepest(node, key, bytes(match.encoded), match.num_tokens + MIN_LOAD_TOKENS, limit)

    def load(
        self, cold: ColdMatch, match: PrefixMatch, conversation_id: str | None, *, may_start: bool = True
    ) -> LoadState:
        """Bring it to the device. "started" and "waiting": it is on its way; "done": it can be matched now.

        "nothing": there is no room for it now, its content turned out to be of no use, or it may not be started. What
        host memory has is brought at once, as far as that takes a moment.
        """
        key = cold.missing_pages[-1] if cold.ending is None else cold.ending.name.key
        if key in self._loads:
            return "waiting"
        if not may_start:
            return "nothing"
        # The request needs a row of its own besides.
        if not self._reclaimer.can_make_room(len(cold.missing_pages) + 1, 2):
            return "nothing"
        unread = [record for record in cold.records if record.data is None]
        encoded = bytes(match.encoded[: cold.position * TOKEN_BYTES])
        owner: ConversationKey = (match.cache_root, conversation_id)
        runs = tuple(record for record in cold.records if record is not cold.ending)
        arrival = Arrival(owner, encoded, cold.position, runs, cold.ending)
        is_from_disk = any(record.data is None or record.is_ahead for record in cold.records)
        tier = "disk" if is_from_disk else "host"
        load = Load(key, arrival, cold.records, tier, cold.position - match.num_tokens, len(unread))
        for record in cold.records:
            self._index.hold(record)
        self._touch(cold.records[-1])
        self._loads[key] = load
        if not unread:
            self._whole.append(load)
            if len(self._whole) == 1:
                self.hand_over()
            if key in self._loads:
                return "started"
            return "done" if load.is_done else "nothing"
        for record in unread:
            self._read(record, load)
        return "started"

    def expect(self, cache_root: str, conversation_id: str) -> None:
        """The next prompt of a conversation is on its way: read what it will most likely need into host memory."""
        newest = self._index.newest(owner_key(cache_root, conversation_id))
        if not newest or any(_is_on_device(record) for record in newest):
            return
        unread = [
            record
            for record in dict.fromkeys(needed for record in newest for needed in record.chain())
            if record.data is None and record not in self._readers and not _is_on_device(record)
        ]
        budget = self._index.host.budget
        num_page_bytes = sum(record.num_bytes for record in unread if record.name.kind == "pages")
        num_snapshot_bytes = sum(record.num_bytes for record in unread) - num_page_bytes
        if not unread or num_page_bytes > budget.page_bytes or num_snapshot_bytes > budget.snapshot_bytes:
            return
        self._counters.num_expected += 1
        self._touch(newest[-1])
        for record in unread:
            record.is_ahead = True
            self._read(record, None)

    def _touch(self, record: Record) -> None:
        self._index.touch(record)
        if self._disk is not None:
            self._disk.touch(record)

    def _read(self, record: Record, load: Load | None) -> None:
        readers = self._readers.get(record)
        if readers is None:
            assert self._disk is not None  # what has no content in host memory is on disk
            self._readers[record] = readers = []
            self._disk.read(record, partial(self._arrived, record))
        if load is not None:
            readers.append(load)

    def _arrived(self, record: Record, content: Bytes | None) -> None:
        """A record was read, or cannot be: then it is forgotten, with all that needs it."""
        loads = self._readers.pop(record)
        if content is None:
            self._index.remove(record)
        elif record.is_attached:
            record.data = content
            self._index.host.add(record)
        elif record.num_holds:
            record.data = content
        for load in loads:
            load.num_unread -= 1
            load.is_readable &= content is not None
            if not load.num_unread and load.is_readable:
                self._whole.append(load)
            elif not load.num_unread:
                self._counters.num_failed_loads["unreadable"] += 1
                self._end(load)
        self._index.enforce_budgets()

    def hand_over(self) -> None:
        """Go on with what is whole, for a moment."""
        end_s = self._clock() + SLICE_S
        while self._whole:
            load = self._whole[0]
            try:
                if load.landing is None:
                    load.landing = self._takeover.begin(load.arrival)
                if self._takeover.advance(load.landing):
                    self._count(load, load.landing)
                    self._end(load)
            except TakeoverError as error:
                self._counters.num_failed_loads[error.reason] += 1
                self._end(load)
            if self._clock() >= end_s:
                return

    def give_way(self) -> bool:
        """What runs needs the room: give up what is handed over in part. False: there is no such load."""
        begun = [load for load in self._whole if load.landing is not None]
        for load in begun:
            self._counters.num_failed_loads["no_room"] += 1
            self._end(load)
        return bool(begun)

    def pinned_nodes(self) -> list[PageNode]:
        """For conservation checks: what holds pages that are handed over in part."""
        return [load.landing.node for load in self._whole if load.landing is not None]

    def _count(self, load: Load, landing: Landing) -> None:
        record, counters = load.arrival.ending, self._counters
        if landing.snapshot is not None and record is not None and record.is_attached:
            self._offloader.is_stored(landing.snapshot, record)
        counters.num_hits[load.tier] += 1
        counters.num_hit_tokens[load.tier] += load.num_gained_tokens
        counters.loaded_bytes += sum(one.num_bytes for one in load.records)
        load.is_done = True

    def _end(self, load: Load) -> None:
        """Well or badly: nothing is held for it any more."""
        del self._loads[load.key]
        self._num_ended += 1
        if load in self._whole:
            self._whole.remove(load)
        if load.landing is not None:
            self._takeover.end(load.landing)
            load.landing = None
        for record in load.records:
            record.is_ahead = False
            if load.is_done and not self._reclaimer.has_state:
                record.is_on_device = True
            self._index.let_go(record)
        self._index.enforce_budgets()


def _is_on_device(record: Record) -> bool:
    return record.is_on_device or any(user.is_on_device for user in record.users)

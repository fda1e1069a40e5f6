"""Which records there are, in which tier, found by the tokens of a prompt; and which leave when a tier is over budget.

Pure bookkeeping: bytes of files move elsewhere. A record exists while host memory or the disk holds it, and what needs
it exists with it. Every tier drops what was used longest ago; using a record uses what it needs too, so nothing is
dropped before its users are. For models with state, runs that no snapshot needs any more go at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from turnkeep.cache.encoded_tokens import TOKEN_BYTES
from turnkeep.cache.page_node import PageNode
from turnkeep.cache.prefix_tree import num_common_tokens
from turnkeep.cache.tiers.keys import page_key
from turnkeep.cache.tiers.record import Record, RecordKind, TierBudget

NUM_NEWEST = 2


@dataclass(slots=True, frozen=True)
class ColdMatch:
    """What colder tiers know of a prompt beyond what the device can use.

    ending: the state to go on from, for models without one the tail of a page; None where it ends with a full page.
    records: what must be in host memory to load it.
    """

    position: int
    ending: Record | None
    missing_pages: tuple[bytes, ...]  # keys of the full pages before `position` that the device lacks
    records: tuple[Record, ...]


class TierSpace:
    """The records that one tier holds, least recently used first, and their bytes by kind."""

    def __init__(self, budget: TierBudget, size: Callable[[Record], int]) -> None:
        self.budget = budget
        self.num_evicted = 0  # records that left it because it was over its budget
        self.used_bytes: dict[RecordKind, int] = {"pages": 0, "snapshot": 0}
        self.max_used_bytes: dict[RecordKind, int] = {"pages": 0, "snapshot": 0}  # at once, ever
        self._size = size
        self._order: dict[RecordKind, OrderedDict[Record, None]] = {"pages": OrderedDict(), "snapshot": OrderedDict()}

    def __contains__(self, record: Record) -> bool:
        return record in self._order[record.name.kind]

    def __len__(self) -> int:
        return sum(map(len, self._order.values()))

    def __iter__(self) -> Iterator[Record]:
        for order in self._order.values():
            yield from order

    @property
    def num_bytes(self) -> int:
        return sum(self.used_bytes.values())

    def num_records(self, kind: RecordKind) -> int:
        return len(self._order[kind])

    def add(self, record: Record) -> None:
        kind = record.name.kind
        if record not in self._order[kind]:
            self._order[kind][record] = None
            self.used_bytes[kind] += self._size(record)
            self.max_used_bytes[kind] = max(self.max_used_bytes[kind], self.used_bytes[kind])

    def discard(self, record: Record) -> None:
        kind = record.name.kind
        if record in self._order[kind]:
            del self._order[kind][record]
            self.used_bytes[kind] -= self._size(record)

    def touch(self, record: Record, *, is_last: bool = True) -> None:
        """Used just now, or the first to go from now on."""
        order = self._order[record.name.kind]
        if record in order:
            order.move_to_end(record, last=is_last)

    def victim(self) -> Record | None:
        """What should leave; None while the tier is within its budget, or holds only what may not go now."""
        for kind, order in self._order.items():
            if self.used_bytes[kind] > self.budget.of(kind):
                for record in order:
                    if not record.num_holds:
                        return record
        return None


class ColdIndex:
    """All records of one engine. `on_erased`: a file is not wanted any more."""

    def __init__(
        self,
        page_size: int,
        *,
        has_pages: bool,
        has_state: bool,
        host: TierBudget,
        disk: TierBudget,
        on_erased: Callable[[Record], None],
    ) -> None:
        self.host = TierSpace(host, lambda record: record.num_bytes)
        self.disk = TierSpace(disk, lambda record: record.file_bytes)
        self.pages: dict[bytes, tuple[Record, int]] = {}  # page key -> its run, and its place there
        self.suffixes: dict[bytes, dict[bytes, Record]] = {}  # page key -> tokens after it -> snapshot or tail
        self._owned: dict[bytes, dict[Record, None]] = {}  # conversation -> what was written for it, newest last
        self._page_size = page_size
        self._has_pages = has_pages
        self._has_state = has_state
        self._on_erased = on_erased

    @property
    def is_empty(self) -> bool:
        return not (self.pages or self.suffixes)

    def find(self, record: Record) -> Record | None:
        """The record of the same name that is there already."""
        name = record.name
        if not name.page_keys:
            return self.suffixes.get(name.parent, {}).get(name.suffix)
        run = self.pages.get(name.page_keys[-1])
        return None if run is None else run[0]

    def add(self, record: Record) -> bool:
        """Take in a record that a tier is about to hold. False: what it needs is not there, or it is there itself."""
        name = record.name
        if self.find(record) is not None:
            return False
        if self._has_pages and name.start:
            before = self.pages.get(name.parent)
            if before is None:
                return False
            record.needs = before[0]
            record.needs.users.add(record)
        if not name.page_keys:
            self.suffixes.setdefault(name.parent, {})[name.suffix] = record
        else:
            for index, key in enumerate(name.page_keys):
                self.pages.setdefault(key, (record, index))
        record.is_attached = True
        self.own(record)
        return True

    def own(self, record: Record) -> None:
        """The newest of its conversation from now on."""
        owner = record.name.owner
        if owner and (record.name.kind == "snapshot" or not self._has_state):
            owned = self._owned.setdefault(owner, {})
            owned.pop(record, None)
            owned[record] = None

    def newest(self, owner: bytes) -> list[Record]:
        """What a conversation's next prompt will go on from, most likely: its last turn's start and end."""
        return list(self._owned.get(owner, ()))[-NUM_NEWEST:]

    def forget(self, owner: bytes) -> None:
        """Remove what was written for a conversation, but for what others go on from as well."""
        for record in reversed(list(self._owned.get(owner, ()))):
            if not record.users:
                self.remove(record)

    def drop_covered(self, parent: bytes, tokens: bytes) -> None:
        """For models without state: tails of fewer tokens go, as `tokens` behind the page `parent` are about to be
        kept."""
        suffixes = self.suffixes.get(parent, {})
        for suffix in [one for one in suffixes if tokens.startswith(one)]:
            self.remove(suffixes[suffix])

    def hold(self, record: Record) -> None:
        """Keep its content in host memory until as many `let_go`."""
        record.num_holds += 1

    def let_go(self, record: Record) -> None:
        record.num_holds -= 1
        assert record.num_holds >= 0
        if not record.num_holds and not record.is_attached:
            record.data = None

    def touch(self, record: Record) -> None:
        """Used just now, and all it needs after it: what many need goes last."""
        used: Record | None = record
        while used is not None:
            self.host.touch(used)
            self.disk.touch(used)
            used = used.needs

    def supersede(self, record: Record) -> None:
        """Nobody is expected to ask for it again."""
        self.host.touch(record, is_last=False)
        self.disk.touch(record, is_last=False)

    def enforce_budgets(self) -> None:
        """Drop what is too much. O(records dropped), and the held ones in the way."""
        for tier, drop in ((self.host, self.drop_from_host), (self.disk, self.drop_from_disk)):
            while (record := tier.victim()) is not None:
                num_records = len(tier)
                drop(record)
                tier.num_evicted += num_records - len(tier)

    def drop_from_host(self, record: Record) -> None:
        self.host.discard(record)
        record.data = None
        if record not in self.disk:
            self.remove(record)

    def drop_from_disk(self, record: Record) -> None:
        """Erase its file; it lives on only while host memory has it."""
        self.disk.discard(record)
        self._on_erased(record)
        if record not in self.host:
            self.remove(record)

    def remove(self, record: Record) -> None:
        """Take a record out of every tier, with all that need it and what nothing needs any more."""
        if not record.is_attached:
            return
        waiting, needs = [record], record.needs
        while waiting:
            gone = waiting.pop()
            waiting.extend(gone.users)
            self._unlink(gone)
        while self._has_state and needs is not None and not needs.users and not needs.num_holds:
            gone, needs = needs, needs.needs
            self._unlink(gone)

    def _unlink(self, record: Record) -> None:
        name = record.name
        record.is_attached = False
        record.users.clear()
        if record.needs is not None:
            record.needs.users.discard(record)
        if not name.page_keys:
            suffixes = self.suffixes[name.parent]
            del suffixes[name.suffix]
            if not suffixes:
                del self.suffixes[name.parent]
        for key in name.page_keys:
            if self.pages.get(key, (None, 0))[0] is record:
                del self.pages[key]
        owned = self._owned.get(name.owner)
        if owned is not None and record in owned:
            del owned[record]
            if not owned:
                del self._owned[name.owner]
        self.host.discard(record)
        if record in self.disk:
            self.disk.discard(record)
            self._on_erased(record)
        if not record.num_holds:
            record.data = None

    # Finding

    def deepest(self, node: PageNode | None, key: bytes, encoded: bytes, least: int, limit: int) -> ColdMatch | None:
        """The deepest position in [least, limit] of a prompt that can be gone on from with what colder tiers hold.

        node: the device's node of the prompt's first full pages, `key` its key; None where the device has none.
        """
        page_bytes = self._page_size * TOKEN_BYTES
        offset = 0 if node is None else node.end * TOKEN_BYTES
        missing: list[bytes] = []
        best: tuple[int, Record | None, int] | None = None
        while True:
            suffixes = self.suffixes.get(key)
            rest = encoded[offset : min(limit * TOKEN_BYTES, offset + page_bytes - TOKEN_BYTES)]
            if not self._has_state:
                record, num_common = _closest(suffixes or {}, rest)
                if record is not None or missing:
                    best = (offset // TOKEN_BYTES + num_common, record, len(missing))
            elif suffixes is not None:
                record = _longest(suffixes, rest)
                if record is not None:
                    best = (record.name.position, record, len(missing))
            if offset + page_bytes > limit * TOKEN_BYTES:
                break
            page = encoded[offset : offset + page_bytes]
            node = None if node is None else node.children.get(page)
            key = page_key(key, page) if node is None or node.tier_key is None else node.tier_key
            if node is None:
                if self._has_pages and key not in self.pages:
                    break
                missing.append(key)
            offset += page_bytes
        if best is None or best[0] < least:
            return None
        position, ending, num_missing = best
        pages = tuple(missing[:num_missing]) if self._has_pages else ()
        records = dict.fromkeys(self.pages[page][0] for page in pages)
        return ColdMatch(position, ending, pages, (*records, *(() if ending is None else (ending,))))

    def check(self) -> None:
        """For tests: recompute every link and every count. Raises AssertionError."""
        records = {record for record, _ in self.pages.values()}
        records.update(record for suffixes in self.suffixes.values() for record in suffixes.values())
        held = {*self.host, *self.disk}
        assert records == held, "the records that can be found differ from those that a tier holds"
        for record in records:
            assert record.is_attached
            assert (record.data is not None) == (record in self.host), "content outside the host tier"
            assert record.needs is None or (record.needs in records and record in record.needs.users)
            assert record.users == {other for other in records if other.needs is record}
            assert (record.needs is None) == (record.name.start == 0 or not self._has_pages)
        for tier in (self.host, self.disk):
            for kind in ("pages", "snapshot"):
                sizes = [tier._size(record) for record in tier if record.name.kind == kind]
                assert tier.used_bytes[kind] == sum(sizes), f"bytes of {kind} are counted wrongly"


def _longest(suffixes: dict[bytes, Record], rest: bytes) -> Record | None:
    for end in range(len(rest), -1, -TOKEN_BYTES):
        found = suffixes.get(rest[:end])
        if found is not None:
            return found
    return None


def _closest(tails: dict[bytes, Record], rest: bytes) -> tuple[Record | None, int]:
    """The tail that shares most leading tokens with `rest`, and how many."""
    best, best_length = None, 0
    for suffix, record in tails.items():
        length = num_common_tokens(suffix, rest)
        if length > best_length:
            best, best_length = record, length
    return best, best_length

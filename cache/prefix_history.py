"""Which prefixes were seen before, whether or not the cache still holds them: digests of pages, without tokens.

Finds where a prompt leaves what is known, who computed the known part, and the shared prefixes on its way. A digest
that collides misleads a forecast, never a match. Bounded in pages and in shared prefixes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from turnkeep.cache.encoded_tokens import TOKEN_BYTES, page_digests
from turnkeep.cache.page_node import PageNode

Value = TypeVar("Value")


@dataclass(slots=True, frozen=True)
class Mark:
    """A token position of a prefix that may be asked for again: digest of the full pages before it, and the rest."""

    position: int
    digest: int
    suffix: bytes


class PagePrefixes:
    """digests[i] is that of the first i pages of one prompt."""

    def __init__(
        self,
        cache_root: str,
        encoded: bytes | bytearray,
        page_size: int,
        path: PageNode | None,
        known: Sequence[int] = (),
        following: Sequence[int] = (),
    ) -> None:
        """path: full pages that the prompt runs through. known: digests of that path, as far as they are at hand.
        following: its last one, and those of pages behind it."""
        self.encoded = encoded
        self._width = page_size * TOKEN_BYTES
        self._page_size = page_size
        self.digests = [hash(cache_root)] if path is None else _digests_of(path, known, path.end // page_size)
        self.digests += following[1:]
        self.extend(encoded)

    @property
    def num_pages(self) -> int:
        return len(self.digests) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.encoded) // TOKEN_BYTES

    def extend(self, encoded: bytes | bytearray) -> None:
        """More tokens are known: `encoded` starts with those known before. O(new pages)."""
        self.encoded = encoded
        if len(encoded) // self._width > self.num_pages:
            start = self.num_pages * self._page_size
            self.digests += page_digests(self.digests[-1], encoded, start, self._page_size)[1:]

    def mark(self, position: int) -> Mark:
        """The prefix of `position` tokens, 0 < position <= known tokens."""
        page = (position - 1) // self._page_size
        suffix = bytes(self.encoded[page * self._width : position * TOKEN_BYTES])
        return Mark(position, self.digests[page], suffix)

    def repeats(self, mark: Mark) -> bool:
        """Whether the prompt starts with the prefix of `mark`."""
        page = (mark.position - 1) // self._page_size
        if page >= len(self.digests) or self.digests[page] != mark.digest:
            return False
        offset = page * self._width
        return self.encoded[offset : offset + len(mark.suffix)] == mark.suffix


def _digests_of(node: PageNode, known: Sequence[int], num_pages: int) -> list[int]:
    """Those of the root, ..., of `node`, the num_pages-th full page."""
    if len(known) > num_pages and known[num_pages] == node.digest:
        return list(known[: num_pages + 1])
    digests = []
    walk: PageNode | None = node
    while walk is not None:
        digests.append(walk.digest)
        walk = walk.parent
    digests.reverse()
    return digests


class PrefixHistory:
    """Pages by digest with the number of the line of conversation that computed them, max_pages of them or a prompt's.

    Two generations: what was used since the younger one began, and what only the one before it has. The younger one
    is full with half of all, then the older one is forgotten. All of a prompt is remembered at once, so the pages of it
    that are young already are the first ones, and cost nothing.
    """

    def __init__(self, max_pages: int = 1 << 20) -> None:
        self._max_young = max(max_pages // 2, 1)
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def num_known_pages(self, prefixes: PagePrefixes) -> int:
        """Pages from the start that were seen before. O(log pages): they are a prefix, but for what aged out."""
        num_young = _num_leading(self._young, prefixes.digests, 0, prefixes.num_pages)
        return _num_leading(self._old, prefixes.digests, num_young, prefixes.num_pages)

    def line_of(self, digest: int) -> int | None:
        """The line that computed the page first, as far as is known."""
        return self._young.get(digest, self._old.get(digest))

    def remember(self, prefixes: PagePrefixes, num_known: int, line: int) -> None:
        """`line` went through all these pages; those beyond the first num_known are its own."""
        digests = prefixes.digests
        if len(self._young) + prefixes.num_pages > self._max_young:
            self._young, self._old = {}, self._young
        young, old = self._young, self._old
        num_young = _num_leading(young, digests, 0, num_known)
        for digest in digests[num_young + 1 : num_known + 1]:
            young[digest] = old.pop(digest, line)
        own = digests[num_known + 1 :]
        for digest in filter(old.__contains__, own):
            del old[digest]
        young.update(dict.fromkeys(own, line))


def _num_leading(known: dict[int, int], digests: Sequence[int], lower: int, upper: int) -> int:
    """Pages from the start that are known, of at most `upper`, where the first `lower` are. O(log pages)."""
    while lower < upper:
        middle = (lower + upper + 1) // 2
        if digests[middle] in known:
            lower = middle
        else:
            upper = middle - 1
    return lower


class MarkIndex(Generic[Value]):
    """Values by mark, the least recently put ones forgotten beyond max_marks; found along a prompt's pages."""

    def __init__(self, max_marks: int = 4096) -> None:
        self._max_marks = max_marks
        self._values: OrderedDict[Mark, Value] = OrderedDict()
        self._by_page: dict[int, list[Mark]] = {}

    def get(self, mark: Mark) -> Value | None:
        return self._values.get(mark)

    def put(self, mark: Mark, value: Value) -> None:
        """Set or refresh."""
        if mark not in self._values:
            self._by_page.setdefault(mark.digest, []).append(mark)
        self._values[mark] = value
        self._values.move_to_end(mark)
        if len(self._values) > self._max_marks:
            self._forget(next(iter(self._values)))

    def on_path(self, prefixes: PagePrefixes) -> Iterator[tuple[Mark, Value]]:
        """What the prompt repeats, shallowest first."""
        if len(self._values) < len(prefixes.digests):
            found = [mark for mark in self._values if prefixes.repeats(mark)]
        else:
            by_page = self._by_page
            near = (by_page[digest] for digest in prefixes.digests if digest in by_page)
            found = [mark for marks in near for mark in marks if prefixes.repeats(mark)]
        for mark in sorted(found, key=lambda mark: mark.position):
            yield mark, self._values[mark]

    def _forget(self, mark: Mark) -> None:
        del self._values[mark]
        marks = self._by_page[mark.digest]
        marks.remove(mark)
        if not marks:
            del self._by_page[mark.digest]

"""How packed sequences are cut into chunks of equal width, and in which order and in which spans chunks are computed.

Chunks are ordered by their index within the sequence, longest sequences first: all first chunks, then all second
chunks, ... The sequences that still have a chunk at some index are then always the first ones, so one step of the
recurrence between chunks is one operation on contiguous rows. A span is a run of whole chunk indices small enough for
its intermediate results to stay in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

MAX_SPAN_TOKENS = 512


@dataclass(slots=True, frozen=True)
class Span:
    """Chunk indices [first, last) of all sequences that have them.

    counts[k]: sequences with chunk first + k (falling); pieces: (first slot, first packed token, number of tokens) of
    every chunk, where slot counts the span's tokens with padding; starts: for every chunk, where the state at its
    start lies in [states before the span | states after each chunk]; is_contiguous: the slots are consecutive packed
    tokens, with padding at the end only. A rank is a place in `ChunkLayout.order`.
    """

    width: int
    first: int
    counts: tuple[int, ...]
    pieces: tuple[tuple[int, int, int], ...]
    starts: tuple[int, ...]
    is_contiguous: bool

    @property
    def num_chunks(self) -> int:
        return len(self.pieces)

    @property
    def end(self) -> int:
        """Tokens of a sequence up to the end of the span."""
        return (self.first + len(self.counts)) * self.width

    def chunk(self, rank: int, token: int) -> int:
        """The chunk, counted in this span, of token `token` (from 0) of the sequence at `rank`; it must lie here."""
        return sum(self.counts[: token // self.width - self.first]) + rank

    def to_chunks(self, packed: torch.Tensor) -> torch.Tensor:
        """Packed [T, ...] -> this span's [c, width, ...], padded with zeros."""
        size = self.num_chunks * self.width
        if self.is_contiguous:
            _, start, _ = self.pieces[0]
            num_tokens = sum(count for _, _, count in self.pieces)
            part = packed[start : start + num_tokens]
            if num_tokens < size:
                part = torch.cat((part, part.new_zeros(size - num_tokens, *part.shape[1:])))
        else:
            part = packed.new_zeros(size, *packed.shape[1:])
            for slot, start, count in self.pieces:
                part[slot : slot + count] = packed[start : start + count]
        return part.view(self.num_chunks, self.width, *packed.shape[1:])

    def from_chunks(self, chunks: torch.Tensor, packed: torch.Tensor) -> None:
        """Write chunks [c, width, ...] to their tokens of packed [T, ...]."""
        flat = chunks.flatten(0, 1)
        if self.is_contiguous:
            _, start, _ = self.pieces[0]
            num_tokens = sum(count for _, _, count in self.pieces)
            packed[start : start + num_tokens] = flat[:num_tokens]
        else:
            for slot, start, count in self.pieces:
                packed[start : start + count] = flat[slot : slot + count]


@dataclass(slots=True, frozen=True)
class ChunkLayout:
    """The cut of one packed batch. order: sequences, longest first."""

    width: int
    seq_lens: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, seq_lens: Sequence[int], max_width: int) -> ChunkLayout:
        """Width: max_width, or what the longest sequence needs rounded up to a multiple of 16, if that is less."""
        width = min(max_width, -(-max(seq_lens) // 16) * 16)
        order = sorted(range(len(seq_lens)), key=lambda r: -seq_lens[r])
        return cls(width, tuple(seq_lens), tuple(order))

    def spans(self) -> Iterator[Span]:
        """All spans, in order: at least one chunk index each, at most MAX_SPAN_TOKENS slots if that is more."""
        num_indices = -(-self.seq_lens[self.order[0]] // self.width)
        first = 0
        while first < num_indices:
            counts: list[int] = []
            for index in range(first, num_indices):
                count = sum(length > index * self.width for length in self.seq_lens)
                if counts and (sum(counts) + count) * self.width > MAX_SPAN_TOKENS:
                    break
                counts.append(count)
            yield self._span(first, counts)
            first += len(counts)

    def _span(self, first: int, counts: Sequence[int]) -> Span:
        starts = [0]
        for length in self.seq_lens:
            starts.append(starts[-1] + length)
        pieces: list[tuple[int, int, int]] = []
        before: list[int] = []
        for index, count in enumerate(counts, first):
            for sequence in self.order[:count]:
                start = starts[sequence] + index * self.width
                num_tokens = min(self.width, starts[sequence + 1] - start)
                pieces.append((len(pieces) * self.width, start, num_tokens))
        # The same rank one index earlier; the states before the span stand in front of all chunks.
        level = 0
        for previous, count in zip((counts[0], *counts), counts, strict=False):
            before += range(level, level + count)
            level += previous
        return Span(self.width, first, tuple(counts), tuple(pieces), tuple(before), counts[0] == 1)

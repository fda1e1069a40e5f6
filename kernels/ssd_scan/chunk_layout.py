"""How packed sequences are cut into equal chunks, and in which order the chunks lie.

Chunks are ordered by their index within the sequence, longest sequences first: all first chunks, then all second
chunks, ... The sequences that still have a chunk at some index are then always the first ones, so one step of the
recurrence between chunks is one operation on contiguous rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class ChunkLayout:
    """Chunks of `width` tokens; the last one of a sequence is padded.

    order: sequences, longest first. counts[k]: sequences that have a chunk k (falling). offsets[k]: the first of these
    chunks in the list of all chunks.
    """

    width: int
    seq_lens: tuple[int, ...]
    order: tuple[int, ...]
    counts: tuple[int, ...]
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, seq_lens: Sequence[int], chunk_size: int) -> ChunkLayout:
        """Width: chunk_size, or what the longest sequence needs rounded up to a multiple of 16, if that is less."""
        longest = max(seq_lens)
        width = min(chunk_size, -(-longest // 16) * 16)
        order = tuple(sorted(range(len(seq_lens)), key=lambda r: -seq_lens[r]))
        counts = tuple(sum(length > index * width for length in seq_lens) for index in range(-(-longest // width)))
        offsets, total = [], 0
        for count in counts:
            offsets.append(total)
            total += count
        return cls(width, tuple(seq_lens), order, counts, tuple(offsets))

    @property
    def num_chunks(self) -> int:
        return self.offsets[-1] + self.counts[-1]

    def chunk(self, rank: int, length: int) -> int:
        """The chunk that holds token `length` (counted from 1) of the sequence at place `rank` of the order."""
        return self.offsets[(length - 1) // self.width] + rank

    def shifts(self) -> list[tuple[int, int]]:
        """(shift, number of tokens) of every chunk in packed order: packed token t lies in slot t + shift."""
        place = {sequence: rank for rank, sequence in enumerate(self.order)}
        shifts, start = [], 0
        for sequence, length in enumerate(self.seq_lens):
            for first in range(0, length, self.width):
                slot = self.chunk(place[sequence], first + 1) * self.width
                shifts.append((slot - start - first, min(self.width, length - first)))
            start += length
        return shifts

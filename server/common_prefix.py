"""How far two texts, or two rows of tokens, are the same from their start. Compares in blocks: histories are long."""

from __future__ import annotations

from collections.abc import Sequence

COMPARED_BLOCK_CHARS = 4096
COMPARED_BLOCK_TOKENS = 1024


def common_prefix_length(first: str, second: str) -> int:
    """Number of leading characters two texts share."""
    limit = min(len(first), len(second))
    start = 0
    while start < limit and first[start : start + COMPARED_BLOCK_CHARS] == second[start : start + COMPARED_BLOCK_CHARS]:
        start += COMPARED_BLOCK_CHARS
    if start >= limit:
        return limit
    low, high = start, min(limit, start + COMPARED_BLOCK_CHARS)
    while low < high:  # the first `low` characters are equal, the first `high + 1` are not
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def common_prefix_of(texts: Sequence[str]) -> str:
    """What all texts (one at least) begin with."""
    shared = len(texts[0])
    for text in texts[1:]:
        shared = min(shared, common_prefix_length(texts[0], text))
    return texts[0][:shared]


def common_prefix_tokens(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of leading tokens two sequences of one type share."""
    limit = min(len(first), len(second))
    start = 0
    while start < limit:
        end = min(limit, start + COMPARED_BLOCK_TOKENS)
        if first[start:end] != second[start:end]:
            while first[start] == second[start]:
                start += 1
            return start
        start = end
    return limit

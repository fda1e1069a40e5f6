"""Copies inside the pools that a step carries out before it computes: ids only, the engine's runner moves the bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class PageCopy:
    """Copy the first `num_tokens` slots of page `source` to page `target` in every attention layer (copy-on-write)."""

    source: int
    target: int
    num_tokens: int


@dataclass(slots=True, frozen=True)
class RowCopy:
    """Copy state row `source` to row `target` in every recurrent layer."""

    source: int
    target: int


@dataclass(slots=True, frozen=True)
class HistoryFold:
    """Row `target` becomes row `source` moved on by the first `num_tokens` tokens of history slot `slot`."""

    slot: int
    num_tokens: int
    source: int
    target: int

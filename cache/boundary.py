"""Stable positions of a conversation: where a snapshot is worth keeping (design: conversations and boundaries)."""

from __future__ import annotations

from typing import Literal

import msgspec

BoundaryKind = Literal[
    "trunk", "turn_start", "turn_end", "declared", "branch", "likely_branch", "periodic", "fixed", "suspended",
    "page_end",
]  # fmt: skip


class Boundary(msgspec.Struct, frozen=True, array_like=True):
    """A token position that later prompts are expected to repeat up to.

    position counts the tokens before it. The engine's own kinds: `suspended`, the state of a preempted request, and
    `page_end`, the last full page of an answer so far, where its turn may end.
    """

    position: int
    kind: BoundaryKind

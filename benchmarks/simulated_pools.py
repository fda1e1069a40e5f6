"""State rows and replay histories without arithmetic: hashes of the tokens before them, checked when they are read."""

from __future__ import annotations

from collections.abc import Iterable

from turnkeep.scheduler.step_plan import StepItem, StepPlan


def hash_after(value: int, token_ids: Iterable[int]) -> int:
    """Of a longer history, from that of a shorter one; 0 is that of none."""
    for token_id in token_ids:
        value = (value * 1_000_003 + token_id + 7) % ((1 << 61) - 1)
    return value


class Fault(AssertionError):
    """Something that must never happen."""


def require(is_true: bool, message: str) -> None:
    if not is_true:
        raise Fault(message)


class Pools:
    """State rows as hashes of the tokens before their position, history slots as accepted tokens."""

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}
        self._slots: dict[int, list[int]] = {}

    def prepare(self, plan: StepPlan) -> None:
        """Folds, all sources before any target, then copies."""
        self._rows |= {
            fold.target: hash_after(self._rows[fold.source], self._slots[fold.slot][: fold.num_tokens])
            for fold in plan.folds
        }
        self._rows |= {copied.target: self._rows[copied.source] for copied in plan.row_copies}

    def compute(self, item: StepItem, known: list[int], accepted: list[int]) -> None:
        """known: all tokens of the request; accepted: those of its draft that are right."""
        if item.state_row is None:
            return
        num_behind = item.replay.num_tokens if item.replay is not None else 0
        at = item.start - num_behind
        value = hash_after(0, known[:at])
        is_right = at == 0 or self._rows[item.state_row] == value
        require(is_right, f"row {item.state_row} of {item.request_id} is not at {at}")
        if item.replay is not None:
            history = self._slots.get(item.replay.slot, [])[:num_behind]
            require(history == known[at : item.start], f"the history of {item.request_id} is another one")
            self._slots[item.replay.slot] = [*history, *item.token_ids, *accepted]
            return
        exports = dict(item.exports)
        for position, token_id in enumerate(item.token_ids, start=item.start + 1):
            value = hash_after(value, (token_id,))
            if position in exports:
                self._rows[exports[position]] = value
        self._rows[item.state_row] = value

"""A model without arithmetic: pages and rows hold running hashes of the token history, checked on every read.

A wrong page, a stale row, a copy that was lost or a token computed twice shows as an AssertionError, and the sampled
tokens depend on the whole history, so that outputs can be compared with a computation that knows no cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from turnkeep.scheduler.step_plan import SampledToken, StepItem, StepOutput, StepPlan

_PRIME = (1 << 61) - 1
POISON = -1


def extend_hash(history: int, token_id: int) -> int:
    """Hash of a history that is longer by one token; the empty history is 0."""
    return (history * 1_000_003 + token_id + 7) % _PRIME


def next_token(history: int, vocab_size: int) -> int:
    """What the probe samples after a history."""
    return (history >> 7) % vocab_size


def expected_output(prompt_ids: Sequence[int], num_tokens: int, vocab_size: int) -> list[int]:
    """The tokens that a request must give, computed without any cache."""
    history = 0
    for token_id in prompt_ids:
        history = extend_hash(history, token_id)
    output: list[int] = []
    for _ in range(num_tokens):
        output.append(next_token(history, vocab_size))
        history = extend_hash(history, output[-1])
    return output


class ContentProbe:
    """A runner over pages [P][page_size] of (token, hash) and rows [S] of hashes."""

    def __init__(self, *, num_pages: int, num_state_rows: int, page_size: int, vocab_size: int) -> None:
        self.pages: list[list[tuple[int, int]]] = [[(POISON, POISON)] * page_size for _ in range(num_pages)]
        self.rows = [POISON] * num_state_rows
        self.page_size = page_size
        self.vocab_size = vocab_size
        self.num_steps = 0
        self.num_computed_tokens = 0
        self.fail_next = 0  # that many coming steps raise after writing nothing
        self.plans: list[StepPlan] = []
        self.keeps_plans = False

    def run(self, plan: StepPlan) -> StepOutput:
        if self.keeps_plans:
            self.plans.append(plan)
        if self.fail_next:
            self.fail_next -= 1
            raise RuntimeError("the probe was told to fail")
        for page_copy in plan.page_copies:
            source = self.pages[page_copy.source][: page_copy.num_tokens]
            self.pages[page_copy.target][: page_copy.num_tokens] = source
        for row_copy in plan.row_copies:
            self.rows[row_copy.target] = self.rows[row_copy.source]
        self._check_owners(plan)
        self.num_steps += 1
        histories = {item.request_id: self._compute(item) for item in plan.items}
        tokens = {
            item.request_id: (SampledToken(next_token(histories[item.request_id], self.vocab_size)),)
            for item in plan.items
            if item.sampling is not None
        }
        return StepOutput(tokens=tokens, duration_s=0.0)

    def _check_owners(self, plan: StepPlan) -> None:
        """No row is written by two, and no page slot either."""
        written: set[object] = set()
        for item in plan.items:
            own: list[object] = [("row", row) for _, row in item.exports]
            if item.state_row is not None:
                own.append(("row", item.state_row))
                assert item.state_row != 0
            if len(item.page_ids):
                own += [self._slot(item, position) for position in range(item.start, item.start + len(item.token_ids))]
            for slot in own:
                assert slot not in written, f"{slot} is written twice in one step"
                written.add(slot)

    def _slot(self, item: StepItem, position: int) -> tuple[int, int]:
        page = int(item.page_ids[position // self.page_size])
        assert page != 0, "page 0 is never allocated"
        return page, position % self.page_size

    def _compute(self, item: StepItem) -> int:
        history = self._history(item)
        exports = dict(item.exports)
        assert all(item.start < position <= item.start + len(item.token_ids) for position in exports)
        for offset, token_id in enumerate(item.token_ids):
            history = extend_hash(history, token_id)
            if len(item.page_ids):
                page, slot = self._slot(item, item.start + offset)
                self.pages[page][slot] = (token_id, history)
            if item.start + offset + 1 in exports:
                self.rows[exports[item.start + offset + 1]] = history
        if item.state_row is not None:
            self.rows[item.state_row] = history
        self.num_computed_tokens += len(item.token_ids)
        return history

    def _history(self, item: StepItem) -> int:
        """What the pools say of the tokens before this step."""
        history = 0
        if len(item.page_ids):
            for position in range(item.start):
                page, slot = self._slot(item, position)
                token_id, stored = self.pages[page][slot]
                history = extend_hash(history, token_id)
                assert stored == history, f"page {page} slot {slot} does not hold position {position}"
        if item.state_row is not None and item.start > 0:
            stored = self.rows[item.state_row]
            assert not len(item.page_ids) or stored == history, f"row {item.state_row} is not at {item.start}"
            history = stored
        return history

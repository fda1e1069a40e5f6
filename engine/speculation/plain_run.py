"""Plain steps of the same requests in a row, one token of each, whose entries in a draft head's pages are made later.

One pass over many tokens costs little more than one over a single token, and most steps without drafts are followed
by another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from turnkeep.scheduler.step_plan import StepItem


@dataclass(slots=True)
class Pending:
    """Tokens whose entries are not in the pages yet: [start, start + len(token_ids)), with the hidden state before
    each, in pieces [n, hidden_size]; then, where a tree grows, the root."""

    token_ids: list[int]
    start: int
    hidden: list[torch.Tensor]
    page_ids: npt.NDArray[np.int32]

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class PlainRun:
    """At least one step; `before` [R, hidden_size] are the hidden states before its tokens, `after` those after."""

    def __init__(self, before: torch.Tensor, items: Sequence[StepItem], after: torch.Tensor) -> None:
        self._hidden = [before, after]
        self._steps = [items]

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def num_requests(self) -> int:
        """Whose tokens each step has."""
        return len(self._steps[-1])

    def __contains__(self, request_id: str) -> bool:
        return any(item.request_id == request_id for item in self._steps[-1])

    def add(self, items: Sequence[StepItem], after: torch.Tensor) -> None:
        """One more step, which goes on with the last."""
        self._steps.append(items)
        self._hidden.append(after)

    def goes_on_in(self, items: Sequence[StepItem], page_size: int) -> bool:
        """Whether a step of the same requests begins with the tokens that follow, in the same rows and pages."""
        for old, new in zip(self._steps[-1], items, strict=False):
            start = old.start
            if new.start != start + 1 or new.request_id != old.request_id or new.state_row != old.state_row:
                return False
            if (new.replay is None) != (old.replay is None) or new.draft is not None:
                return False
            page = start // page_size
            if new.page_ids[page] != old.page_ids[page]:
                return False
        return True

    def ends(self) -> dict[str, tuple[int, torch.Tensor]]:
        """request id -> (tokens that are computed, hidden state [1, hidden_size] after the last of them)."""
        after = self._hidden[-1]
        return {item.request_id: (item.start + 1, after[row : row + 1]) for row, item in enumerate(self._steps[-1])}

    def pending(self) -> list[Pending]:
        """What was put off, by request."""
        hidden = torch.stack(self._hidden[:-1])
        columns = zip(*self._steps, strict=True)
        return [
            Pending([item.token_ids[0] for item in own], own[0].start, [hidden[:, row]], own[-1].page_ids)
            for row, own in enumerate(columns)
        ]

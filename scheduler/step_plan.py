"""What one step computes, as values only: the runner needs the plan and the pools, nothing else.

A plan holds no tensors and no live objects, so tests assert on whole plans.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from turnkeep.cache.copies import HistoryFold, PageCopy, RowCopy
from turnkeep.scheduler.drafts import DraftTree, TreeGrant
from turnkeep.scheduler.request import SamplingParams


@dataclass(slots=True, frozen=True)
class SamplingHistory:
    """What penalties and grammars need of a request: its output so far, and its prompt for a repetition penalty.

    Only present when one of them is set.
    """

    prompt_ids: list[int]
    output_ids: list[int]


class Replay(NamedTuple):
    """Where the accepted tokens of a request lie that its state row does not contain yet; what the step accepts is
    added there. Models without state have none: slot 0 and no tokens."""

    slot: int
    num_tokens: int


@dataclass(slots=True)
class StepItem:
    """Compute known tokens [start, start + len(token_ids)) of one request. Never changed; not frozen: many are made."""

    request_id: str
    token_ids: list[int]
    start: int  # tokens computed before this step
    page_ids: npt.NDArray[np.int32]  # pages covering [0, start + len(token_ids)), and what a draft may add
    state_row: int | None
    exports: tuple[tuple[int, int], ...]  # (position, row): save the state of that position; start < position <= end
    sampling: SamplingParams | None  # None: the chunk ends before the last known token, nothing is sampled
    num_output_tokens: int = 0  # generated so far (for min_new_tokens)
    history: SamplingHistory | None = None
    replay: Replay | None = None  # the item's one token is the root of a tree; the row is read, not moved on
    draft: DraftTree | None = None  # the rest of that tree; None: the root alone
    context_ids: tuple[int, ...] | None = None  # tokens before start, once, where a drafter looks at tokens


@dataclass(slots=True, frozen=True)
class StepPlan:
    """Folds first, then copies, then all items in one forward pass. Items with one token and context come first,
    trees after them."""

    page_copies: tuple[PageCopy, ...]
    row_copies: tuple[RowCopy, ...]
    items: tuple[StepItem, ...]
    folds: tuple[HistoryFold, ...] = ()
    tree_grant: TreeGrant | None = None  # what may be proposed for the next step; None: nothing

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed: the items' own and the nodes of their drafts."""
        return sum([len(item.token_ids) + (item.draft.num_nodes if item.draft else 0) for item in self.items])


@dataclass(slots=True, frozen=True)
class SampledToken:
    """The token sampled after the last position of an item; logprobs only when asked for."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True, frozen=True)
class StepOutput:
    """request_id -> sampled tokens, for the items of the plan that wanted one: more than one where a draft was right.

    errors: request_id -> why no token could be sampled for it alone (the model gave it no finite logits).
    accepted: request_id -> nodes of its item's draft that were right, along one path; as many as tokens but one.
    drafts: request_id -> what is proposed to follow the last of its tokens. draft_s: the part of duration_s it took.
    """

    tokens: dict[str, tuple[SampledToken, ...]]
    duration_s: float
    errors: dict[str, str] = field(default_factory=dict)
    accepted: dict[str, tuple[int, ...]] = field(default_factory=dict)
    drafts: dict[str, DraftTree] = field(default_factory=dict)
    draft_s: float = 0.0

"""What a drafter is: told what a step computed, it proposes what may come next. Where its own state lies is said here.

A draft head's keys and values are further layers of the same pages, its entry for (hidden state of token t - 1, token
t) at slot t, so a page depends on the tokens up to its end alone and can be shared. The hidden state that its next
entry needs is a part of the state row, like the window of a convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from turnkeep.scheduler.drafts import DraftTree, TreeGrant
from turnkeep.scheduler.request import SamplingParams
from turnkeep.scheduler.step_plan import StepItem


@dataclass(slots=True, frozen=True)
class DraftRequest:
    """One request after a step that computed its tokens [start, start + len(token_ids))."""

    request_id: str
    token_ids: Sequence[int]  # what was computed: a part of the prompt, or the root and what was accepted
    start: int
    next_token: int | None  # sampled after them; None: the prompt goes on or the request is over, nothing is proposed
    hidden: torch.Tensor | None  # [len(token_ids), hidden_size], normed, of the target; None where none is wanted
    previous_hidden: torch.Tensor | None  # [hidden_size], normed, of token start - 1; zeros at the start of a sequence
    page_ids: npt.NDArray[np.int32]  # pages that cover at least the computed tokens
    sampling: SamplingParams | None  # with the noise that the target will use; None like next_token
    context_ids: Sequence[int] | None = None  # tokens before `start`, with the first step of a request that was opened


class Drafter(Protocol):
    """Proposes trees. The tokens of a request never depend on what is proposed, only its speed does."""

    @property
    def needs_hidden(self) -> bool:
        """Whether it is a head on the target's hidden states; False: it looks at tokens alone."""

    def propose(self, requests: Sequence[DraftRequest], grant: TreeGrant) -> list[DraftTree | None]:
        """Take over what was computed, then one tree for each request within the grant, or None for none.

        Called after every step, with every request of it that was not put off; a grant of no nodes asks for taking
        over alone.
        """

    def put_off(self, items: Sequence[StepItem], normed: torch.Tensor) -> bool:
        """Where nothing is to be proposed: take over later what a step computed of requests that had one token each,
        the hidden states after them being normed [len(items), hidden_size]. False: `propose` has to be asked."""

    def settle(self, going_on: Sequence[StepItem] | None = None) -> bool:
        """Carry out what was put off, before anything but a forward pass reads or writes pages or rows. going_on: the
        items of a step that begins: what they go on with may wait as long as no other request joins them. True: it
        does, and the same rows with it."""

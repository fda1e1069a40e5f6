"""The content probe with drafts: trees of which a part is right, rows that stay behind, and histories that say of what.

A history slot holds the accepted tokens that its row does not contain; a fold that is lost, doubled, or carried out of
order shows as a row that does not agree with the pages.
"""

from __future__ import annotations

import random

from content_probe import ContentProbe, extend_hash, next_token

from turnkeep.scheduler.drafts import DraftTree, TreeGrant
from turnkeep.scheduler.step_plan import SampledToken, StepItem, StepOutput, StepPlan


class DraftingProbe(ContentProbe):
    """capacity: tokens of a history slot."""

    def __init__(self, *, num_history_slots: int, capacity: int, seed: int, **sizes: int) -> None:
        super().__init__(**sizes)
        self.slots: list[list[int]] = [[] for _ in range(num_history_slots)]
        self.capacity = capacity
        self.random = random.Random(seed)
        self.num_accepted = 0
        self.num_folds = 0

    def run(self, plan: StepPlan) -> StepOutput:
        if self.fail_next and self.random.random() < 0.5:
            self._fold(plan)  # a step may fail before or after its folds
        if not self.fail_next:
            self._fold(plan)
        output = super().run(plan)
        tokens, accepted, drafts = dict(output.tokens), {}, {}
        for item in plan.items:
            if item.replay is not None:
                path = self._verified(item)
                tokens[item.request_id] = tuple(SampledToken(token) for token in path)
                accepted[item.request_id] = (0,) * (len(path) - 1)
            if item.request_id in tokens and plan.tree_grant is not None:
                drafts[item.request_id] = self._draft(self._end(item), plan.tree_grant)
        self.num_accepted += sum(map(len, accepted.values()))
        return StepOutput(tokens, 0.0, accepted=accepted, drafts=drafts)

    def _fold(self, plan: StepPlan) -> None:
        targets = [fold.target for fold in plan.folds]
        assert len(set(targets)) == len(targets)
        found = []
        for fold in plan.folds:
            state = self.rows[fold.source]
            for token in self.slots[fold.slot][: fold.num_tokens]:
                state = extend_hash(state, token)
            found.append(state)
        for fold, state in zip(plan.folds, found, strict=True):
            self.rows[fold.target] = state
        self.num_folds += len(found)

    def _compute(self, item: StepItem) -> int:
        if item.replay is None:
            return super()._compute(item)
        return self._state(item)

    def _state(self, item: StepItem) -> int:
        """Hash of everything before the root, by the row and its history, or by the pages."""
        assert item.replay is not None
        if item.state_row is None:
            return self._history(item)
        state = self.rows[item.state_row]
        assert item.replay.num_tokens <= self.capacity
        for token in self.slots[item.replay.slot][: item.replay.num_tokens]:
            state = extend_hash(state, token)
        if len(item.page_ids):
            position, stored = item.start - 1, 0
            page, slot = self._slot(item, position)
            _, stored = self.pages[page][slot]
            assert stored == state, f"row {item.state_row} and its history are not at {item.start}"
        return state

    def _verified(self, item: StepItem) -> list[int]:
        """Tokens sampled along the accepted path; what is accepted goes to pages and history."""
        assert item.replay is not None
        assert item.sampling is not None
        state, node, taken = self._state(item), -1, [item.token_ids[0]]
        state = extend_hash(state, taken[0])
        draft = item.draft or DraftTree((), (), ())
        hashes = [state]
        while True:
            token = next_token(state, self.vocab_size)
            children = [
                child
                for child in range(draft.num_nodes)
                if draft.parents[child] == node and draft.token_ids[child] == token
            ]
            if not children:
                break
            node = children[0]
            taken.append(token)
            state = extend_hash(state, token)
            hashes.append(state)
        if item.state_row is not None:
            own = self.slots[item.replay.slot]
            own[item.replay.num_tokens :] = taken
            assert len(own) <= self.capacity
        if len(item.page_ids):
            for offset, (one, stored) in enumerate(zip(taken, hashes, strict=True)):
                page, slot = self._slot(item, item.start + offset)
                self.pages[page][slot] = (one, stored)
        self._ends = {**getattr(self, "_ends", {}), item.request_id: state}
        return [*taken[1:], next_token(state, self.vocab_size)]

    def _end(self, item: StepItem) -> int:
        """Hash of all computed tokens of an item."""
        if item.replay is not None:
            return int(self._ends[item.request_id])
        if item.state_row is not None:
            return self.rows[item.state_row]
        page, slot = self._slot(item, item.start + len(item.token_ids) - 1)
        return self.pages[page][slot][1]

    def _draft(self, state: int, grant: TreeGrant) -> DraftTree:
        """A tree below the token sampled after `state`: the right tokens along its first path as far as chance lets."""
        chance = self.random
        tokens: list[int] = []
        parents: list[int] = []
        state = extend_hash(state, next_token(state, self.vocab_size))
        for depth in range(chance.randint(1, grant.max_depth)):
            token = next_token(state, self.vocab_size)
            parent = len(tokens) - 1 if depth else -1
            if chance.random() < 0.2:
                token = (token + 1) % self.vocab_size
            parents.append(parent)
            tokens.append(token)
            state = extend_hash(state, token)
        while len(tokens) < grant.max_nodes_per_request and chance.random() < 0.5:
            parents.append(chance.randrange(-1, len(tokens)))
            tokens.append(chance.randrange(self.vocab_size))
        tree = DraftTree(tuple(tokens), tuple(parents), (0.5,) * len(tokens))
        return tree.within_depth(grant.max_depth) or tree

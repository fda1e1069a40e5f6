"""A drafter that knows what a model will say, and proposes it, or not, as it is told."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch

from turnkeep.engine.speculation.drafter import Drafter, DraftRequest
from turnkeep.scheduler.drafts import DraftTree, TreeGrant
from turnkeep.scheduler.step_plan import StepItem


class ScriptedDrafter:
    """`truth`: request id -> its whole token ids, prompt and plain output. right: the chance that a tree has the truth
    along its deepest path; all others have none of it below the root."""

    needs_hidden = False

    def __init__(self, truth: Mapping[str, Sequence[int]], vocab_size: int, *, right: float, seed: int = 0) -> None:
        self._truth = truth
        self._vocab_size = vocab_size
        self._right = right
        self._seed = seed
        self.num_proposed = 0

    def propose(self, requests: Sequence[DraftRequest], grant: TreeGrant) -> list[DraftTree | None]:
        return [self._tree(request, grant) for request in requests]

    def put_off(self, items: Sequence[StepItem], normed: torch.Tensor) -> bool:
        return False

    def settle(self, going_on: Sequence[StepItem] | None = None) -> bool:
        return False

    def _tree(self, request: DraftRequest, grant: TreeGrant) -> DraftTree | None:
        if request.next_token is None or grant.num_nodes == 0:
            return None
        truth = self._truth[request.request_id]
        root = request.start + len(request.token_ids)
        assert [*request.token_ids, request.next_token] == list(truth[request.start : root + 1]), "tokens differ"
        rng = random.Random(f"{self._seed} {request.request_id} {root}")
        num_nodes = rng.randint(1, grant.max_nodes_per_request)
        max_depth = rng.randint(1, grant.max_depth)
        depths: list[int] = []
        parents: list[int] = []
        for node in range(num_nodes):
            open_nodes = [-1, *(other for other in range(node) if depths[other] < max_depth)]
            parents.append(rng.choice(open_nodes))
            depths.append(1 + (depths[parents[-1]] if parents[-1] >= 0 else 0))
        tokens = [self._wrong(truth, root + depth, rng) for depth in depths]
        if rng.random() < self._right:
            node = depths.index(max(depths))
            while node >= 0:
                if root + depths[node] < len(truth):
                    tokens[node] = truth[root + depths[node]]
                node = parents[node]
        self.num_proposed += num_nodes
        return DraftTree(tuple(tokens), tuple(parents), tuple(0.9**depth for depth in depths))

    def _wrong(self, truth: Sequence[int], position: int, rng: random.Random) -> int:
        right = truth[position] if position < len(truth) else -1
        token = rng.randrange(self._vocab_size - 1)
        return token + (token >= right >= 0)


class AnyGrant:
    """Another drafter, told to make trees of another size, depth and width in every step."""

    def __init__(self, drafter: Drafter, seed: int = 0) -> None:
        self._drafter = drafter
        self._rng = random.Random(seed)
        self.num_proposed = 0

    @property
    def needs_hidden(self) -> bool:
        return self._drafter.needs_hidden

    def put_off(self, items: Sequence[StepItem], normed: torch.Tensor) -> bool:
        return self._drafter.put_off(items, normed)

    def settle(self, going_on: Sequence[StepItem] | None = None) -> bool:
        return self._drafter.settle(going_on)

    def propose(self, requests: Sequence[DraftRequest], grant: TreeGrant) -> list[DraftTree | None]:
        if grant.num_nodes:
            each = self._rng.randint(1, grant.max_nodes_per_request)
            depth = self._rng.randint(1, grant.max_depth)
            grant = TreeGrant(each * len(requests), each, depth, self._rng.randint(1, grant.max_children))
        trees = self._drafter.propose(requests, grant)
        self.num_proposed += sum(tree.num_nodes for tree in trees if tree is not None)
        return trees

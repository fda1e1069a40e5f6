"""Drafts without a head: what followed the last tokens where they stood before in the request's own prompt and output.

Agents copy much of what they read (results of tools, names, code), and such copies are proposed at no cost of a model
(prompt lookup; Saxena 2023). Knows tokens alone.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from itertools import count

import torch

from turnkeep.engine.speculation.drafter import DraftRequest
from turnkeep.engine.speculation.token_index import TokenIndex
from turnkeep.engine.speculation.tree_growth import LEAST_PROBABILITY
from turnkeep.scheduler.drafts import DraftTree, TreeGrant
from turnkeep.scheduler.step_plan import StepItem

Places = list[tuple[int, int]]  # (position of a token, tokens that agree up to it)

MAX_INDEXED_TOKENS = 1_000_000  # of all requests together, about 200 bytes each


class PromptLookup:
    """Trees of copies. Of requests that were not seen for long the tokens are let go, and nothing more is proposed."""

    needs_hidden = False

    def __init__(self, max_indexed_tokens: int = MAX_INDEXED_TOKENS) -> None:
        self._max_indexed_tokens = max_indexed_tokens
        self._indices: OrderedDict[str, TokenIndex] = OrderedDict()
        self._num_indexed_tokens = 0

    def propose(self, requests: Sequence[DraftRequest], grant: TreeGrant) -> list[DraftTree | None]:
        """See `Drafter.propose`."""
        limit = min(grant.num_nodes, grant.max_nodes_per_request)
        may_propose = min(limit, grant.max_depth, grant.max_children) > 0
        trees: list[DraftTree | None] = []
        for request in requests:
            index = self._take_over(request)
            tree = None
            if may_propose and index is not None and request.next_token is not None:
                tree = copied_tree(index, limit, grant.max_depth, grant.max_children)
            trees.append(tree)
        return best_of_all(trees, grant.num_nodes)

    def put_off(self, items: Sequence[StepItem], normed: torch.Tensor) -> bool:
        """See `Drafter.put_off`: tokens are taken over at once."""
        return False

    def settle(self, going_on: Sequence[StepItem] | None = None) -> bool:
        """See `Drafter.settle`: nothing is ever put off."""
        return False

    def _take_over(self, request: DraftRequest) -> TokenIndex | None:
        """The index of all known tokens; None where those before the step are not known any more."""
        if request.context_ids is not None:
            self._forget(request.request_id)
            index = TokenIndex()
            known = [*request.context_ids, *request.token_ids]
        elif (found := self._indices.get(request.request_id)) is not None:
            index = found
            known = list(request.token_ids[len(index) - request.start :])  # the root is known since the last step
        else:
            return None
        if request.next_token is not None:
            known.append(request.next_token)
        index.extend(known)
        self._num_indexed_tokens += len(known)
        self._indices[request.request_id] = index
        self._indices.move_to_end(request.request_id)
        while self._num_indexed_tokens > self._max_indexed_tokens and len(self._indices) > 1:
            self._forget(next(iter(self._indices)))
        return index

    def _forget(self, request_id: str) -> None:
        index = self._indices.pop(request_id, None)
        if index is not None:
            self._num_indexed_tokens -= len(index)


def copied_tree(index: TokenIndex, max_nodes: int, max_depth: int, max_children: int) -> DraftTree | None:
    """The likeliest continuations of the index's last token, best node first; None where it stood nowhere before."""
    tokens = index.token_ids
    token_ids: list[int] = []
    parents: list[int] = []
    probabilities: list[float] = []
    number = count()
    # Nodes to come, the best first, each with the places where its token stands and how many tokens agree up to there.
    waiting: list[tuple[float, int, int, int, Places]] = [(-1.0, next(number), -1, 0, index.matches())]
    while waiting and len(token_ids) < max_nodes:
        negative, _, parent, depth, places = heapq.heappop(waiting)
        node = -1
        if depth > 0:
            node = len(token_ids)
            token_ids.append(tokens[places[0][0]])
            parents.append(parent)
            probabilities.append(-negative)
        if depth < max_depth:
            for edge, following in _children(tokens, places, max_children):
                if -negative * edge > LEAST_PROBABILITY:
                    heapq.heappush(waiting, (negative * edge, next(number), node, depth + 1, following))
    return DraftTree(tuple(token_ids), tuple(parents), tuple(probabilities)) if token_ids else None


def _children(tokens: list[int], places: Places, max_children: int) -> list[tuple[float, Places]]:
    """The tokens behind the places: the likeliest ones' probabilities and places.

    A place counts by the square of the tokens that agree up to it; of n agreeing tokens, the next agrees as well with
    n / (n + 1), as in Laplace's rule of succession.
    """
    following: dict[int, Places] = {}
    for place, length in places:
        if place + 1 < len(tokens):
            following.setdefault(tokens[place + 1], []).append((place + 1, length + 1))
    if not following:
        return []
    longest = max(length for _, length in places)
    weights = [sum((length - 1) ** 2 for _, length in own) for own in following.values()]
    share = longest / (longest + 1) / sum(weights)
    best = heapq.nlargest(max_children, zip(weights, following.values(), strict=True), key=lambda entry: entry[0])
    return [(share * weight, own) for weight, own in best]


def best_of_all(trees: list[DraftTree | None], num_nodes: int) -> list[DraftTree | None]:
    """The best `num_nodes` nodes of trees whose nodes come best first."""
    worths = sorted((worth for tree in trees if tree is not None for worth in tree.probabilities), reverse=True)
    if len(worths) <= num_nodes:
        return trees
    bar = worths[num_nodes - 1] if num_nodes > 0 else 1.0
    num_equal = num_nodes - sum(worth > bar for worth in worths)  # of those at the bar itself, so many have room
    cut: list[DraftTree | None] = []
    for tree in trees:
        num_kept = 0
        for worth in tree.probabilities if tree is not None else ():
            if worth < bar or (worth == bar and num_equal <= 0):
                break
            num_kept += 1
            num_equal -= worth == bar
        cut.append(tree.first(num_kept) if tree is not None and num_kept else None)
    return cut

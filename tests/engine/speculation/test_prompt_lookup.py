"""Drafts of copies: the index against a plain search, trees that go on as the text did, and bounds on what is kept."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnkeep.engine.speculation.drafter import DraftRequest
from turnkeep.engine.speculation.prompt_lookup import PromptLookup, best_of_all, copied_tree
from turnkeep.engine.speculation.token_index import MAX_AGREEING, MAX_LOOKED_AT, RUN, TokenIndex
from turnkeep.scheduler.drafts import DraftTree, TreeGrant
from turnkeep.scheduler.request import SamplingParams

GRANT = TreeGrant(num_nodes=8, max_nodes_per_request=8, max_depth=5, max_children=3)


def plain_matches(tokens: Sequence[int]) -> list[tuple[int, int]]:
    last, found = len(tokens) - 1, []
    for place in reversed(range(last)):
        length = 0
        while length <= place and length < MAX_AGREEING and tokens[place - length] == tokens[last - length]:
            length += 1
        if length >= RUN:
            found.append((place, length))
    return found[:MAX_LOOKED_AT]


def step(
    tokens: Sequence[int], start: int, end: int, *, request_id: str = "a", opens: bool = False, grows: bool = True
) -> DraftRequest:
    """A step that computed [start, end) of a text; what was sampled is the token at `end`."""
    return DraftRequest(
        request_id=request_id,
        token_ids=list(tokens[start:end]),
        start=start,
        next_token=tokens[end] if grows else None,
        hidden=None,
        previous_hidden=None,
        page_ids=np.zeros(1, dtype=np.int32),
        sampling=SamplingParams(max_new_tokens=9) if grows else None,
        context_ids=list(tokens[:start]) if opens else None,
    )


@settings(max_examples=80, deadline=None)
@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=120), cut=st.integers(0, 120))
def test_the_index_finds_what_a_plain_search_finds(tokens: list[int], cut: int) -> None:
    index = TokenIndex()
    index.extend(tokens[:cut])
    for token in tokens[cut:]:
        index.extend([token])
        assert index.matches() == plain_matches(index.token_ids)
    assert index.token_ids == tokens
    assert index.matches() == plain_matches(tokens)


def test_token_ids_of_large_vocabularies_do_not_collide() -> None:
    index = TokenIndex()
    large = (1 << 21) - 1
    index.extend([1, 0, 0, large, 0, 0, 1, 0, large, 0, 0])
    assert index.matches() == plain_matches(index.token_ids) == [(5, 4)]


def test_a_text_that_repeats_itself_goes_on_as_it_did() -> None:
    tokens = [5, 6, 7, 8, 9, 10, 11, 1, 2, 5, 6, 7]
    (tree,) = PromptLookup().propose([step(tokens, 0, 11, opens=True)], GRANT)
    assert tree is not None
    assert tree.token_ids == (8, 9, 10, 11, 1)
    assert tree.parents == (-1, 0, 1, 2, 3)
    assert list(tree.probabilities) == sorted(tree.probabilities, reverse=True)


def test_different_continuations_become_branches_the_longer_match_first() -> None:
    #         longest match: 9 1 2 3 -> 4            shorter one: 1 2 3 -> 7
    tokens = [9, 1, 2, 3, 4, 5, 0, 1, 2, 3, 7, 8, 0, 9, 1, 2, 3]
    (tree,) = PromptLookup().propose([step(tokens, 0, len(tokens) - 1, opens=True)], GRANT)
    assert tree is not None
    children = [token for token, parent in zip(tree.token_ids, tree.parents, strict=True) if parent < 0]
    assert children == [4, 7]
    assert tree.probabilities[tree.token_ids.index(4)] > tree.probabilities[tree.token_ids.index(7)]
    assert sum(p for p, parent in zip(tree.probabilities, tree.parents, strict=True) if parent < 0) < 1.0


def test_a_new_text_has_no_draft() -> None:
    assert PromptLookup().propose([step(list(range(20)), 0, 15, opens=True)], GRANT) == [None]


@pytest.mark.parametrize("seed", range(5))
def test_steps_of_any_length_and_prompts_in_chunks_give_the_same_trees(seed: int) -> None:
    rng = random.Random(seed)
    tokens = [rng.randrange(4) for _ in range(200)]
    lookup = PromptLookup()
    lookup.propose([step(tokens, 50, 90, opens=True, grows=False)], GRANT)  # resumed at 50, the prompt goes on
    start = 90
    while start < 190:
        end = start + rng.choice((1, 1, 2, 5))
        (tree,) = lookup.propose([step(tokens, start, end)], GRANT)
        index = TokenIndex()
        index.extend(tokens[: end + 1])
        assert tree == copied_tree(index, 8, 5, 3)
        start = end


def test_a_request_that_is_opened_again_begins_anew() -> None:
    lookup = PromptLookup()
    tokens = [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3]
    lookup.propose([step([7] * 30, 0, 20, opens=True)], GRANT)
    (tree,) = lookup.propose([step(tokens, 10, 12, opens=True)], GRANT)
    assert tree is not None
    assert tree.token_ids[:2] == (4, 5)


def test_tokens_of_requests_not_seen_for_long_are_let_go() -> None:
    lookup = PromptLookup(max_indexed_tokens=100)
    tokens = [1, 2, 3, 4] * 20
    for name in "abc":
        lookup.propose([step(tokens, 0, 45, request_id=name, opens=True)], GRANT)
    assert lookup.propose([step(tokens, 45, 46, request_id="a")], GRANT) == [None]
    (tree,) = lookup.propose([step(tokens, 45, 46, request_id="c")], GRANT)
    assert tree is not None
    (tree,) = lookup.propose([step(tokens, 0, 46, request_id="a", opens=True)], GRANT)
    assert tree is not None


def test_the_nodes_of_all_requests_together_keep_to_the_grant() -> None:
    tokens = [1, 2, 3, 4] * 20
    requests = [step(tokens, 0, 45 + n, request_id=str(n), opens=True) for n in range(3)]
    trees = PromptLookup().propose(requests, TreeGrant(7, 5, 5, 2))
    assert [tree is not None for tree in trees] == [True] * 3
    assert sum(tree.num_nodes for tree in trees if tree) == 7
    assert PromptLookup().propose(requests, TreeGrant(0, 5, 5, 2)) == [None] * 3


def test_the_best_nodes_of_several_trees_are_kept_and_stay_trees() -> None:
    first = DraftTree((1, 2, 3), (-1, 0, 1), (0.9, 0.5, 0.2))
    second = DraftTree((4, 5), (-1, -1), (0.5, 0.4))
    assert best_of_all([first, None, second], 9) == [first, None, second]
    assert best_of_all([first, None, second], 3) == [first.first(2), None, second.first(1)]
    assert best_of_all([first, None, second], 2) == [first.first(2), None, None]
    assert best_of_all([first, second], 0) == [None, None]

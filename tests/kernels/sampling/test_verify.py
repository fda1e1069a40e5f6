"""Verified draft trees: the token stream of plain sampling whatever was drafted, and its law."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import pytest
import torch
from random_trees import draft_from_noise, random_tree
from sampling_law import deviation_from_law, verified_pairs

import turnkeep.kernels.sampling.verify as verify_module
from turnkeep.kernels.sampling import (
    GREEDY,
    InvalidLogitsError,
    SamplingBatch,
    SamplingRow,
    TreeToVerify,
    VerifiedTree,
    sample,
    verify_trees,
)

VOCAB_SIZE = 24
NUM_DRAWS = int(os.environ.get("TURNKEEP_SAMPLING_DRAWS", "8000"))


def model(path: Sequence[int]) -> torch.Tensor:
    """Logits after these tokens, as a model gives them: a function of the path."""
    generator = torch.Generator().manual_seed(hash(tuple(path)) % 2**31)
    return torch.randn(VOCAB_SIZE, generator=generator) * 2


def bits_of(allowed: set[int]) -> bytes:
    return sum(1 << token for token in allowed).to_bytes(8, "little")


def row_after(options: SamplingRow, prompt: list[int], path: Sequence[int]) -> SamplingRow:
    """The row of the token after prompt + path; a grammar of tokens that depend on the token before."""
    output = [*options.output_ids, *path]
    row = dataclasses.replace(options, position=len(prompt) + len(path), output_ids=output)
    if options.allowed_bits is None:
        return row
    last = output[-1] if output else 0
    return dataclasses.replace(row, allowed_bits=bits_of({(last * 3 + step) % VOCAB_SIZE for step in (1, 5, 6, 11)}))


def later_row(options: SamplingRow, prompt: list[int], tokens: list[int], path: Sequence[int]) -> SamplingRow:
    return row_after(options, prompt, [*tokens, *path])


def plain_tokens(options: SamplingRow, prompt: list[int], num_tokens: int) -> list[int]:
    """One token after another by `sample`."""
    tokens: list[int] = []
    for _ in range(num_tokens):
        row = row_after(options, prompt, tokens)
        tokens += sample(model([*prompt, *tokens])[None], SamplingBatch([row])).tolist()
    return tokens


def node_paths(token_ids: Sequence[int], parents: Sequence[int]) -> list[list[int]]:
    paths: list[list[int]] = [[]]
    for node in range(1, len(parents)):
        paths.append([*paths[parents[node]], token_ids[node]])
    return paths


def verify(
    prompt: list[int],
    token_ids: Sequence[int],
    parents: Sequence[int],
    rows: Callable[[Sequence[int]], SamplingRow | None],
) -> VerifiedTree:
    """Both ways: level by level, and with all nodes' tokens chosen ahead."""
    logits = torch.stack([model([*prompt, *path]) for path in node_paths(token_ids, parents)])
    found = verify_trees(logits, [TreeToVerify(token_ids, parents, rows)])[0]
    assert verify_trees(logits, [TreeToVerify(token_ids, parents, rows, any_path=True)])[0] == found
    return found


OPTIONS = {
    "greedy": SamplingRow(),
    "temperature": SamplingRow(temperature=1.0, seed=3),
    "filters": SamplingRow(temperature=0.8, seed=4, top_k=9, top_p=0.9, min_p=0.02),
    "penalties": SamplingRow(frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.2, prompt_ids=[1, 2]),
    "sampled_penalties": SamplingRow(temperature=1.2, seed=8, frequency_penalty=2.0, top_p=0.95),
    "bias": SamplingRow(logit_bias={3: 4.0, 5: -8.0}),
    "grammar": SamplingRow(allowed_bits=b""),
    "sampled_grammar": SamplingRow(temperature=1.0, seed=1, allowed_bits=b"", presence_penalty=1.0),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("drafts", ["none", "random", "perfect", "noise"])
def test_the_tokens_are_those_of_plain_sampling_whatever_was_drafted(name: str, drafts: str) -> None:
    options, prompt = OPTIONS[name], [7, 1, 9]
    plain = plain_tokens(options, prompt, 48)
    generator = torch.Generator().manual_seed(5)
    tokens: list[int] = []
    num_steps = 0
    while len(tokens) < 40:
        known = [*prompt, *tokens]
        ahead = plain[len(tokens) : len(tokens) + 4]
        if drafts == "none":
            token_ids, parents = [known[-1]], [-1]
        elif drafts == "noise":
            own = row_after(options, prompt, tokens)
            token_ids, parents = draft_from_noise(model, known, own, num_nodes=12, num_children=3, generator=generator)
        else:
            right = ahead if drafts == "perfect" else []
            token_ids, parents = random_tree(known[-1], 12, VOCAB_SIZE, right, generator)
        found = verify(prompt + tokens, token_ids, parents, partial(later_row, options, prompt, list(tokens)))
        assert len(found.nodes) == len(found.token_ids) >= 1
        assert found.nodes[0] == 0
        for node, child in pairwise(found.nodes):
            assert parents[child] == node
        assert [token_ids[node] for node in found.nodes[1:]] == found.token_ids[:-1]
        if drafts == "perfect":
            assert found.token_ids[: len(ahead)] == ahead
        tokens += found.token_ids
        num_steps += 1
    assert tokens == plain[: len(tokens)]
    assert num_steps == 40 if drafts == "none" else num_steps <= 40
    if drafts in ("perfect", "noise"):
        assert num_steps < 30  # a draft that does not know of a grammar misses more often


def test_a_tree_gets_the_same_result_alone_and_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    trees, logits = [], []
    for index, options in enumerate(OPTIONS.values()):
        prompt = [index, 4]
        token_ids, parents = random_tree(4, 1 + 3 * index, VOCAB_SIZE, plain_tokens(options, prompt, 2), generator)
        trees.append(TreeToVerify(token_ids, parents, partial(row_after, options, prompt)))
        logits.append(torch.stack([model([*prompt, *path]) for path in node_paths(token_ids, parents)]))
    together = verify_trees(torch.cat(logits), trees)
    assert together == [verify_trees(own, [tree])[0] for own, tree in zip(logits, trees, strict=True)]
    assert any(len(found.nodes) > 1 for found in together)
    order = torch.randperm(len(trees), generator=generator).tolist()
    shuffled = verify_trees(torch.cat([logits[i] for i in order]), [trees[i] for i in order])
    assert shuffled == [together[i] for i in order]


def chain(tokens: Sequence[int]) -> tuple[list[int], list[int]]:
    return [0, *tokens], list(range(-1, len(tokens)))


def test_nothing_is_chosen_after_a_stop_token_inside_the_accepted_path() -> None:
    plain = plain_tokens(SamplingRow(), [2], 5)
    token_ids, parents = chain(plain)
    stop = plain[2]
    assert stop not in plain[:2]
    found = verify([2], token_ids, parents, lambda path: None if stop in path else GREEDY)
    assert found == VerifiedTree(nodes=[0, 1, 2], token_ids=plain[:3])


def test_where_the_root_gives_no_token_nothing_is_accepted_and_others_go_on() -> None:
    logits = torch.zeros(4, 6)
    logits[0, 3] = math.nan
    logits[1:, 2] = 1.0
    sampled = SamplingRow(temperature=1e-3)
    trees = [
        TreeToVerify([1], [-1], lambda path: GREEDY),
        TreeToVerify([1], [-1], lambda path: sampled),
        TreeToVerify([1], [-1], lambda path: SamplingRow(forbidden_ids=range(6))),
        TreeToVerify([1], [-1], lambda path: None),
    ]
    nothing = VerifiedTree()
    assert verify_trees(logits, trees) == [nothing, VerifiedTree([0], [2]), nothing, nothing]


@pytest.mark.parametrize("row", [GREEDY, SamplingRow(temperature=1e-3)])
def test_broken_logits_matter_only_on_the_walk_and_end_it_before_their_node(row: SamplingRow) -> None:
    logits = torch.zeros(4, 6)
    logits[0, 2] = logits[1, 3] = logits[3, 4] = 50.0
    logits[2] = math.nan  # a node that nobody walks to
    ids, parents = [0, 2, 5, 3], [-1, 0, 0, 1]
    assert verify_trees(logits, [TreeToVerify(ids, parents, lambda path: row)]) == [VerifiedTree([0, 1, 3], [2, 3, 4])]
    logits[3] = math.nan
    assert verify_trees(logits, [TreeToVerify(ids, parents, lambda path: row)]) == [VerifiedTree([0, 1], [2, 3])]


def test_trees_too_wide_to_choose_ahead_are_walked_level_by_level(monkeypatch: pytest.MonkeyPatch) -> None:
    options = OPTIONS["filters"]
    token_ids, parents = chain(plain_tokens(options, [2], 4))
    rows = partial(row_after, options, [2])
    expected = verify([2], token_ids, parents, rows)
    assert len(expected.nodes) == 5
    asked: list[Sequence[int]] = []
    monkeypatch.setattr(verify_module, "MAX_CHOSEN_AHEAD", VOCAB_SIZE * len(token_ids) - 1)
    logits = torch.stack([model([2, *path]) for path in node_paths(token_ids, parents)])
    tree = TreeToVerify(token_ids, parents, lambda path: asked.append(tuple(path)) or rows(path), any_path=True)
    assert verify_trees(logits, [tree]) == [expected]
    assert [len(path) for path in asked] == [0, 1, 2, 3, 4]


def test_rows_are_asked_for_along_the_walk_alone() -> None:
    """What a grammar has consumed is always what the request has generated: nothing is taken back."""
    asked: list[list[int]] = []

    def record(path: Sequence[int]) -> SamplingRow:
        asked.append(list(path))
        return GREEDY

    plain = plain_tokens(SamplingRow(), [2], 3)
    wrong = (plain[0] + 1) % VOCAB_SIZE
    token_ids, parents = [2, wrong, plain[0], 5, plain[1]], [-1, 0, 0, 1, 2]
    logits = torch.stack([model([2, *path]) for path in node_paths(token_ids, parents)])
    verify_trees(logits, [TreeToVerify(token_ids, parents, record)])
    assert asked == [plain[:0], plain[:1], plain[:2]]


@pytest.mark.parametrize(
    ("token_ids", "parents"), [([0, 1], [-1]), ([0, 1], [-1, 1]), ([0, 1], [-1, -1]), ([0, 1], [0, 0]), ([], [])]
)
def test_parents_that_are_not_earlier_nodes_are_refused(token_ids: list[int], parents: list[int]) -> None:
    with pytest.raises(ValueError, match="verify_trees"):
        verify_trees(torch.zeros(len(token_ids), 6), [TreeToVerify(token_ids, parents, lambda path: GREEDY)])


def test_another_number_of_logits_is_refused() -> None:
    with pytest.raises(ValueError, match="2 nodes"):
        verify_trees(torch.zeros(3, 6), [TreeToVerify([0, 1], [-1, 0], lambda path: GREEDY)])


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_pairs_of_tokens_follow_the_law_of_the_target(temperature: float, top_p: float) -> None:
    """Two tokens over a tree of depth two that is drafted with the target's noise, with fewer children than support.

    The vocabulary is small, the noise fixed by the seeds: a deviation stays or never comes.
    """
    pairs, accepted = verified_pairs(NUM_DRAWS, temperature=temperature, top_p=top_p, seed=77)
    deviation, freedom = deviation_from_law(pairs, temperature=temperature, top_p=top_p)
    assert freedom > 8
    assert abs(deviation) < 3.1  # p > 0.001
    assert accepted > 0.5  # the noise is shared with the draft: most of what it proposes is what the target chooses


def test_the_law_test_notices_a_wrong_rule() -> None:
    pairs, _ = verified_pairs(NUM_DRAWS, temperature=1.0, top_p=0.9, seed=77)
    deviation, _ = deviation_from_law(pairs, temperature=1.0, top_p=1.0)
    assert abs(deviation) > 10
    shifted = pairs.clone()
    shifted[: len(shifted) // 10, 1] = shifted[: len(shifted) // 10, 0]
    deviation, _ = deviation_from_law(shifted, temperature=1.0, top_p=0.9)
    assert abs(deviation) > 10


def test_plain_sample_still_raises_where_a_walk_only_ends() -> None:
    with pytest.raises(InvalidLogitsError):
        sample(torch.full((1, 4), math.nan), SamplingBatch([GREEDY]))

"""Tokens of a step from its logits: along a draft the same as one by one, with everything that a request asks for."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from random_trees import random_tree
from tokenizers import Tokenizer

from turnkeep.engine.grammar import GrammarMatchers
from turnkeep.engine.token_choice import NO_FINITE_LOGITS, ChosenTokens, TokenChoice
from turnkeep.models.demo import rendering
from turnkeep.scheduler.drafts import DraftTree
from turnkeep.scheduler.request import SamplingParams
from turnkeep.scheduler.step_plan import SampledToken, SamplingHistory, StepItem

TOKENIZER_JSON = (rendering.DIRECTORY / "tokenizer.json").read_text()
TOKENIZER = Tokenizer.from_str(TOKENIZER_JSON)
VOCAB_SIZE = 1280
END_ID = 2
PROMPT = [31, 500, 77]


def choice() -> TokenChoice:
    return TokenChoice(GrammarMatchers(lambda: TOKENIZER_JSON, VOCAB_SIZE, [END_ID]))


def model(known: Sequence[int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash(tuple(known[-3:])) % 2**31)
    return torch.randn(VOCAB_SIZE, generator=generator) * 3


def item(sampling: SamplingParams, output: Sequence[int], draft: DraftTree | None = None, name: str = "r") -> StepItem:
    known = [*PROMPT, *output]
    return StepItem(
        request_id=name,
        token_ids=known[-1:],
        start=len(known) - 1,
        page_ids=np.zeros(1, dtype=np.int32),
        state_row=None,
        exports=(),
        sampling=sampling,
        num_output_tokens=len(output),
        history=SamplingHistory(PROMPT, list(output)),
        draft=draft,
    )


def logits_of(*items: StepItem) -> torch.Tensor:
    rows = []
    for one in items:
        assert one.history is not None
        known = [*PROMPT, *one.history.output_ids]
        paths = [known]
        for token, parent in zip(one.draft.token_ids, one.draft.parents, strict=True) if one.draft else ():
            paths.append([*paths[parent + 1], token])
        rows += [model(path) for path in paths]
    return torch.stack(rows)


def tree(token_ids: Sequence[int], parents: Sequence[int]) -> DraftTree:
    """From token ids and parents with a root."""
    return DraftTree(tuple(token_ids[1:]), tuple(parent - 1 for parent in parents[1:]), (0.5,) * (len(parents) - 1))


def chain(tokens: Sequence[int]) -> DraftTree:
    return tree([0, *tokens], range(-1, len(tokens)))


def one_by_one(sampling: SamplingParams, num_tokens: int) -> list[SampledToken]:
    """Up to the stop token or the length, as the scheduler ends a request."""
    own, tokens = choice(), list[SampledToken]()
    while len(tokens) < min(num_tokens, sampling.max_new_tokens):
        one = item(sampling, [token.token_id for token in tokens])
        tokens += own.choose([one], logits_of(one)).tokens["r"]
        if tokens[-1].token_id in sampling.stop_token_ids and len(tokens) >= sampling.min_new_tokens:
            break
    return tokens


def drafted(sampling: SamplingParams, plain: list[SampledToken]) -> tuple[list[SampledToken], int]:
    """The same request with a right path of four tokens in every draft; tokens, and steps that were needed."""
    own, tokens, num_steps = choice(), list[SampledToken](), 0
    generator = torch.Generator().manual_seed(2)
    while len(tokens) < len(plain):
        output = [token.token_id for token in tokens]
        right = [token.token_id for token in plain[len(tokens) : len(tokens) + 4]]
        draft = tree(*random_tree(0, 12, VOCAB_SIZE, right, generator))
        one = item(sampling, output, draft)
        found = own.choose([one], logits_of(one))
        assert not found.errors
        path = found.accepted["r"]
        assert [draft.token_ids[node] for node in path] == [token.token_id for token in found.tokens["r"][:-1]]
        tokens += found.tokens["r"]
        num_steps += 1
    return tokens, num_steps


def grammar_of(schema: dict[str, Any]) -> str:
    top = {"name": "top", "lark_grammar": "start: @answer"}
    return json.dumps({"grammars": [top, {"name": "answer", "json_schema": schema}]})


ORDER = grammar_of(
    {
        "type": "object",
        "properties": {"order": {"type": "string", "maxLength": 9}, "count": {"enum": [1, 25, 700]}},
        "required": ["order", "count"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_logprobs": 3},
        {"temperature": 1.0, "seed": 5, "num_logprobs": 0},
        {"temperature": 0.7, "seed": 5, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
        {"frequency_penalty": 2.0, "repetition_penalty": 1.3},
        {"temperature": 1.0, "presence_penalty": 1.5, "logit_bias": {9: 6.0, 12: 5.0}},
    ],
)
def test_drafts_change_neither_tokens_nor_logprobs(options: dict[str, Any]) -> None:
    sampling = SamplingParams(max_new_tokens=24, **options)
    plain = one_by_one(sampling, 24)
    tokens, num_steps = drafted(sampling, plain)
    assert [token.token_id for token in tokens] == [token.token_id for token in plain]
    assert num_steps < 9
    for token, expected in zip(tokens, plain, strict=True):
        assert (token.logprob is None) == (sampling.num_logprobs is None)
        assert token.logprob == pytest.approx(expected.logprob)
        assert [pair[0] for pair in token.top_logprobs] == [pair[0] for pair in expected.top_logprobs]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_token_along_a_draft_follows_the_grammar_of_its_own_path(temperature: float) -> None:
    """A mask taken once for the whole tree would let tokens outside the grammar through."""
    sampling = SamplingParams(
        max_new_tokens=80, temperature=temperature, seed=3, grammar=ORDER, stop_token_ids=(END_ID,), num_logprobs=0
    )
    plain = one_by_one(sampling, 80)
    assert plain[-1].token_id == END_ID
    answer = json.loads(TOKENIZER.decode([token.token_id for token in plain[:-1]]))
    assert answer["count"] in (1, 25, 700)
    tokens, num_steps = drafted(sampling, plain)
    assert [token.token_id for token in tokens] == [token.token_id for token in plain]
    assert num_steps < 0.5 * len(plain)


def test_nothing_comes_after_a_stop_token_or_the_last_token_that_was_asked_for() -> None:
    free = [token.token_id for token in one_by_one(SamplingParams(max_new_tokens=9), 9)]
    draft = chain(free[1:8])
    stop, start = free[4], free[:1]
    assert stop not in free[:4]
    for sampling, end in (
        (SamplingParams(max_new_tokens=9, stop_token_ids=(stop,)), 5),
        (SamplingParams(max_new_tokens=9, stop_token_ids=(stop,), ignore_eos=True), 9),
        (SamplingParams(max_new_tokens=3), 3),
    ):
        one = item(sampling, start, draft)
        found = choice().choose([one], logits_of(one))
        assert [token.token_id for token in found.tokens["r"]] == free[1:end]
        assert found.accepted["r"] == tuple(range(end - 2))


def test_stop_tokens_wait_for_min_new_tokens_along_a_draft() -> None:
    free = [token.token_id for token in one_by_one(SamplingParams(max_new_tokens=9), 9)]
    sampling = SamplingParams(max_new_tokens=12, stop_token_ids=(free[2], free[4]), min_new_tokens=4)
    plain = one_by_one(sampling, 12)
    assert len(plain) >= 4
    assert free[2] not in [token.token_id for token in plain[:3]]
    tokens, _ = drafted(sampling, plain)
    assert tokens == plain


def test_a_fault_is_the_requests_own_and_shows_where_its_token_is_the_last_known() -> None:
    sampling = SamplingParams(max_new_tokens=9)
    free = [token.token_id for token in one_by_one(sampling, 4)]
    broken = SamplingParams(max_new_tokens=9, grammar="no grammar")
    items = [
        item(sampling, [], chain(free[:3]), name="late"),
        item(sampling, [], None, name="root"),
        item(broken, [], chain([5]), name="grammar"),
        item(sampling, [], chain(free[:2]), name="good"),
    ]
    logits = logits_of(*items)
    logits[2] = math.nan  # the second node of "late"
    logits[4] = math.inf  # "root"
    found = choice().choose(items, logits)
    assert found.errors.keys() == {"root", "grammar"}
    assert found.errors["root"] == NO_FINITE_LOGITS
    assert "cannot be used" in found.errors["grammar"]
    ids = {name: [token.token_id for token in tokens] for name, tokens in found.tokens.items()}
    assert ids == {"late": free[:2], "good": free[:3]}
    assert found.accepted == {"late": (0,), "good": (0, 1)}


def test_a_step_without_wanted_tokens_chooses_none() -> None:
    assert choice().choose([], torch.zeros(0, 5)) == ChosenTokens()

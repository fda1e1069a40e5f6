"""From logits to the tokens of a step's items: for each the walk through its draft, a root alone where it has none.

Knows how a request's tokens are chosen and what its grammar allows; nothing of how the logits came about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from turnkeep.engine.grammar import GrammarError, GrammarMatchers
from turnkeep.kernels.sampling import GREEDY, SamplingRow, TreeToVerify, VerifiedTree, top_logprobs, verify_trees
from turnkeep.scheduler.request import SamplingParams
from turnkeep.scheduler.step_plan import SampledToken, StepItem

NO_FINITE_LOGITS = "the model gave no finite logits for this request"


@dataclass(slots=True)
class ChosenTokens:
    """By request id. A request has tokens or an error; accepted: nodes of its draft that were right, along one path."""

    tokens: dict[str, tuple[SampledToken, ...]] = field(default_factory=dict)
    accepted: dict[str, tuple[int, ...]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


class TokenChoice:
    """matchers: what is needed to follow grammars; without them a request that has one ends with an error."""

    def __init__(self, matchers: GrammarMatchers | None) -> None:
        self._matchers = matchers

    def choose(self, items: Sequence[StepItem], logits: torch.Tensor) -> ChosenTokens:
        """Items that want tokens, and logits [N, V] float32: a row for each item and then one for each of its nodes.

        A request for which no token can be chosen gets an error and does not take the others with it.
        """
        chosen = ChosenTokens()
        if not items:
            return chosen
        trees = [_tree(item, self._row_after(item, chosen.errors)) for item in items]
        start = 0
        for item, tree, found in zip(items, trees, verify_trees(logits, trees), strict=True):
            if found.token_ids:
                chosen.tokens[item.request_id] = _sampled_tokens(item, found, logits, start)
                if item.draft is not None:
                    chosen.accepted[item.request_id] = tuple(node - 1 for node in found.nodes[1:])
            else:
                chosen.errors.setdefault(item.request_id, NO_FINITE_LOGITS)
            start += len(tree.token_ids)
        return chosen

    def _row_after(self, item: StepItem, errors: dict[str, str]) -> Callable[[Sequence[int]], SamplingRow | None]:
        sampling = item.sampling
        assert sampling is not None
        if _is_plain_greedy(sampling) and item.history is None:
            return partial(_greedy_after, sampling, item.num_output_tokens)
        return partial(self._sampling_row, item, sampling, errors)

    def _sampling_row(
        self, item: StepItem, sampling: SamplingParams, errors: dict[str, str], path: Sequence[int]
    ) -> SamplingRow | None:
        """The row of the token after the item's last one and `path`; None after a stop token, or where a grammar fails.

        An error counts only where the item itself gives no token: later ones show when their token is the last known.
        """
        num_output_tokens = item.num_output_tokens + len(path)
        if path and is_over(sampling, path[-1], num_output_tokens):
            return None
        history = item.history
        output_ids = [*history.output_ids, *path] if history is not None else ()
        try:
            allowed_bits = self._allowed_bits(item, sampling, output_ids)
        except GrammarError as error:
            if not path:
                errors[item.request_id] = str(error)
            return None
        return SamplingRow(
            position=item.start + len(item.token_ids) + len(path),
            seed=sampling.seed,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=sampling.logit_bias,
            forbidden_ids=_forbidden_ids(sampling, num_output_tokens),
            prompt_ids=history.prompt_ids if history is not None else (),
            output_ids=output_ids,
            allowed_bits=allowed_bits,
        )

    def _allowed_bits(self, item: StepItem, sampling: SamplingParams, output_ids: Sequence[int]) -> bytes | None:
        """Raises GrammarError."""
        if sampling.grammar is None:
            return None
        if self._matchers is None or item.history is None:
            raise GrammarError("this engine cannot follow grammars")
        return self._matchers.allowed_bits(item.request_id, sampling.grammar, output_ids, sampling.stop_token_ids)


def _tree(item: StepItem, row_after: Callable[[Sequence[int]], SamplingRow | None]) -> TreeToVerify:
    root, draft = item.token_ids[-1], item.draft
    if draft is None:
        return TreeToVerify((root,), (-1,), row_after)
    # Without penalties and grammar a row follows from the number of tokens before it. Greedy tokens need no call each.
    any_path = item.history is None and item.sampling is not None and item.sampling.temperature > 0.0
    return TreeToVerify((root, *draft.token_ids), (-1, *(parent + 1 for parent in draft.parents)), row_after, any_path)


def _is_plain_greedy(sampling: SamplingParams) -> bool:
    return sampling.temperature == 0.0 and not sampling.logit_bias


def _greedy_after(sampling: SamplingParams, num_output_tokens: int, path: Sequence[int]) -> SamplingRow | None:
    num_output_tokens += len(path)
    if path and is_over(sampling, path[-1], num_output_tokens):
        return None
    forbidden = _forbidden_ids(sampling, num_output_tokens)
    return SamplingRow(forbidden_ids=forbidden) if forbidden else GREEDY


def is_over(sampling: SamplingParams, last_token: int, num_output_tokens: int) -> bool:
    """Whether a request is over with its last token, which num_output_tokens counts."""
    if num_output_tokens >= sampling.max_new_tokens:
        return True
    is_stop = not sampling.ignore_eos and last_token in sampling.stop_token_ids
    return is_stop and num_output_tokens >= sampling.min_new_tokens


def _forbidden_ids(sampling: SamplingParams, num_output_tokens: int) -> tuple[int, ...]:
    """Stop tokens may not come before min_new_tokens tokens were generated."""
    if num_output_tokens < sampling.min_new_tokens and not sampling.ignore_eos:
        return sampling.stop_token_ids
    return ()


def _sampled_tokens(item: StepItem, found: VerifiedTree, logits: torch.Tensor, start: int) -> tuple[SampledToken, ...]:
    """The chosen tokens, with logprobs where the request wants them; its logits begin at row `start`."""
    assert item.sampling is not None
    num_logprobs = item.sampling.num_logprobs
    if num_logprobs is None:
        return tuple(map(SampledToken, found.token_ids))
    own = logits[[start + node for node in found.nodes]]
    values, top_ids, top_values = top_logprobs(own, torch.tensor(found.token_ids), num_logprobs)
    return tuple(
        SampledToken(token_id, value, tuple(zip(ids, likeliest, strict=True)))
        for token_id, value, ids, likeliest in zip(
            found.token_ids, values.tolist(), top_ids.tolist(), top_values.tolist(), strict=True
        )
    )

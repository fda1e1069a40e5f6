"""A request inside the engine: what is known of it, how far it is computed, and how its tokens are chosen.

One rule for all work: a request has known tokens and computed tokens, and each step computes part of the gap.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import msgspec

from turnkeep.cache.boundary import Boundary
from turnkeep.cache.encoded_tokens import EncodedTokens
from turnkeep.cache.loss_reason import LossReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from turnkeep.cache.sequence_cache import SequenceCache
    from turnkeep.scheduler.drafts import DraftTree
    from turnkeep.scheduler.step_plan import SampledToken

FinishReason = Literal["stop", "length", "abort", "refused", "error"]
RequestStatus = Literal["waiting", "running", "suspended", "finished"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen. temperature 0 is greedy; ties go to the lowest token id.

    Sampling adds Gumbel noise keyed by (seed, position, token), so the same request with the same seed gives the
    same tokens in any batch, chunking or cache state.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    seed: int = 0  # 64-bit, non-negative
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False  # stop_token_ids are then not looked at
    min_new_tokens: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    num_logprobs: int | None = None  # None: no logprobs; 0: only the chosen token's
    grammar: str | None = None  # the output must be of it; see engine/grammar.py for its form

    @property
    def looks_back(self) -> bool:
        """Penalties and grammars need the tokens so far."""
        has_penalty = self.frequency_penalty != 0.0 or self.presence_penalty != 0.0
        return has_penalty or self.repetition_penalty != 1.0 or self.grammar is not None


URGENT_RETENTION_S = 300.0  # as long as clients' prompt caches usually keep what is not used


@dataclass(slots=True, eq=False)
class Request:
    """The live object; it never leaves the engine. Compared by identity."""

    request_id: str
    token_ids: EncodedTokens  # known tokens: the prompt, then what was generated
    num_prompt_tokens: int
    boundaries: tuple[Boundary, ...]
    sampling: SamplingParams
    conversation_id: str | None = None
    cache_root: str = ""  # tenant and cache salt; prefixes are never shared across roots
    priority: int = 0  # lower goes first
    tenant: str = ""  # who shares fairly with whom
    retention_s: float = 0.0  # for how long the client asks that what this leaves in the cache stays
    may_be_stopped: bool = False  # by who reads its tokens, a few tokens late
    num_cut_tokens: int = 0  # said behind what it was stopped at: known tokens end there
    is_stopped: bool = False  # by its reader: over once its known tokens are computed again
    fair_start: float = 0.0  # given by the scheduler: its place among the tenants' waiting requests
    arrival_s: float = 0.0
    arrival_number: int = 0  # given by the scheduler; orders requests of equal priority
    status: RequestStatus = "waiting"
    cache: SequenceCache | None = None
    draft: DraftTree | None = None  # what may follow its last token, for the next step
    num_draft_nodes: int = 0  # verified so far
    accepted_by_depth: list[int] = field(default_factory=list)  # of them were right, by levels below the root
    is_just_opened: bool = False  # no step has computed anything of it since its cache was opened
    num_cached_tokens: int = 0  # reused at first admission
    num_matched_tokens: int = 0  # what the attention pages alone matched at first admission
    num_lost_tokens: int = 0  # known to have been computed before, at first admission
    loss_reason: LossReason = "none"
    num_suspensions: int = 0
    num_loads: int = 0  # from colder tiers that were started for it
    num_cold_tokens: int = 0  # what the deepest of them was to bring
    num_bypassed: int = 0  # admissions of later requests while this one did not fit
    num_prefix_waits: int = 0  # requests whose prefill of a shared prefix this one waited for
    prefix_leader_id: str | None = None  # the one it waits for now
    finish_reason: FinishReason | None = None
    admitted_s: float | None = None
    first_token_s: float | None = None
    metadata: dict[str, object] = field(default_factory=dict)
    needs_history: bool = field(init=False)  # penalties and grammars look at what was said before

    def __post_init__(self) -> None:
        self.needs_history = self.sampling.looks_back

    @property
    def rank(self) -> tuple[int, int]:
        """Order of service: the smallest goes first, and never has to give way to another."""
        return (self.priority, self.arrival_number)

    @property
    def kept_s(self) -> float:
        """For how long its cache should stay. Who goes before others (a priority below 0) asks for that too, so that a
        flood of requests that can wait does not take the memory of one that must not; the cache bounds all wishes."""
        return max(self.retention_s, URGENT_RETENTION_S if self.priority < 0 else 0.0)

    @property
    def max_computed_tokens(self) -> int:
        """Tokens that are computed by the time it finishes: the last sampled one is never fed to the model."""
        if self.is_stopped:
            return len(self.token_ids)
        return self.num_prompt_tokens + self.sampling.max_new_tokens - 1

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens + self.num_cut_tokens

    @property
    def wanted_boundaries(self) -> Sequence[Boundary]:
        """One that may be stopped late goes back to the end of its prompt then."""
        own = (Boundary(self.num_prompt_tokens, "suspended"),) if self.may_be_stopped else ()
        return (*self.boundaries, *own)

    def cut(self, num_tokens: int) -> None:
        """Its reader stopped it after num_tokens known tokens: what it said behind them is forgotten."""
        self.is_stopped = True
        self.num_cut_tokens = len(self.token_ids) - num_tokens
        self.token_ids = EncodedTokens(self.token_ids[:num_tokens])
        self.draft = None

    def count_draft(self, num_nodes: int, num_accepted: int) -> None:
        """A draft was verified; num_accepted nodes of it, one a level, were right."""
        self.num_draft_nodes += num_nodes
        by_depth = self.accepted_by_depth
        by_depth += [0] * (num_accepted - len(by_depth))
        for level in range(num_accepted):
            by_depth[level] += 1

    def until_end(self, tokens: Sequence[SampledToken]) -> tuple[Sequence[SampledToken], FinishReason | None]:
        """Of newly sampled tokens those up to and with the one that ends it, and how; all and None when none does."""
        sampling = self.sampling
        before = len(self.token_ids) - self.num_prompt_tokens
        stop_token_ids = () if sampling.ignore_eos else sampling.stop_token_ids
        if not stop_token_ids and before + len(tokens) < sampling.max_new_tokens:
            return tokens, None
        for number, token in enumerate(tokens, start=1):
            if token.token_id in stop_token_ids and before + number >= sampling.min_new_tokens:
                return tokens[:number], "stop"
            if before + number >= sampling.max_new_tokens:
                return tokens[:number], "length"
        return tokens, None

    @property
    def is_decoding(self) -> bool:
        """Runs, and all its known tokens but the last, which was sampled, are computed."""
        cache = self.cache
        if cache is None or self.is_stopped:
            return False
        computed = cache.num_computed_tokens
        return computed >= self.num_prompt_tokens and len(self.token_ids) - computed == 1

    @property
    def num_useful_nodes(self) -> int:
        """Tokens that a draft may add to the coming one: those after the last that may be generated are of no use."""
        return self.num_prompt_tokens + self.sampling.max_new_tokens - 1 - len(self.token_ids)

"""What crosses the line between the server and an engine: msgspec structs, token ids only, never text.

Each submitted request gets exactly one Finished event, whatever happens to it.
"""

from __future__ import annotations

import msgspec

from turnkeep.cache.boundary import Boundary
from turnkeep.cache.encoded_tokens import EncodedTokens
from turnkeep.cache.loss_reason import LossReason
from turnkeep.scheduler.request import FinishReason, SamplingParams


class Submit(msgspec.Struct, tag="submit", kw_only=True, omit_defaults=True):
    """Start a request. boundaries: trunk and turn_start positions within prompt_ids, ascending."""

    request_id: str
    prompt_ids: EncodedTokens
    sampling: SamplingParams
    boundaries: tuple[Boundary, ...] = ()
    conversation_id: str | None = None
    cache_root: str = ""
    priority: int = 0
    tenant: str = ""  # waiting requests are admitted in fair shares between tenants
    retention_s: float = 0.0  # the client asks that what this leaves in the cache stays so long; 0: nothing asked
    may_be_stopped: bool = False  # a Stop may come, some tokens after the one that it is meant for


class Abort(msgspec.Struct, tag="abort"):
    """The client is gone: free everything; what is already computed stays cached. Unknown ids are ignored."""

    request_id: str


class Stop(msgspec.Struct, tag="stop"):
    """Finish with reason "stop" (a stop string was seen by the server); no token follows.

    num_repeated_tokens: of its tokens the first so many will be repeated by the next prompt, None: all. Of a request
    that `may_be_stopped` the turn end is then there: it finishes once the engine has gone back.
    """

    request_id: str
    num_repeated_tokens: int | None = None


class EndTurn(msgspec.Struct, tag="end_turn"):
    """After Finished: the next prompt is expected to repeat prompt + output up to `stable_tokens` tokens.

    The engine keeps the turn-end snapshot when it lies at or before that position and drops it otherwise.
    """

    request_id: str
    stable_tokens: int
    has_tool_call: bool | None = None  # a program will answer, not a person; None: not known


class Prepare(msgspec.Struct, tag="prepare"):
    """After EndTurn: the conversation's next prompt will begin with these tokens, which the engine does not hold.

    It computes them when it has nothing else to do, for nobody: no event tells of it, and any request goes first.
    """

    prompt_ids: EncodedTokens
    conversation_id: str | None = None
    cache_root: str = ""


class CloseConversation(msgspec.Struct, tag="close_conversation"):
    """The conversation will not return: its private snapshots become the first victims of eviction."""

    cache_root: str
    conversation_id: str


class Expect(msgspec.Struct, tag="expect"):
    """A request of this conversation has arrived and will be submitted once it is tokenized."""

    cache_root: str
    conversation_id: str


class ReadStats(msgspec.Struct, tag="read_stats"):
    """Ask for one Stats event."""


class Shutdown(msgspec.Struct, tag="shutdown"):
    """Finish the running step and leave; running requests get Finished(abort)."""


class Ready(msgspec.Struct, tag="ready", kw_only=True):
    """Sent once, after the model is loaded and the pools are made."""

    model_name: str
    vocab_size: int
    max_model_len: int
    page_size: int
    num_pages: int
    num_state_rows: int
    max_running: int
    limiting_resource: str  # what bounds the number of running requests, with the numbers, for the start log
    notices: list[str] = []  # each degraded or impossible setting, once


class Loading(msgspec.Struct, tag="loading"):
    """Progress while the model is loaded: done / total in bytes."""

    stage: str
    done: int
    total: int


class Failed(msgspec.Struct, tag="failed"):
    """The engine cannot start (model not found, not enough memory with the numbers, ...). The last event."""

    message: str


class Admitted(msgspec.Struct, tag="admitted"):
    """The request runs. num_cached_tokens were reused; the attention pages alone matched num_matched_tokens.

    num_lost_tokens behind the cached ones were computed before, as far as the engine remembers.
    """

    request_id: str
    num_cached_tokens: int
    num_matched_tokens: int
    num_lost_tokens: int = 0
    loss_reason: LossReason = "none"


class TokenLogprobs(msgspec.Struct, array_like=True):
    logprob: float
    top: list[tuple[int, float]]


class Tokens(msgspec.Struct, tag="tokens", omit_defaults=True):
    """Newly generated tokens, in order."""

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None


class Finished(msgspec.Struct, tag="finished", kw_only=True, omit_defaults=True):
    """The one end of a request. message says why for refused and error (with the resource and the numbers)."""

    request_id: str
    reason: FinishReason
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_suspensions: int = 0
    num_draft_nodes: int = 0  # drafted tokens that were verified, of which so many were right by levels of their tree
    accepted_by_depth: tuple[int, ...] = ()
    queue_s: float = 0.0
    message: str | None = None

    @property
    def num_accepted_nodes(self) -> int:
        """Drafted tokens that were right."""
        return sum(self.accepted_by_depth)


class Stats(msgspec.Struct, tag="stats", kw_only=True, omit_defaults=True):
    """A snapshot of counters and gauges by name; also the heartbeat (sent about once a second)."""

    num_steps: int
    num_running: int
    num_waiting: int
    num_suspended: int
    num_free_pages: int
    num_free_rows: int
    gauges: dict[str, float] = {}
    counters: dict[str, float] = {}  # monotonic since the engine started
    requested: bool = False  # the answer to a ReadStats, not a heartbeat
    reading: int = 0  # how many there were of this engine: a heartbeat repeats what may be older than the last answer


ToEngine = Submit | Abort | Stop | EndTurn | Prepare | CloseConversation | Expect | ReadStats | Shutdown
FromEngine = Ready | Loading | Failed | Admitted | Tokens | Finished | Stats

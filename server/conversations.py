"""Which conversation a request belongs to, and what became of the tokens of its turns.

An id is a hint: it steers retention and reporting, never correctness (reuse is always decided by tokens). Ids live
under a root made of tenant and cache salt, so equal ids of two tenants never meet. Pure; the clock is passed in.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from turnkeep.server.common_prefix import common_prefix_tokens

MAX_ID_BYTES = 256
OWN_SOURCES = ("conversation_id", "x-conversation-id")
FINAL_HEADERS = ("x-conversation-final", "x-dynamo-session-final")
MAX_TURNS = 64  # turns kept per conversation, for the report
MAX_BRANCHES = 8  # prompts kept per conversation to compare the next one with
OPENS_PER_TRIM = 256


@dataclass(frozen=True, slots=True)
class ConversationTag:
    """The id a request carries. source: the field or header it came from ("none" without one).

    conflicting: other sources that name another conversation. shared: the source may be shared by many conversations.
    """

    conversation_id: str | None
    source: str
    conflicting: tuple[str, ...] = ()
    shared: bool = False
    num_unusable: int = 0  # texts in these places that cannot be ids


NO_TAG = ConversationTag(None, "none")


def is_valid_id(value: str) -> bool:
    """Whether a text can be a conversation id: printable, 1 to 256 bytes, no path."""
    if not value or not value.isprintable():
        return False
    if "/" in value or "\\" in value or value in (".", ".."):
        return False
    return len(value.encode("utf-8", "surrogatepass")) <= MAX_ID_BYTES


def resolve_conversation(
    headers: Mapping[str, str], body: Mapping[str, Any], *, extra_headers: Sequence[str] = ()
) -> ConversationTag:
    """The conversation of a request: the first usable id in the order of precedence; unusable ones are passed over.

    Header names in any case, with "-" or "_". extra_headers: names that count last, where an operator wants them.
    """
    names = {name.lower().replace("_", "-"): value for name, value in headers.items()}
    given = [(source, value) for source, value in _signals(names, body, extra_headers) if isinstance(value, str)]
    signals = [(source, value) for source, value in given if is_valid_id(value)]
    num_unusable = len(given) - len(signals)
    if not signals:
        return replace(NO_TAG, num_unusable=num_unusable)
    source, chosen = signals[0]
    # A cache key is allowed to differ from the conversation it serves.
    conflicting = tuple(
        name for name, value in signals[1:] if value != chosen and name not in ("prompt_cache_key", *extra_headers)
    )
    return ConversationTag(chosen, source, conflicting, source == "prompt_cache_key", num_unusable)


def is_last_turn(headers: Mapping[str, str]) -> bool:
    """Whether the client says that its conversation ends with this request."""
    names = {name.lower().replace("_", "-"): value for name, value in headers.items()}
    return any(names.get(name, "").strip().lower() in ("1", "true") for name in FINAL_HEADERS)


def _signals(
    headers: Mapping[str, str], body: Mapping[str, Any], extra_headers: Sequence[str]
) -> Iterator[tuple[str, object]]:
    """(source, value) of every place an id may stand, by precedence."""
    yield "previous_response_id", body.get("previous_response_id")
    conversation = body.get("conversation")
    yield "conversation", conversation.get("id") if isinstance(conversation, Mapping) else conversation
    yield "conversation_id", body.get("conversation_id")
    for name in ("x-conversation-id", "x-dynamo-session-id"):
        yield name, headers.get(name)
    yield "session_id", body.get("session_id")
    for outer, inner in (("conversation_params", "conversation_id"), ("vllm_xargs", "session_id")):
        nested = body.get(outer)
        yield f"{outer}.{inner}", nested.get(inner) if isinstance(nested, Mapping) else None
    yield "x-claude-code-session-id", _with_agent(headers)
    yield "metadata.user_id", _session_of_user(body.get("metadata"))
    for name in ("thread-id", "session-id", "x-session-id", "x-session-affinity"):
        yield name, headers.get(name)
    yield "prompt_cache_key", body.get("prompt_cache_key")
    for name in extra_headers:
        yield name, headers.get(name.lower().replace("_", "-"))


def _with_agent(headers: Mapping[str, str]) -> str | None:
    """The session of a coding client; its sub-agents share the session and have ids of their own."""
    session = headers.get("x-claude-code-session-id")
    agent = headers.get("x-claude-code-agent-id")
    return f"{session}:{agent}" if session and agent else session


def _session_of_user(metadata: object) -> object:
    user = metadata.get("user_id") if isinstance(metadata, Mapping) else None
    if not isinstance(user, str):
        return None
    if not user.startswith("{"):  # a person, except where older clients wrote their session behind it
        return user.rpartition("_session_")[2] if "_session_" in user else None
    try:
        parsed = json.loads(user)
    except (ValueError, RecursionError):
        return None
    return parsed.get("session_id") if isinstance(parsed, dict) else None


def cache_root(tenant: str | None, cache_salt: str | None) -> str:
    """The root under which prefixes may be shared. A client's salt can only divide its tenant's root further."""
    if tenant is None and cache_salt is None:
        return ""
    digest = hashlib.sha256()
    for part in (tenant, cache_salt):
        data = b"" if part is None else part.encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % (-1 if part is None else len(data)))
        digest.update(data)
    return digest.hexdigest()[:32]


@dataclass(slots=True)
class TurnRecord:
    """The tokens of one turn. cached + lost + new = prompt; all but the cached ones are computed.

    lost_tokens: tokens that had been computed before, by why they are computed again (cache/loss_reason.py; salt: under
    another cache salt of the same tenant). num_held_tokens: what the engine had computed on this branch. Of these,
    template tokens are not repeated by the prompt. From `first_difference` on the prompt reads differently than the
    branch it shares most with (None: it is the first, or repeats all of it), which is in the message of index
    `first_different_message` (None: not known, or behind all messages).
    """

    request_id: str
    ended_s: float
    branch: int
    num_prompt_tokens: int
    num_matched_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_held_tokens: int
    num_new_tokens: int
    num_lost_template: int
    lost_tokens: dict[str, int]
    first_difference: int | None
    finish_reason: str
    stable_tokens: int | None = None
    ttft_s: float | None = None
    first_different_message: int | None = None


@dataclass(slots=True)
class _Branch:
    number: int
    held: array[int]  # tokens the engine has computed: prompt and output without the last sampled token
    used: int


class Conversation:
    """Recent turns of one conversation, and the token sequences that its next prompt may continue."""

    def __init__(self, root: str, conversation_id: str, started_s: float, clock: Callable[[], float]) -> None:
        self.root = root
        self.conversation_id = conversation_id
        self.started_s = started_s
        self.last_used_s = started_s
        self.turns: deque[TurnRecord] = deque(maxlen=MAX_TURNS)
        self.num_turns = 0
        self.totals: Counter[str] = Counter()
        self.resalted_from: Conversation | None = None  # the same id of the same tenant, under another cache salt
        self._branches: list[_Branch] = []
        self._num_branches = 0
        self._clock = clock

    @property
    def num_branches(self) -> int:
        """Branches seen so far (a retried or edited turn, a side call)."""
        return self._num_branches

    @property
    def num_held_tokens(self) -> int:
        """Token ids kept for comparison."""
        return sum(len(branch.held) for branch in self._branches)

    def forget_tokens(self) -> None:
        """Free the token ids; the next turn then counts as the first of a branch."""
        self._branches.clear()

    def record_turn(
        self,
        *,
        request_id: str,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        num_matched_tokens: int,
        num_cached_tokens: int,
        finish_reason: str,
        stable_tokens: int | None = None,
        ttft_s: float | None = None,
        lost_tokens: Mapping[str, int] | None = None,
    ) -> TurnRecord:
        """Account for a finished turn. Lengths as the engine reported them, in tokens; lost_tokens: what it remembers
        of why it did not reuse more. What is known here and not there was evicted, or lies under another salt."""
        prompt = array("i", prompt_ids)
        is_first = not self._branches
        branch, nearest = self._continued_branch(prompt)
        shared = nearest if branch is not None else 0
        num_held = len(branch.held) if branch is not None else 0
        is_different = not is_first and nearest < len(prompt) and (branch is None or nearest < num_held)
        num_matched = max(num_matched_tokens, num_cached_tokens)
        # The last prompt token is always computed, so it is never lost.
        limit = max(len(prompt) - 1, 0)
        lost = Counter(lost_tokens or {})
        # What the engine does not know of in this root: held once, or held under another salt.
        in_engine = max(num_matched, num_cached_tokens + lost.total())
        lost["no_snapshot"] += in_engine - num_cached_tokens - lost.total()
        here = max(min(shared, limit), in_engine)
        lost["evicted"] += here - in_engine
        known = max(here, min(self._shared_elsewhere(prompt), limit))
        lost["salt"] += known - here
        number = branch.number if branch is not None else self._num_branches
        record = TurnRecord(
            request_id=request_id,
            ended_s=self._clock(),
            branch=number,
            num_prompt_tokens=len(prompt),
            num_matched_tokens=num_matched_tokens,
            num_cached_tokens=num_cached_tokens,
            num_output_tokens=len(output_ids),
            num_held_tokens=num_held,
            num_new_tokens=len(prompt) - known,
            num_lost_template=num_held - shared if shared < len(prompt) else 0,
            lost_tokens=dict(+lost),
            first_difference=nearest if is_different else None,
            finish_reason=finish_reason,
            stable_tokens=stable_tokens,
            ttft_s=ttft_s,
        )
        self._keep(branch, number, prompt, output_ids)
        self._count(record)
        return record

    def _continued_branch(self, prompt: array[int]) -> tuple[_Branch | None, int]:
        """The branch that shares most with a prompt, and how much that is. A prompt that shares only its beginning
        (less than half of the branch and of itself: a side call with the same system text) starts a branch of its own:
        None."""
        best, best_shared = None, 0
        for branch in self._branches:
            shared = common_prefix_tokens(branch.held, prompt)
            if shared > best_shared:
                best, best_shared = branch, shared
        if best is None or 2 * best_shared < min(len(best.held), len(prompt)):
            return None, best_shared
        return best, best_shared

    def _shared_elsewhere(self, prompt: array[int]) -> int:
        """What the first prompt shares with the same conversation under another salt; known once, then forgotten."""
        other, self.resalted_from = self.resalted_from, None
        if other is None:
            return 0
        return max((common_prefix_tokens(branch.held, prompt) for branch in other._branches), default=0)

    def _keep(self, branch: _Branch | None, number: int, prompt: array[int], output_ids: Sequence[int]) -> None:
        held = prompt + array("i", output_ids[: max(0, len(output_ids) - 1)])
        self.num_turns += 1
        if branch is None:
            self._num_branches += 1
            branch = _Branch(number, held, self.num_turns)
            self._branches.append(branch)
            if len(self._branches) > MAX_BRANCHES:
                self._branches.remove(min(self._branches, key=lambda other: other.used))
        branch.held, branch.used = held, self.num_turns

    def _count(self, record: TurnRecord) -> None:
        self.turns.append(record)
        self.last_used_s = record.ended_s
        self.totals["prompt_tokens"] += record.num_prompt_tokens
        self.totals["cached_tokens"] += record.num_cached_tokens
        self.totals["output_tokens"] += record.num_output_tokens
        self.totals["new_tokens"] += record.num_new_tokens
        self.totals["lost_template"] += record.num_lost_template
        for reason, number in record.lost_tokens.items():
            self.totals[f"lost_{reason}"] += number


class ConversationTable:
    """Conversations by root and id: bounded, least recently used first out, gone after ttl_s without use.

    Forgetting one loses its report, never correctness. counters are monotonic. Not safe across threads.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        max_conversations: int = 65536,
        ttl_s: float = 86400.0,
        max_held_tokens: int = 16 * 1024 * 1024,
    ) -> None:
        self._clock = clock
        self._max_conversations = max_conversations
        self._ttl_s = ttl_s
        self._max_held_tokens = max_held_tokens
        self._num_opens = 0
        self._table: OrderedDict[tuple[str, str], Conversation] = OrderedDict()
        self._roots: OrderedDict[tuple[str, str], str] = OrderedDict()  # tenant, id -> the root it was used under last
        self.counters: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._table)

    def open(self, root: str, conversation_id: str, tenant: str = "") -> Conversation:
        """The conversation, made on first sight; it becomes the most recently used one. tenant: who may have used it
        under another salt."""
        self._expire()
        key = (root, conversation_id)
        conversation = self._table.pop(key, None)
        now = self._clock()
        if conversation is None:
            conversation = Conversation(root, conversation_id, now, self._clock)
            last_root = self._roots.get((tenant, conversation_id), root)
            conversation.resalted_from = self._table.get((last_root, conversation_id))
            self.counters["opened"] += 1
        conversation.last_used_s = now
        self._table[key] = conversation
        self._roots[tenant, conversation_id] = root
        self._roots.move_to_end((tenant, conversation_id))
        if len(self._roots) > self._max_conversations:
            self._roots.popitem(last=False)
        self._num_opens += 1
        if self._num_opens % OPENS_PER_TRIM == 0:
            self._trim()
        while len(self._table) > self._max_conversations:
            self._table.popitem(last=False)
            self.counters["evicted"] += 1
        return conversation

    def find(self, root: str, conversation_id: str) -> Conversation | None:
        """The conversation if it is known, without touching its age."""
        self._expire()
        return self._table.get((root, conversation_id))

    def newest(self, root: str, limit: int) -> list[Conversation]:
        """The conversations of a root that were used last, newest first, without touching their age."""
        found = (conversation for key, conversation in reversed(self._table.items()) if key[0] == root)
        return list(islice(found, limit))

    def close(self, root: str, conversation_id: str) -> bool:
        """Forget a conversation. False: it was not known."""
        found = self._table.pop((root, conversation_id), None) is not None
        self.counters["closed"] += found
        return found

    def note_tag(self, tag: ConversationTag) -> None:
        """Count where ids come from and how often signals disagree."""
        self.counters[f"source:{tag.source}"] += 1
        self.counters["conflicts"] += bool(tag.conflicting)
        self.counters["unusable_ids"] += tag.num_unusable

    def _trim(self) -> None:
        """Free token ids of the least recently used conversations beyond the bound."""
        num_held = sum(conversation.num_held_tokens for conversation in self._table.values())
        for conversation in self._table.values():
            if num_held <= self._max_held_tokens:
                return
            num_held -= conversation.num_held_tokens
            conversation.forget_tokens()
            self.counters["trimmed"] += 1

    def _expire(self) -> None:
        limit = self._clock() - self._ttl_s
        while self._table:
            key, oldest = next(iter(self._table.items()))
            if oldest.last_used_s >= limit:
                return
            del self._table[key]
            self.counters["expired"] += 1
